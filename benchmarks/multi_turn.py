"""Conversations through the proxy, with and without reuse of what the decode server holds: the time
to each turn's first token, and how many tokens the prefill server computes for it.

Two prefill servers share one decode server: one keeps the prompts that it has computed in its own
prefix cache, as vLLM does by itself; the other has nothing of earlier turns, as where each goes to
another server, or where its cache is too small for its conversations.  Each stands behind two
proxies, one of which names the decode server to it (`--reuse-blocks`).  The four take turns, in
another order each round, with the same conversation, each under a cache salt of its own, so that
none finds another's blocks anywhere.  A conversation's third turn has a history of `--histories`
tokens: two prompts and two answers.  All answers must be equal, or the run fails; on GPUs, where
the last bits of bfloat16 depend on what is computed together, it counts those that are not.

    python benchmarks/multi_turn.py --out benchmarks/results/multi_turn_cpu
    python benchmarks/multi_turn.py --histories 500 2000 4000 --rounds 9 --out OUT
    python benchmarks/multi_turn.py --gpus 0 1 --histories 8000 --answer-tokens 256 --out OUT

On GPUs, both prefill servers' and the decode server's, the model is 8B-shaped.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from handovers.variants import Setup
from machine import load_average, machine
from moving import engines as gpu_engines
from moving.engines import Shape

from tests.kit import cluster, parity
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.prompts import PRINTABLE
from tests.kit.servers import ProxyServer, Server, VllmServer
from tests.kit.tiny_kinds import BOS_ID, EOS_ID
from tests.kit.tiny_model import write_tokenizer

CACHED, BARE = "P with its own cache", "P without"
OFF, ON = "off", "on"
NUM_TURNS = 4
MEASURED_TURN = 3
VOCABULARY = 512
ON_CPUS = (
    f"Llama, 4 layers of 512, float32, one thread a server, blocks of {cluster.BLOCK_SIZE} tokens"
)
ON_GPUS = "Llama, 8B-shaped, bfloat16, blocks of 16 tokens"
COMPUTED = "vllm:prompt_tokens_by_source_total"
MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Sample:
    """One turn of one conversation: tokens of its prompt, those that P computed, blocks that P read
    and read in vain, and milliseconds to the first token."""

    history: int
    turn: int
    engines: str
    reuse: str
    prompt: int
    computed: float
    blocks: float
    in_vain: float
    first_token_ms: float


@dataclass(frozen=True)
class Variant:
    """A proxy, and the prefill server behind it."""

    engines: str
    reuse: str
    proxy: Server
    prefill: Server


def on_gpus(args: argparse.Namespace, folder: Path) -> list[VllmServer]:
    """Both prefill servers and the decode server, not started."""
    setup = Setup(
        *("cuda", folder),
        max_tokens=longest_of(args),
        concurrency=2,
        gpus=args.gpus,
        gpu_memory=0.0,
        start_seconds=args.start_seconds,
        server_args=args.server_args,
    )
    source, target = args.gpus
    bare = ("--no-enable-prefix-caching",)
    shapes = [
        Shape("prefill", source, args.kv_gib),
        Shape("prefill", source, args.kv_gib, bare),
        Shape("decode", target, args.kv_gib),
    ]
    return gpu_engines.make(setup, shapes, 2048, extra_of(args))


def longest_of(args: argparse.Namespace) -> int:
    """Tokens that the longest conversation may come to."""
    return max(args.histories) + 2 * (args.new_tokens + args.answer_tokens) + 64


def extra_of(args: argparse.Namespace) -> dict[str, Any]:
    """Of the connector's configuration."""
    return {
        "reuse_blocks": True,
        "reuse_lookup_timeout": args.lookup_seconds,
        "reuse_min_tokens": args.min_tokens,
    }


def on_cpus(args: argparse.Namespace, folder: Path) -> list[VllmServer]:
    """The same on CPUs."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL, indent=1))
    write_tokenizer(model, VOCABULARY)
    longest = longest_of(args)
    common = ["--load-format", "dummy", "--max-model-len", str(longest)]
    num_blocks = 4 * (NUM_TURNS * (longest // cluster.BLOCK_SIZE + 1))
    common += ["--num-gpu-blocks-override", str(num_blocks)]

    def engine(name: str, role: str, *more: str) -> VllmServer:
        config = cluster.kv_transfer_config(role, extra=extra_of(args))
        return cluster.engine_server(name, model, folder, config, args=[*common, *more])

    return [
        engine("prefill-cached", "kv_producer"),
        engine("prefill-bare", "kv_producer", "--no-enable-prefix-caching"),
        engine("decode", "kv_consumer"),
    ]


@contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[list[Variant]]:
    """All servers, ready."""
    made = (on_gpus if args.gpus else on_cpus)(args, folder)
    cached, bare, decode = made
    with cluster.all_ready(made), ExitStack() as stack:
        variants: list[Variant] = []
        for engines, prefill in ((CACHED, cached), (BARE, bare)):
            for reuse, options in ((OFF, []), (ON, ["--reuse-blocks"])):
                proxy = ProxyServer(
                    f"{prefill.name}-{reuse}",
                    [prefill.url],
                    [decode.url],
                    folder,
                    args=[*cluster.PATIENT_PROXY_ARGS, *options],
                )
                variants.append(Variant(engines, reuse, stack.enter_context(proxy), prefill))
        yield variants


def ask(url: str, prompt: Sequence[int], salt: str, count: int) -> tuple[float, list[int]]:
    """Milliseconds to the first token, and the answer."""
    body = {
        "model": cluster.MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
        "return_token_ids": True,
    }
    first_ms, tokens, begun = 0.0, list[int](), time.perf_counter()
    headers = {"X-Session-ID": salt}
    with parity.stream(f"{url}/v1/completions", body, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url}: {response.status_code} {response.read()!r}")
        for line in parity.lines_of(response.iter_text()):
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            tokens += [token for one in event["choices"] for token in one.get("token_ids") or []]
            if tokens and not first_ms:
                first_ms = (time.perf_counter() - begun) * 1e3
    return first_ms, tokens


def conversation(
    one: Variant, args: argparse.Namespace, history: int, number: int
) -> tuple[list[Sample], list[list[int]]]:
    """A conversation's turns, and its answers; the same for the same number."""
    dice, tokens = random.Random(number), list[int]()
    new = history - args.answer_tokens - (args.new_tokens + args.answer_tokens)
    samples: list[Sample] = []
    answers: list[list[int]] = []
    salt = f"{one.engines} {one.reuse} {history} {number}"
    for turn in range(1, NUM_TURNS + 1):
        tokens += [dice.choice(PRINTABLE) for _ in range(new)]
        new = args.new_tokens
        before = scrape(one.prefill.url)
        first_ms, answer = ask(one.proxy.url, tokens, salt, args.answer_tokens)
        figures = wait_for_added(one.prefill.url, before, "vllm:request_success_total", 1)
        samples.append(_sample(one, history, turn, len(tokens), figures, first_ms))
        answers.append(answer)
        tokens += answer
    return samples, answers


def _sample(
    one: Variant, history: int, turn: int, prompt: int, figures: Metrics, first_ms: float
) -> Sample:
    return Sample(
        history,
        turn,
        one.engines,
        one.reuse,
        prompt,
        figures.total(COMPUTED, source="local_compute"),
        figures.total("vllm:commext_nixl_reuse_blocks_total"),
        figures.total("vllm:commext_nixl_reuse_recomputed_blocks_total"),
        first_ms,
    )


def measure(args: argparse.Namespace, variants: Sequence[Variant]) -> tuple[list[Sample], int]:
    """All turns but those of the first round, which connects and warms up; and how many answers
    are not those of the round's first variant."""
    samples: list[Sample] = []
    differ = 0
    for history in args.histories:
        for number in range(args.rounds + 1):
            first = number % len(variants)
            answers: list[list[list[int]]] = []
            for one in [*variants[first:], *variants[:first]]:
                taken, said = conversation(one, args, history, number)
                answers.append(said)
                samples += taken if number else []
            differ += sum(
                one != other
                for said in answers
                for one, other in zip(said, answers[0], strict=True)
            )
            if differ and not args.gpus:
                raise RuntimeError(f"conversation {number} of {history} tokens: answers differ")
            print(f"history {history}, round {number} of {args.rounds}", flush=True)
    return samples, differ


Row = dict[str, Any]


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Medians, with and without reuse side by side."""
    rows: list[Row] = []
    keys = sorted({(one.history, one.engines, one.turn) for one in samples})
    for history, engines, turn in keys:
        of = {
            reuse: [
                one
                for one in samples
                if (one.history, one.engines, one.turn, one.reuse)
                == (history, engines, turn, reuse)
            ]
            for reuse in (OFF, ON)
        }
        off, on = (statistics.median(one.first_token_ms for one in of[way]) for way in (OFF, ON))
        rows.append(
            {
                "history": history,
                "engines": engines,
                "turn": turn,
                "prompt": of[ON][0].prompt,
                "computed, off": statistics.median(one.computed for one in of[OFF]),
                "computed, on": statistics.median(one.computed for one in of[ON]),
                "most computed, on": max(one.computed for one in of[ON]),
                "blocks read in vain": sum(one.in_vain for one in of[ON]),
                "first token ms, off": off,
                "first token ms, on": on,
                "earlier %": 100 * (1 - on / off),
            }
        )
    return rows


def markdown(rows: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """The table, the turn with the named history in bold."""
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    for row in rows:
        cells = [f"{one:.4g}" if isinstance(one, float) else str(one) for one in row.values()]
        if row["turn"] == MEASURED_TURN:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {key}: {value}" for key, value in notes.items()), ""])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--histories", type=int, nargs="+", default=[500, 2000], help="tokens before turn 3")
    add("--new-tokens", type=int, default=48, help="of each further turn")
    add("--answer-tokens", type=int, default=64)
    add("--rounds", type=int, default=7, help="measured conversations of each kind")
    add("--lookup-seconds", type=float, default=0.5, help="reuse_lookup_timeout")
    add("--min-tokens", type=int, default=0, help="reuse_min_tokens")
    add("--gpus", nargs=2, default=[], metavar=("P", "D"), help="run there, not on CPUs")
    add("--kv-gib", type=float, default=16.0, help="KV cache of each server on a GPU")
    add("--start-seconds", type=float, default=400.0, help="for one there to become ready")
    add("--commit", default="?")
    add("--out", type=Path, help="write OUT.md and OUT.json")
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="there; the last")
    args = parser.parse_args()
    least = 2 * args.answer_tokens + args.new_tokens + 1
    if min(args.histories) < least:
        parser.error(f"--histories: expected at least {least}, for what two turns bring")
    return args


def main() -> int:
    args = arguments()
    notes: dict[str, Any] = {
        "machine": machine("nixl", "torch", cuda=bool(args.gpus)),
        "commit": args.commit,
        "load average at the start": load_average(),
        "model": ON_CPUS if not args.gpus else ON_GPUS,
        "command": " ".join(sys.argv),
    }
    with (
        tempfile.TemporaryDirectory(prefix="multi-turn-") as folder,
        started(args, Path(folder)) as variants,
    ):
        samples, notes["answers that differ"] = measure(args, variants)
    notes["load average at the end"] = load_average()
    rows = rows_of(samples)
    text = markdown(rows, notes)
    print(text)
    if args.out:
        content = {"notes": notes, "rows": rows, "samples": [asdict(one) for one in samples]}
        args.out.with_suffix(".md").write_text(
            f"# Turns of conversations, reuse off and on\n\n{text}"
        )
        args.out.with_suffix(".json").write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
