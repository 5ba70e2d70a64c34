"""Conversations through the proxy, with and without reuse of what the decode server holds: the time
to each turn's first token, and how many tokens the prefill server computes for it.

Two prefill servers share one decode server: one keeps the prompts that it has computed in its own
prefix cache, as vLLM does by itself; the other has nothing of earlier turns, as where each goes to
another server, or where its cache is too small for its conversations.  Each stands behind two
proxies, one of which names the decode server to it (`--reuse-blocks`).  The four take turns, in
another order each round, with the same conversation, each under a cache salt of its own, so that
none finds another's blocks anywhere.  A conversation's third turn has a history of `--histories`
tokens: two prompts and two answers.  All answers must be equal, or the run fails.

    python benchmarks/multi_turn.py --out benchmarks/results/multi_turn_cpu
    python benchmarks/multi_turn.py --histories 500 2000 4000 --rounds 9 --out OUT
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
from machine import load_average, machine

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


@contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[list[Variant]]:
    """All servers, ready."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL, indent=1))
    write_tokenizer(model, VOCABULARY)
    longest = max(args.histories) + 2 * (args.new_tokens + args.answer_tokens) + 64
    common = ["--load-format", "dummy", "--max-model-len", str(longest)]
    num_blocks = 4 * (NUM_TURNS * (longest // cluster.BLOCK_SIZE + 1))
    common += ["--num-gpu-blocks-override", str(num_blocks)]

    def engine(name: str, role: str, *more: str) -> VllmServer:
        config = cluster.kv_transfer_config(
            role, extra={"reuse_blocks": True, "reuse_lookup_timeout": args.lookup_seconds}
        )
        return cluster.engine_server(name, model, folder, config, args=[*common, *more])

    prefills = {
        CACHED: engine("prefill-cached", "kv_producer"),
        BARE: engine("prefill-bare", "kv_producer", "--no-enable-prefix-caching"),
    }
    decode = engine("decode", "kv_consumer")
    with cluster.all_ready([*prefills.values(), decode]), ExitStack() as stack:
        variants: list[Variant] = []
        for engines, prefill in prefills.items():
            for reuse, options in ((OFF, []), (ON, ["--reuse-blocks"])):
                made = ProxyServer(
                    f"{prefill.name}-{reuse}",
                    [prefill.url],
                    [decode.url],
                    folder,
                    args=[*cluster.PATIENT_PROXY_ARGS, *options],
                )
                variants.append(Variant(engines, reuse, stack.enter_context(made), prefill))
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


def measure(args: argparse.Namespace, variants: Sequence[Variant]) -> list[Sample]:
    """All turns but those of the first round, which connects and warms up."""
    samples: list[Sample] = []
    for history in args.histories:
        for number in range(args.rounds + 1):
            first = number % len(variants)
            answers: list[list[list[int]]] = []
            for one in [*variants[first:], *variants[:first]]:
                taken, said = conversation(one, args, history, number)
                answers.append(said)
                samples += taken if number else []
            if any(said != answers[0] for said in answers):
                raise RuntimeError(f"conversation {number} of {history} tokens: answers differ")
            print(f"history {history}, round {number} of {args.rounds}", flush=True)
    return samples


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
    add("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    least = 2 * args.answer_tokens + args.new_tokens + 1
    if min(args.histories) < least:
        parser.error(f"--histories: expected at least {least}, for what two turns bring")
    return args


def main() -> int:
    args = arguments()
    notes: dict[str, Any] = {
        "machine": machine("nixl"),
        "load average at the start": load_average(),
        "model": "Llama, 4 layers of 512, float32, one thread a server, blocks of "
        f"{cluster.BLOCK_SIZE} tokens",
        "command": " ".join(sys.argv),
    }
    with (
        tempfile.TemporaryDirectory(prefix="multi-turn-") as folder,
        started(args, Path(folder)) as variants,
    ):
        samples = measure(args, variants)
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
