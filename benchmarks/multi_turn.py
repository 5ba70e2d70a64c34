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

With `--others` it measures what third turns cost others, see `turns/others.py`:

    python benchmarks/multi_turn.py --others 4 0 --others-tokens 32 --turns 3 --rounds 3 \
        --histories 500 --out OUT
    python benchmarks/multi_turn.py --gpus 0 1 --others 16 0 --histories 8000 \
        --answer-tokens 256 --min-tokens 1024 --rounds 3 --out OUT
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from machine import load_average, machine
from turns import others
from turns.engines import NUM_TURNS, OFF, ON, ON_CPUS, ON_GPUS, Variant, started

from tests.kit import cluster, parity
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.prompts import PRINTABLE

MEASURED_TURN = 3
COMPUTED = "vllm:prompt_tokens_by_source_total"


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
        if row.get("turn") == MEASURED_TURN:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {key}: {value}" for key, value in notes.items()), ""])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--histories",
        type=int,
        nargs="+",
        default=[500, 2000],
        help="tokens before turn 3; one with --others",
    )
    add("--new-tokens", type=int, default=48, help="of each further turn")
    add("--answer-tokens", type=int, default=64)
    add("--rounds", type=int, default=7, help="measured conversations of each kind")
    add("--lookup-seconds", type=float, default=0.5, help="reuse_lookup_timeout")
    add("--others", type=int, nargs=2, default=[0, 0], metavar=("D", "P"), help="requests at each")
    add("--others-tokens", type=int, default=128, help="of the answer of each of them")
    add("--turns", type=int, default=6, help="third turns beside them, one after the other")
    add("--seconds", type=float, default=4.0, help="in which these begin")
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
    if any(args.others) and len(args.histories) > 1:
        parser.error("--others: expected one of --histories")
    return args


def main() -> int:
    args, begun = arguments(), time.monotonic()
    notes: dict[str, Any] = {
        "machine": machine("nixl", "torch", cuda=bool(args.gpus)),
        "commit": args.commit,
        "load average at the start": load_average(),
        "model": ON_CPUS if not args.gpus else ON_GPUS,
        "command": shlex.join(["python", *sys.argv]),
    }
    with (
        tempfile.TemporaryDirectory(prefix="multi-turn-") as folder,
        started(args, Path(folder)) as variants,
    ):
        notes["seconds to start"] = f"{time.monotonic() - begun:.0f}"
        print(f"ready after {notes['seconds to start']} s", flush=True)
        if any(args.others):
            samples = others.measure(args, variants)
            rows = others.rows_of(samples)
        else:
            samples, notes["answers that differ"] = measure(args, variants)
            rows = rows_of(samples)
    notes["seconds in all"] = f"{time.monotonic() - begun:.0f}"
    notes["load average at the end"] = load_average()
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
