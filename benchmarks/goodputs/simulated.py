"""Tables of simulated goodput: `python -m goodputs.simulated TABLE`, in the folder benchmarks.

`measured`: beside the cells of a measurement on two H100. `grid`: goodput by workload, limits and
rate. `highest`: the highest rate with 90 % of requests in time. `caches`: engines with
small KV caches. `turns`: later turns of conversations. `fleets`: many engines, some slow,
some lost and back.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from goodputs import shapes
from goodputs.policies import Adaptive, Fixed, Replicas, Tuned
from goodputs.simulator import Hardware, Policy, Request, Simulation, Turn
from vllm_commext.bench.figures import QUANTILES, quantile
from vllm_commext.bench.workload import MIXED
from vllm_commext.limits import Limits

PAIR = (Hardware(), Hardware())
MEASURED = Path(__file__).with_name("measured.json")
"""What `goodput.py` wrote on two H100, 2026-11-26; the simulator's times are fitted to it."""
SECONDS, WARM_SECONDS, SEEDS = 45.0, 10.0, (1, 2, 3)
GOOD = 0.9
STEPS = 7
WORKLOADS = (MIXED, shapes.CONVERSATION, "document", "short")
SATURATION = {MIXED: 15.0, shapes.CONVERSATION: 4.0, "document": 6.0, "short": 90.0}
"""Requests a second that two engines could take without any limit, about."""
Build = Callable[[Sequence[Hardware], Limits], Policy]
Seeds = Sequence[int]
CONTESTANTS: dict[str, Build] = {
    "replicas": lambda hardware, limits: Replicas(hardware),
    "fixed": lambda hardware, limits: Fixed(hardware),
    "adaptive": Adaptive,
    "ordered": lambda hardware, limits: Adaptive(hardware, limits, is_ordered=True),
    "replicas in order": Tuned,
    "roles in order": lambda hardware, limits: Tuned(hardware, limits, len(hardware) // 2),
}
UNTOLD = ("replicas", "fixed")
CACHE_CONTESTANTS: dict[str, Build] = {
    "replicas": CONTESTANTS["replicas"],
    "fixed": CONTESTANTS["fixed"],
    "not told": lambda hardware, limits: Adaptive(hardware, limits, reads_caches=False),
    "adaptive": Adaptive,
    "ordered": CONTESTANTS["ordered"],
}
MEASURED_LIMITS = [Limits(tpot, 1.0) for tpot in (0.010, 0.012, 0.015, 0.020, 0.025)]
PAUSE_SECONDS = 100.0
"""Between two loads on a contestant: the others' turns."""


def play(
    build: Callable[[Sequence[Hardware]], Policy],
    workload: str,
    rate: float,
    *,
    hardware: Sequence[Hardware] = PAIR,
    seconds: float = SECONDS,
    warm_seconds: float = WARM_SECONDS,
    seeds: Seeds = SEEDS,
    turns: Sequence[Turn] = (),
) -> list[Request]:
    """The requests of one run a seed, those of its first seconds left out."""
    found: list[Request] = []
    for seed in seeds:
        arrivals = shapes.WORKLOADS[workload](rate, seconds, seed)
        requests = Simulation(hardware, arrivals, build(hardware), turns).run()
        found += [one for one in requests if one.arrival.at >= warm_seconds]
    return found


def share_good(
    name: str, workload: str, rate: float, limits: Limits, seeds: Seeds = SEEDS
) -> float:
    """Share of requests of a contestant that are in time."""
    build = CONTESTANTS[name]
    requests = play(lambda hardware: build(hardware, limits), workload, rate, seeds=seeds)
    return sum(one.is_good(limits) for one in requests) / max(len(requests), 1)


def highest_rate(cell: tuple[str, str, Limits, Seeds]) -> float:
    """The highest rate at which `GOOD` of a contestant's requests are in time, by bisection."""
    name, workload, limits, seeds = cell
    low, high = 0.02, 1.2
    for _ in range(STEPS):
        middle = (low + high) / 2
        rate = middle * SATURATION[workload]
        if share_good(name, workload, rate, limits, seeds) >= GOOD:
            low = middle
        else:
            high = middle
    return low * SATURATION[workload]


def told(first: Sequence[float], tpot: Sequence[float], good: Sequence[float]) -> str:
    """Quantiles of the first token and of the time per token in ms, and % in time."""
    texts = [[f"{1e3 * value:.0f}" for value in first], [f"{1e3 * value:.1f}" for value in tpot]]
    return " ".join("/".join(of) for of in (*texts, [f"{100 * share:.0f}" for share in good]))


def simulated_figures(requests: Sequence[Request]) -> str:
    """See `told`."""
    first, tpot = (
        [quantile(values, share) for share in QUANTILES]
        for values in ([one.first_token for one in requests], [one.per_token for one in requests])
    )
    num_good = [sum(one.is_good(of) for one in requests) for of in MEASURED_LIMITS]
    return told(first, tpot, [num / len(requests) for num in num_good])


def measured_figures(row: Mapping[str, Any]) -> str:
    """See `told`."""
    names = [f"{1e3 * of.tpot:g} ms, {1e3 * of.first:g} ms" for of in MEASURED_LIMITS]
    good = [sum(row["good"][name]) / row["requests"] for name in names]
    return told(row["first"], row["tpot"], good)


def replayed(way: str, rates: Sequence[float], seconds: float) -> dict[float, list[Request]]:
    """The requests of a measurement by their rates: a warm-up at the last rate, and two rounds."""
    loads = [(0.0, rates[-1], 8.0)]
    for rate in [*rates, *rates]:
        loads.append(((seconds + PAUSE_SECONDS) * len(loads), rate, seconds))
    arrivals = [
        (replace(one, at=one.at + begin), rate if begin else 0.0)
        for begin, rate, length in loads
        for one in shapes.WORKLOADS[MIXED](rate, length, 1)
    ]
    policy = CONTESTANTS[way](PAIR, Limits(0.015, 1.0))
    requests = Simulation(PAIR, [one for one, _ in arrivals], policy).run()
    found: dict[float, list[Request]] = {rate: [] for rate in rates}
    for request, (_, rate) in zip(requests, arrivals, strict=True):
        if rate:
            found[rate].append(request)
    return found


def print_measured(_: ProcessPoolExecutor, __: Seeds) -> None:
    content = json.loads(MEASURED.read_text())
    seconds = float(content["about"]["arrivals"].split()[0])
    rows = {(row["way"].split()[0], row["rate"]): row for row in content["rows"]}
    rates = list(dict.fromkeys(rate for _, rate in rows))
    print("| requests/s | way | simulated | measured |\n|---|---|---|---|")
    for way in ("replicas", "fixed", "adaptive"):
        for rate, requests in replayed(way, rates, seconds).items():
            cells = simulated_figures(requests), measured_figures(rows[way, rate])
            print(f"| {rate:g} | {way} | {' | '.join(cells)} |")


def shares_good(job: tuple[str, str, float, Sequence[Limits], Seeds]) -> list[float]:
    """Share of requests in time by each of some limits, told all of them one after another."""
    name, workload, rate, limits, seeds = job
    if name not in UNTOLD:
        return [share_good(name, workload, rate, of, seeds) for of in limits]
    build = CONTESTANTS[name]
    requests = play(lambda hardware: build(hardware, limits[0]), workload, rate, seeds=seeds)
    return [sum(one.is_good(of) for one in requests) / len(requests) for of in limits]


def print_grid(workers: ProcessPoolExecutor, seeds: Seeds) -> None:
    shares, tpots = (0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.1), (10, 12, 15, 20, 25, 50)
    limits = [Limits(tpot / 1e3, first) for tpot in tpots for first in (0.5, 1.0, 2.0)]
    names = list(CONTESTANTS)
    cells = [(workload, share) for workload in WORKLOADS for share in shares]
    jobs = [
        (name, work, share * SATURATION[work], limits, seeds)
        for work, share in cells
        for name in names
    ]
    found = dict(zip([job[:3] for job in jobs], workers.map(shares_good, jobs), strict=True))
    print(f"{' / '.join(names)}, % in time\n")
    print(f"| workload | limits | {' | '.join(f'{share:.0%}' for share in shares)} |")
    print("|---|---|" + "---|" * len(shares))
    for workload in WORKLOADS:
        for idx, of in enumerate(limits):
            row = [
                " ".join(
                    f"{100 * found[name, workload, share * SATURATION[workload]][idx]:.0f}"
                    for name in names
                )
                for share in shares
            ]
            print(f"| {workload} | {of} | {' | '.join(row)} |")


def print_highest(workers: ProcessPoolExecutor, seeds: Seeds) -> None:
    cells = [
        (workload, Limits(tpot / 1e3, first))
        for workload in WORKLOADS
        for tpot in (10, 12, 15, 20, 25, 50)
        for first in ((0.5, 1.0, 2.0) if workload != "short" else (1.0,))
    ]
    jobs = [(name, *cell, seeds) for cell in cells for name in CONTESTANTS]
    results = iter(list(workers.map(highest_rate, jobs)))
    print(
        f"| workload | limits | {' | '.join(CONTESTANTS)} | adaptive : better | ordered : better |"
    )
    print("|---|---|" + "---|" * (len(CONTESTANTS) + 2))
    for workload, limits in cells:
        rates = {name: next(results) for name in CONTESTANTS}
        better = max(rates["replicas"], rates["fixed"])
        row = " | ".join(f"{rate:.1f}" for rate in rates.values())
        gains = " | ".join(f"{rates[name] / better:.2f}" for name in ("adaptive", "ordered"))
        print(f"| {workload} | {limits} | {row} | {gains} |")


def turns_told(job: tuple[str, str, float, Limits, Seeds]) -> str:
    """Of later turns the share of the history's tokens that was computed where it is, and the
    median first token in ms; of all requests the share in time."""
    name, workload, rate, limits, seeds = job
    build = CONTESTANTS[name]
    requests = play(lambda engines: build(engines, limits), workload, rate, seeds=seeds)
    later = [one for one in requests if one.most_held]
    share = sum(one.held for one in later) / sum(one.most_held for one in later)
    first = 1e3 * quantile([one.first_token for one in later], 0.5)
    good = sum(one.is_good(limits) for one in requests) / len(requests)
    return f"{share:.0%} {first:.0f} {good:.0%}"


def print_turns(workers: ProcessPoolExecutor, seeds: Seeds) -> None:
    names = ("replicas", "fixed", "adaptive")
    cells = [
        (workload, rate, Limits(tpot, 1.0))
        for workload, rates in ((shapes.CONVERSATION, (1.5, 3.0)), ("agentic", (8.0, 14.0)))
        for rate in rates
        for tpot in (0.012, 0.025)
    ]
    jobs = [(name, *cell, seeds) for cell in cells for name in names]
    results = iter(list(workers.map(turns_told, jobs)))
    print(f"| workload | requests/s | limits | {' | '.join(names)} |")
    print("|---|---|---|" + "---|" * len(names))
    for workload, rate, limits in cells:
        row = " | ".join(next(results) for _ in names)
        print(f"| {workload} | {rate:g} | {limits} | {row} |")


def share_with_caches(job: tuple[str, float, Limits, tuple[float, float], Seeds]) -> float:
    """Share in time of two engines whose KV caches have room for so many tokens."""
    name, rate, limits, caches, seeds = job
    requests = play(
        lambda engines: CACHE_CONTESTANTS[name](engines, limits),
        MIXED,
        rate,
        hardware=[Hardware(cache_tokens=tokens) for tokens in caches],
        seeds=seeds,
    )
    return sum(one.is_good(limits) for one in requests) / len(requests)


def print_caches(workers: ProcessPoolExecutor, seeds: Seeds) -> None:
    cells = [
        (rate, Limits(tpot, 1.0), caches)
        for caches in ((6e4, 6e4), (3.6e4, 3.6e4), (12e4, 3e4), (2.4e4, 12e4))
        for rate, tpot in ((5.0, 0.015), (7.0, 0.05), (9.0, 0.05))
    ]
    jobs = [(name, *cell, seeds) for cell in cells for name in CACHE_CONTESTANTS]
    results = iter(list(workers.map(share_with_caches, jobs)))
    print(f"| requests/s | limits | tokens | {' | '.join(CACHE_CONTESTANTS)} |")
    print("|---|---|---|" + "---|" * len(CACHE_CONTESTANTS))
    for rate, limits, caches in cells:
        row = " | ".join(f"{next(results):.0%}" for _ in CACHE_CONTESTANTS)
        told = " and ".join(f"{tokens:,.0f}" for tokens in caches)
        print(f"| {rate:g} | {limits} | {told} | {row} |")


def fleet(num: int) -> tuple[list[Hardware], list[Turn]]:
    """Engines of which each eighth takes twice the time, and one in sixteen goes and comes back."""
    hardware = [Hardware(slowness=2.0 if idx % 8 == 3 else 1.0) for idx in range(num)]
    lost = range(1, num, 16)
    turns = [Turn(at, idx, is_up) for idx in lost for at, is_up in ((14.0, False), (19.0, True))]
    return hardware, turns


def fleet_share(job: tuple[int, str]) -> float:
    """Share of a fleet's requests in time, some of its engines being slow or lost."""
    num, name = job
    limits = Limits(0.015, 1.0)
    hardware, turns = fleet(num)
    requests = play(
        lambda engines: CONTESTANTS[name](engines, limits),
        MIXED,
        0.45 * SATURATION[MIXED] * num / 2,
        hardware=hardware,
        seconds=24.0,
        warm_seconds=8.0,
        seeds=(1,),
        turns=turns,
    )
    return sum(one.is_good(limits) for one in requests) / max(len(requests), 1)


def print_fleets(workers: ProcessPoolExecutor, _: Seeds) -> None:
    jobs = [(num, name) for num in (4, 16, 64, 256) for name in CONTESTANTS]
    results = iter(list(workers.map(fleet_share, jobs)))
    print(f"| engines | {' | '.join(CONTESTANTS)} |\n|---|" + "---|" * len(CONTESTANTS))
    for num in (4, 16, 64, 256):
        print(f"| {num} | {' | '.join(f'{next(results):.0%}' for _ in CONTESTANTS)} |")


TABLES = {
    "measured": print_measured,
    "grid": print_grid,
    "highest": print_highest,
    "caches": print_caches,
    "turns": print_turns,
    "fleets": print_fleets,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the arrivals")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as workers:
        TABLES[args.table](workers, args.seeds)


if __name__ == "__main__":
    main()
