"""The hand-over from prefill to decode: from the prefill server's answer to the decode server's
first token, and what it is made of.

A plain server, vLLM's NixlConnector, ours, and ours behind the proxy, which asks one server after
the other, or both at once, so that chunks are read while the prefill runs and first tokens sent
before that. All take turns, each while the others are stopped, in another order each round, and
each after a short request that wakes them up. The read's share comes from the decode server's
metrics; "rest" is the hand-over without it: HTTP, parsing, scheduling, the last token. Where the
first token comes from the prefill server it does not wait for the read, and what the hand-over
costs shows in the second one. Without the proxy the client does what a proxy does, one step after
the other.

    python benchmarks/handover.py --out benchmarks/results/handover_cpu
    python benchmarks/handover.py --device cuda --cells 1000x1 8000x1 8000x8 --out OUT
    python benchmarks/handover.py --engines plain "ours, proxy" "ours, proxy, streamed" --out OUT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import load
import models
import pages
import repository  # noqa: F401
from engines import Setup, Variant, alone
from handovers.variants import NAMES, PLAIN, PROXIED, read_figures, started
from load import Stream
from machine import load_average, machine

from tests.kit.cluster import MODEL_NAME
from tests.kit.metrics import scrape
from tests.kit.parity import PREFILL_PARAMS

COLUMNS = (
    *("prefill", "hand-over", "read", "rest", "first token", "second token", "TPOT"),
    *("MB", "descriptors", "GB/s", "mapped %", "first from P %"),
)
DEFAULT_CELLS = [(200, 1), (200, 8), (800, 1), (800, 8)]
WAKING_TOKENS = 64
REPORT_SECONDS = 0.5
"""Until a step's statistics stand on the metrics page."""
Row = dict[str, Any]


@dataclass
class Answer:
    """One request; prefilled: seconds from sending it to the prefill server's answer, 0 without."""

    stream: Stream
    prefilled: float

    def figures(self) -> dict[str, float]:
        """Milliseconds, by name."""
        tokens = [self.prefilled + one for one in self.stream.token_seconds()]
        return {
            "prefill": self.prefilled * 1e3,
            "hand-over": (tokens[0] - self.prefilled) * 1e3 if self.prefilled else 0.0,
            "first token": tokens[0] * 1e3,
            "second token": tokens[1] * 1e3,
            "TPOT": (tokens[-1] - tokens[1]) / (len(tokens) - 2) * 1e3,
        }


def ask_all(
    prefill_url: str | None,
    url: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
) -> list[Answer]:
    """All prompts at the same time.

    Raises:
        RuntimeError: an answer that is no success.
    """

    async def ask(session: aiohttp.ClientSession, prompt: Sequence[int]) -> Answer:
        stream, prefilled = Stream(prompt, output_tokens), 0.0
        if prefill_url is not None:
            begun = time.perf_counter()
            body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0.0, "max_tokens": 1}
            body["kv_transfer_params"] = dict(PREFILL_PARAMS)
            async with session.post(f"{prefill_url}/v1/completions", json=body) as response:
                params = (await response.json()).get("kv_transfer_params")
            if response.status != 200 or not params:
                raise RuntimeError(f"{prefill_url}: HTTP {response.status}, parameters {params}")
            stream.extra, prefilled = {"kv_transfer_params": params}, time.perf_counter() - begun
        await load.read_all(session, url, [stream], 1)
        return Answer(stream, prefilled)

    async def run() -> list[Answer]:
        async with load.new_session() as session:
            return await asyncio.gather(*(ask(session, one) for one in prompts))

    return asyncio.run(run())


def turn(
    name: str, one: Variant, prompts: Sequence[Sequence[int]], output_tokens: int
) -> tuple[list[Answer], dict[str, float]]:
    """A variant's answers to some prompts at a time, and its medians."""
    decode = None if name == PLAIN else one.servers["decode"].url
    source = None if name == PLAIN or name in PROXIED else one.servers["prefill"].url
    ask_all(source, one.url, [prompts[0][:WAKING_TOKENS]], 2)
    if decode is not None:
        time.sleep(REPORT_SECONDS)
    before = None if decode is None else scrape(decode)
    answers = ask_all(source, one.url, prompts, output_tokens)
    each = [answer.figures() for answer in answers]
    figures = {key: statistics.median(row[key] for row in each) for key in each[0]}
    if decode is not None and before is not None:
        time.sleep(REPORT_SECONDS)
        figures |= read_figures(name, scrape(decode).minus(before))
        if not figures.get("first from P %"):
            figures["rest"] = figures["hand-over"] - figures["read"]
    return answers, figures


@dataclass
class Cell:
    """Prompts of one length, so many at a time: what each variant's rounds have shown."""

    tokens: int
    at_once: int
    samples: dict[str, list[dict[str, float]]]
    num_equal: int = 0
    num_answers: int = 0

    def add_round(
        self,
        variants: Mapping[str, Variant],
        prompts: Sequence[Sequence[int]],
        order: Sequence[str],
        output_tokens: int,
        *,
        counts: bool,
    ) -> None:
        """Every variant's turn, in this order; where it *counts* its figures are kept."""
        tokens: dict[str, list[list[int]]] = {}
        for name in order:
            with alone(variants, name) if len(variants) > 1 else nullcontext():
                answers, figures = turn(name, variants[name], prompts, output_tokens)
            tokens[name] = [answer.stream.ids for answer in answers]
            if counts:
                self.samples[name].append(figures)
        reference = tokens[next(iter(variants))]
        for found in tokens.values():
            self.num_equal += sum(a == b for a, b in zip(reference, found, strict=True))
            self.num_answers += len(found)

    def rows(self) -> list[Row]:
        """Medians of each variant."""
        found: list[Row] = []
        for name, taken in self.samples.items():
            medians = {key: statistics.median(one[key] for one in taken) for key in taken[0]}
            row: Row = {"tokens": self.tokens, "at once": self.at_once, "engine": name, **medians}
            equal = f"{self.num_equal} of {self.num_answers}"
            found.append({**row, "rounds": taken, "equal": equal})
        return found


def measure(
    args: argparse.Namespace,
    variants: Mapping[str, Variant],
    keep: Callable[[Sequence[Row]], object],
) -> list[Row]:
    """A row of medians for each cell and variant; those that there are go to *keep* after each
    round. Ends with the round in which ``args.seconds`` are over."""
    dice = random.Random(1)
    rows: list[Row] = []
    started_at = time.monotonic()
    for length, at_once in args.cells:
        cell = Cell(length, at_once, {name: [] for name in variants})
        so_far: list[Row] = []
        warm_ups = 1 if not rows or not args.warm_once else 0
        for number in range(args.rounds + warm_ups):
            if rows + so_far and time.monotonic() - started_at > args.seconds:
                break
            prompts = load.make_prompts(at_once, length, dice)
            first = number % len(variants)
            order = [*variants][first:] + [*variants][:first]
            # the first round connects and warms up
            counts = number >= warm_ups
            cell.add_round(variants, prompts, order, args.output_tokens, counts=counts)
            so_far = cell.rows() if counts else []
            keep(rows + so_far)
        for row in so_far:
            print(json.dumps({key: row[key] for key in row if key != "rounds"}), flush=True)
        rows += so_far
        keep(rows)
    return rows


def cell_of(text: str) -> tuple[int, int]:
    """Prompt tokens and requests at a time, of a text such as ``8000x8``."""
    tokens, _, at_once = text.partition("x")
    return int(tokens), int(at_once or 1)


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> list[str]:
    """The table; milliseconds unless a column says otherwise."""
    head = ("tokens", "at once", "engine")
    shown = [
        [str(row[key]) for key in head]
        + [f"{row[key]:.4g}" if row.get(key) else "-" for key in COLUMNS]
        for row in rows
    ]
    equal = {f"{row['tokens']} x {row['at once']}: {row['equal']}" for row in rows}
    return [
        *pages.head("First token and hand-over", about),
        *pages.table((*head, *COLUMNS), shown),
        "",
        f"Answers equal to the first engine's, warm-up included: {', '.join(sorted(equal))}.",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    add("--cells", type=cell_of, nargs="+", default=DEFAULT_CELLS, help="TOKENSxREQUESTS")
    add("--rounds", type=int, default=5)
    add("--warm-once", action="store_true", help="one round to warm up in all, not one a cell")
    add("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    add("--output-tokens", type=int, default=16)
    add("--gpus", nargs=2, default=["0", "1"], help="of the prefill and of the decode servers")
    add("--gpu-memory", type=float, default=0.18, help="share of a GPU for each server on it")
    add("--start-seconds", type=float, default=600.0, help="for a server to become ready")
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    add("--out", type=Path, required=True, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    if args.output_tokens < 3:
        parser.error("--output-tokens: expected at least 3, for the time between tokens")
    return args


def main() -> int:
    args = arguments()
    about = {
        "machine": machine("nixl", "torch", cuda=args.device == "cuda"),
        "command": shlex.join(["python", *sys.argv]),
        "load average at the start": load_average(),
    }

    def keep(rows: Sequence[Row]) -> str:
        about["load average at the end"] = load_average()
        found = {"about": about, "rows": rows}
        return pages.write(args.out.parent, args.out.name, found, markdown(rows, about))

    with tempfile.TemporaryDirectory(prefix="handover-") as folder:
        setup = Setup(
            args.device,
            Path(folder),
            *models.by_device(Path(folder) / "model", args.device),
            max(length for length, _ in args.cells) + args.output_tokens + 16,
            max(at_once for _, at_once in args.cells),
            args.start_seconds,
            args.server_args,
        )
        with started(setup, args.engines, args.gpus, args.gpu_memory) as variants:
            rows = measure(args, variants, keep)
    print(keep(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
