"""The hand-over from prefill to decode: from the prefill server's answer to the decode server's
first token, and what it is made of.

A plain server, vLLM's NixlConnector as it comes and with `VLLM_KV_CACHE_LAYOUT=BLHNC`, ours, ours
with all first tokens sampled by the decode server, and ours behind the proxy, without and with
first tokens that it sends itself, and with both servers asked at once, so that chunks are read
while the prefill runs; on GPUs also ours in the old layout.  All take turns, each while
the others are stopped, in another order each round, and each after a short request that wakes its
processes up.  The read's share comes from the decode server's metrics; "rest" is the
hand-over without it: HTTP, parsing, scheduling, the last token.  Where the first token comes from
the prefill server it does not wait for the read, and what the hand-over costs shows in the second
one.  The same bytes in one large copy stand beside.  Without the proxy the client does what a proxy
does, one step after the other.  "early" says how many first tokens were sent by the proxy itself.

    python benchmarks/handover.py --out benchmarks/results/handover_cpu
    python benchmarks/handover.py --device cuda --lengths 1000 8000 32000 --out OUT
    python benchmarks/handover.py --engines plain ours "ours, proxy" "ours, proxy, early" --out OUT
    python benchmarks/throttled.py --mbit 80 -- python benchmarks/handover.py --lengths 4096 \
        --engines plain "ours, proxy, early" "ours, proxy, streamed" --at-once 1 --out OUT \
        --server-args --max-num-batched-tokens 512
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm
from handovers.requests import Answer, ask_all, begins_with_text
from handovers.variants import (
    IN_TREE_LAYOUT,
    NAMES,
    OURS_HND,
    OURS_STREAMED,
    PLAIN,
    PROXIED,
    Setup,
    read_figures,
    started,
)
from serving.servers import Variant, alone

from vllm_commext.testing.metrics import scrape
from vllm_commext.testing.prompts import PRINTABLE

COLUMNS = (
    *("prefill", "hand-over", "read", "post", "rest", "first token", "second token", "TPOT"),
    *("MB", "descriptors", "GB/s", "one copy GB/s", "first from P %", "early %"),
)
WAKING_TOKENS = 64
REPORT_SECONDS = 0.5
"""Until a step's statistics stand on the metrics page."""
Row = dict[str, Any]


def one_copy_gb_s(device: str, num_bytes: int, gpus: Sequence[str]) -> float:
    """Bytes a second of one copy: between two GPUs of this process, or within one where both
    servers are on it; in this host's memory without GPUs."""
    cuda = device == "cuda"
    other = "cuda:1" if len(set(gpus)) > 1 else "cuda:0"
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0" if cuda else None)
    target = torch.empty_like(source, device=other if cuda else None)
    times: list[float] = []
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return num_bytes / min(times) / 1e9


def make_prompts(
    count: int, num_tokens: int, dice: random.Random, first: Variant
) -> list[list[int]]:
    """Prompts to which the *first* variant's answers begin with a text."""
    prompts: list[list[int]] = []
    url = next(iter(first.servers.values())).url
    while len(prompts) < count:
        prompt = [dice.choice(PRINTABLE) for _ in range(num_tokens)]
        if begins_with_text(url, prompt):
            prompts.append(prompt)
    return prompts


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
    figures["early %"] = statistics.mean(row["early %"] for row in each)
    if decode is not None and before is not None:
        time.sleep(REPORT_SECONDS)
        figures |= read_figures(name, scrape(decode).minus(before))
        if not figures.get("first from P %"):
            figures["rest"] = figures["hand-over"] - figures["read"]
    return answers, figures


def measure(args: argparse.Namespace, variants: Mapping[str, Variant]) -> list[Row]:
    """A row of medians for each length, number of requests at a time, and variant."""
    dice = random.Random(1)
    rows: list[Row] = []
    for length in args.lengths:
        for at_once in args.at_once:
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
            num_equal = num_answers = 0
            for number in range(args.rounds + 1):
                prompts = make_prompts(at_once, length, dice, next(iter(variants.values())))
                texts: dict[str, list[str]] = {}
                first = number % len(variants)
                for name in [*variants][first:] + [*variants][:first]:
                    with alone(variants, name) if len(variants) > 1 else nullcontext():
                        answers, figures = turn(name, variants[name], prompts, args.output_tokens)
                    texts[name] = [answer.text for answer in answers]
                    if number:  # the first round connects and warms up
                        samples[name].append(figures)
                reference = texts[next(iter(variants))]
                for found in texts.values():
                    num_equal += sum(a == b for a, b in zip(reference, found, strict=True))
                    num_answers += len(found)
            for name, taken in samples.items():
                keys = taken[0]
                medians = {key: statistics.median(one[key] for one in taken) for key in keys}
                if medians.get("MB"):
                    copied = one_copy_gb_s(args.device, int(medians["MB"] * 1e6), args.gpus)
                    medians["one copy GB/s"] = copied
                row: Row = {"tokens": length, "at once": at_once, "engine": name, **medians}
                rows.append({**row, "rounds": taken, "equal": f"{num_equal} of {num_answers}"})
                print(json.dumps({key: row[key] for key in row}), flush=True)
    return rows


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The table; milliseconds unless a column says otherwise."""
    head = ("tokens", "at once", "engine", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [str(row[key]) for key in head[:3]]
        cells += [f"{row[key]:.4g}" if row.get(key) else "-" for key in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    equal = ", ".join(
        sorted({f"{row['tokens']} x {row['at once']}: {row['equal']}" for row in rows})
    )
    lines += ["", f"Answers equal to the first engine's, warm-up included: {equal}.", ""]
    return "\n".join([*lines, *(f"- {key}: {value}" for key, value in about.items()), ""])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--engines", nargs="+", choices=NAMES, help="all that the device takes, unless given")
    add("--lengths", type=int, nargs="+", default=[200, 800], help="prompt tokens")
    add("--at-once", type=int, nargs="+", default=[1, 8], help="requests at the same time")
    add("--rounds", type=int, default=5)
    add("--output-tokens", type=int, default=16)
    add("--gpus", nargs=2, default=["0", "1"], help="of the prefill and of the decode servers")
    add("--gpu-memory", type=float, default=0.18, help="share of a GPU for each server on it")
    add("--start-seconds", type=float, default=600.0, help="for a server to become ready")
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    add("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    on_gpus_only = (IN_TREE_LAYOUT, OURS_HND)  # vLLM's attention on CPUs takes one layout
    if args.engines is None:
        args.engines = [one for one in NAMES if args.device == "cuda" or one not in on_gpus_only]
    if args.output_tokens < 3:
        parser.error("--output-tokens: expected at least 3, for the time between tokens")
    return args


def main() -> int:
    args = arguments()
    about = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "GPU": torch.cuda.get_device_name(0) if args.device == "cuda" else "none",
        "versions": f"vLLM {vllm.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}",
        "command": " ".join(sys.argv),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }
    with tempfile.TemporaryDirectory(prefix="handover-") as folder:
        setup = Setup(
            args.device,
            Path(folder),
            max_tokens=max(args.lengths) + args.output_tokens + 16,
            concurrency=max(args.at_once),
            gpus=args.gpus,
            gpu_memory=args.gpu_memory,
            start_seconds=args.start_seconds,
            server_args=args.server_args,
            streams=OURS_STREAMED in args.engines,
        )
        with started(setup, args.engines) as variants:
            rows = measure(args, variants)
    about["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
    text = markdown(rows, about)
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text)
        args.out.with_suffix(".json").write_text(
            json.dumps({"about": about, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
