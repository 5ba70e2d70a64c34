"""Rounds of a load on several servers in turns, their figures, and what is written of them."""

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_commext.bench import figures
from vllm_commext.errors import ConfigError
from vllm_commext.limits import Limits
from vllm_commext.proxy.config import read_secret

if TYPE_CHECKING:
    from vllm_commext.bench.client import Endpoint
    from vllm_commext.bench.workload import Arrival

COLUMNS = ("endpoint", "first token ms", "TPOT ms", "longest gap ms", "tokens/s", "good", "failed")
SCHEMA = 1
SHOWN_ERRORS = 3
ANY_LENGTH = 1 << 30


@dataclass
class Contestant:
    name: str
    endpoint: "Endpoint"
    rounds: list[Sequence[figures.Sample]]


def limits_of(args: argparse.Namespace) -> Limits:
    return Limits(args.tpot_ms / 1e3, args.ttft_ms / 1e3)


async def play(args: argparse.Namespace, urls: Mapping[str, str]) -> list[Contestant]:
    """Play all rounds at the servers at *urls*, by name, in turns."""
    from vllm_commext.bench import client

    key = read_secret(args.api_key_file) if args.api_key_file else ""
    contestants: list[Contestant] = []
    for name, url in urls.items():
        endpoint = await client.find(url, vocab_size=args.vocab_size, api_key=key)
        print(f"{name}: {endpoint.url}, {endpoint.model}", flush=True)
        contestants.append(Contestant(name, endpoint, []))
    most = min(one.endpoint.max_tokens or ANY_LENGTH for one in contestants)
    arrivals = _arrivals(args, most)
    turns = args.rounds * len(contestants)
    print(
        f"{len(arrivals)} requests a round, {args.rounds} rounds: "
        f"{turns * args.seconds / 60:.1f} to {turns * (args.seconds + args.wait) / 60:.1f} minutes",
        flush=True,
    )
    if args.export_trace:
        print(_export(args, contestants[0], arrivals), flush=True)
    late = await _measure(args, contestants, arrivals, _warm_up(args, arrivals))
    if late > limits_of(args).tpot:
        print(f"warning: this client was up to {late * 1e3:.0f} ms late with requests of its own")
    return contestants


def tell(
    args: argparse.Namespace, contestants: Sequence[Contestant], found: Sequence[tuple[str, bool]]
) -> None:
    """Print the figures and the verdicts, and write them where that is asked for."""
    for line in table(contestants, limits_of(args)):
        print(line)
    for text, _ in found:
        print(text)
    if args.json:
        args.json.write_text(json.dumps(_content(args, contestants, limits_of(args), found)) + "\n")


def num_failed(one: Contestant) -> int:
    return sum(bool(sample.error) for of in one.rounds for sample in of)


def _export(args: argparse.Namespace, one: Contestant, arrivals: "Sequence[Arrival]") -> str:
    """Write a round's arrivals; returns the command that plays them."""
    from vllm_commext.bench.workload import timed_trace

    args.export_trace.write_text(timed_trace(arrivals))
    return (
        f"vllm bench serve --base-url {one.endpoint.url} --model {one.endpoint.model} "
        f"--dataset-name timed_trace --dataset-path {args.export_trace} "
        f"--num-prompts {len(arrivals)} --temperature 0 "
        f"--goodput ttft:{args.ttft_ms:g} tpot:{args.tpot_ms:g}"
    )


def _arrivals(args: argparse.Namespace, most: int) -> "list[Arrival]":
    from vllm_commext.bench import workload

    if args.trace:
        made = workload.at_rate(workload.read_trace(args.trace), args.rate, args.seconds)
    else:
        made = workload.WORKLOADS[args.workload](args.rate, args.seconds, args.seed)
    if not made:
        raise ConfigError(f"no request comes within {args.seconds:g} s: raise --rate or --seconds")
    return workload.scaled(made, args.scale, most)


def _warm_up(args: argparse.Namespace, arrivals: "Sequence[Arrival]") -> "Sequence[Arrival]":
    """The beginning of a round, at least its first request, unless none is wanted."""
    within = [one for one in arrivals if one.at < args.warm_up]
    return within or arrivals[: int(args.warm_up > 0)]


async def _measure(
    args: argparse.Namespace,
    contestants: Sequence[Contestant],
    arrivals: "Sequence[Arrival]",
    warm_up: "Sequence[Arrival]",
) -> float:
    """Play all rounds; returns how late this client was at most, in seconds."""
    from vllm_commext.bench import client
    from vllm_commext.bench.workload import bodies

    run_seed = int.from_bytes(os.urandom(6))
    late = 0.0
    for number in range(args.rounds + 1):
        for place, one in enumerate(contestants):
            chosen, what = (arrivals, f"round {number}") if number else (warm_up, "warm-up")
            seed = (run_seed, number, place)
            made = bodies(chosen, one.endpoint.model, one.endpoint.vocab_size, seed)

            def say(progress: str, what: str = f"{what}, {one.name}") -> None:
                print(f"{what}, {progress}", flush=True)

            played = await client.play(
                one.endpoint, chosen, made, wait_seconds=args.wait, progress=say
            )
            reasons = [sample.error for sample in played.samples]
            if not number and reasons and all(reasons):
                raise client.EndpointError(
                    f"{one.endpoint.url}: expected completions, but each request of the warm-up "
                    f"failed, the first with: {reasons[0]}"
                )
            if number:
                one.rounds.append(played.samples)
                late = max(late, played.late)
    return late


def table(contestants: Sequence[Contestant], limits: Limits) -> list[str]:
    """Figures over all rounds in Markdown, why requests failed and how they were placed."""
    lines = ["", f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    remarks: list[str] = []
    for one in contestants:
        samples = [sample for of in one.rounds for sample in of]
        found = figures.summary(samples)
        good = [figures.num_good(of, limits) / len(of) for of in one.rounds]
        failed = figures.errors(samples)
        speed = sum(map(figures.tokens_per_second, one.rounds)) / len(one.rounds)
        cells = [one.name, *(_three(found[key]) for key in ("first", "tpot", "gap"))]
        cells += [f"{speed:,.0f}", f"{sum(good) / len(good):.1%} ({min(good):.0%}-{max(good):.0%})"]
        cells.append(f"{sum(failed.values())} of {len(samples)}")
        lines.append(f"| {' | '.join(cells)} |")
        remarks += [
            f"{one.name}: {count} failed: {reason}"
            for reason, count in [*failed.items()][:SHOWN_ERRORS]
        ]
        if placed := figures.placements(samples):
            told = ", ".join(f"{kind} {count}" for kind, count in placed.items())
            remarks.append(f"{one.name}: placed by its proxy: {told}")
    return [*lines, "", "p50 / p90 / p99; good: of all requests (least-most of a round)", *remarks]


def _three(seconds: Sequence[float]) -> str:
    if any(map(math.isnan, seconds)):
        return "-"
    return " / ".join(f"{1e3 * one:.3g}" if one < 1 else f"{1e3 * one:,.0f}" for one in seconds)


def _content(
    args: argparse.Namespace,
    contestants: Sequence[Contestant],
    limits: Limits,
    found: Sequence[tuple[str, bool]],
) -> Mapping[str, Any]:
    return {
        "schema": SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": {
            name: value if isinstance(value, int | float | str | list) else str(value)
            for name, value in vars(args).items()
            if name not in ("run", "command") and value is not None
        },
        "limits": asdict(limits),
        "verdicts": [text for text, _ in found],
        "endpoints": [
            {
                "name": one.name,
                "url": one.endpoint.url,
                "rounds": [[asdict(sample) for sample in of] for of in one.rounds],
            }
            for one in contestants
        ],
    }
