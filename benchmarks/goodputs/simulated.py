"""Tables of simulated goodput: `python -m goodputs.simulated TABLE`, in the folder benchmarks.

`measured`: beside the cells of a measurement on two H100. `grid`: goodput by workload, limits and
rate. `highest`: the highest rate with 90 % of requests in time. `refusals`: what refusing brings
under too much load. `caches`: engines with small KV caches. `turns`: later turns
of conversations. `hindsight`: beside the best placement that is found where everything to come is
known. `fleets`: many engines, some of
them slow, some lost and back.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from goodputs.hindsight import best_share
from goodputs.policies import Adaptive, Fixed, InTurn, Knowing, Overflow, Replicas
from goodputs.simulator import Hardware, Policy, Request, Simulation, Turn
from vllm_commext.bench.figures import quantile
from vllm_commext.bench.workload import CONVERSATION, MIXED, make
from vllm_commext.limits import Limits

PAIR = (Hardware(), Hardware())
SECONDS, WARM_SECONDS, SEEDS = 45.0, 10.0, (1, 2, 3)
GOOD = 0.9
STEPS = 6
NUM_TRIES = 600
WORKLOADS = (MIXED, CONVERSATION, "document", "short")
SATURATION = {MIXED: 19.0, CONVERSATION: 6.0, "document": 8.0, "short": 85.0}
"""Requests a second that two engines could take without any limit, about."""
Build = Callable[[Sequence[Hardware], Limits], Policy]
CONTESTANTS: dict[str, Build] = {
    "replicas": lambda hardware, _: Replicas(hardware),
    "fixed": lambda hardware, _: Fixed(hardware),
    "adaptive": Adaptive,
    "knowing": Knowing,
}
CACHE_CONTESTANTS: dict[str, Build] = {
    "replicas": CONTESTANTS["replicas"],
    "fixed": CONTESTANTS["fixed"],
    "not told": lambda hardware, limits: Adaptive(hardware, limits, reads_caches=False),
    "adaptive": Adaptive,
}
MEASURED: dict[tuple[float, str], str] = {
    (5, "in turn"): "111/445/768 7.3/9.0/18.1 93/97/100",
    (5, "replicas"): "132/378/619 7.5/10.5/22.9 87/96/100",
    (5, "fixed"): "173/685/1073 7.2/7.9/8.8 99/99/99",
    (5, "overflow"): "141/508/608 7.6/10.1/14.6 90/100/100",
    (8, "in turn"): "126/810/1290 9.6/16.4/33.1 54/81/91",
    (8, "replicas"): "114/493/630 9.5/19.1/29.2 57/81/96",
    (8, "fixed"): "330/1352/1787 8.3/9.1/9.9 76/76/76",
    (8, "overflow"): "137/564/1036 9.3/17.9/24.7 60/86/98",
}
"""First token and time per token in ms, p50/p90/p99, and % in time by 1 s and 10, 15, 25 ms."""


def play(
    build: Callable[[Sequence[Hardware]], Policy],
    workload: str,
    rate: float,
    *,
    hardware: Sequence[Hardware] = PAIR,
    seconds: float = SECONDS,
    warm_seconds: float = WARM_SECONDS,
    seeds: Sequence[int] = SEEDS,
    turns: Sequence[Turn] = (),
) -> list[Request]:
    """The requests of one run a seed, those of its first seconds left out."""
    found: list[Request] = []
    for seed in seeds:
        arrivals = make(workload, rate, seconds, seed)
        requests = Simulation(hardware, arrivals, build(hardware), turns).run()
        found += [one for one in requests if one.arrival.at >= warm_seconds]
    return found


def share_good(name: str, workload: str, rate: float, limits: Limits) -> float:
    """Share of requests of a contestant that are in time."""
    requests = play(lambda hardware: CONTESTANTS[name](hardware, limits), workload, rate)
    return sum(one.is_good(limits) for one in requests) / max(len(requests), 1)


def highest_rate(cell: tuple[str, str, Limits]) -> float:
    """The highest rate at which `GOOD` of a contestant's requests are in time, by bisection."""
    name, workload, limits = cell
    low, high = 0.02, 1.2
    for _ in range(STEPS):
        middle = (low + high) / 2
        rate = middle * SATURATION[workload]
        if share_good(name, workload, rate, limits) >= GOOD:
            low = middle
        else:
            high = middle
    return low * SATURATION[workload]


def print_measured(_: ProcessPoolExecutor) -> None:
    ways = {"in turn": InTurn, "replicas": Replicas, "fixed": Fixed, "overflow": Overflow}
    print("| requests/s | way | simulated | measured |\n|---|---|---|---|")
    for (rate, name), measured in MEASURED.items():
        requests = play(ways[name], MIXED, rate, seconds=20.0, warm_seconds=0.0, seeds=range(8))
        told = [
            "/".join(f"{1e3 * quantile(values, share):.{digits}f}" for share in (0.5, 0.9, 0.99))
            for digits, values in (
                (0, [one.first_token for one in requests]),
                (1, [one.per_token for one in requests]),
            )
        ]
        limits = [Limits(tpot, 1.0) for tpot in (0.010, 0.015, 0.025)]
        good = [sum(one.is_good(of) for one in requests) / len(requests) for of in limits]
        told.append("/".join(f"{100 * share:.0f}" for share in good))
        print(f"| {rate:g} | {name} | {' '.join(told)} | {measured} |")


def print_grid(workers: ProcessPoolExecutor) -> None:
    shares = (0.3, 0.5, 0.7, 0.9, 1.1)
    cells = [
        (workload, Limits(tpot / 1e3, first))
        for workload in WORKLOADS
        for tpot in (10, 15, 25, 50)
        for first in (0.5, 1.0, 2.0)
    ]
    jobs = [
        (name, workload, share * SATURATION[workload], limits)
        for workload, limits in cells
        for share in shares
        for name in CONTESTANTS
    ]
    results = iter([100 * good for good in workers.map(share_good, *zip(*jobs, strict=True))])
    told = " | ".join(f"{share:.0%}" for share in shares)
    print(f"{' / '.join(CONTESTANTS)}, % in time\n\n| workload | limits | {told} |")
    print("|---|---|" + "---|" * len(shares))
    for workload, limits in cells:
        row = [" ".join(f"{next(results):.0f}" for _ in CONTESTANTS) for _ in shares]
        print(f"| {workload} | {limits} | {' | '.join(row)} |")


def print_highest(workers: ProcessPoolExecutor) -> None:
    cells = [
        (workload, Limits(tpot / 1e3, 1.0)) for workload in WORKLOADS for tpot in (12, 15, 20, 50)
    ]
    jobs = [(name, *cell) for cell in cells for name in CONTESTANTS]
    results = iter(list(workers.map(highest_rate, jobs)))
    print(f"| workload | limits | {' | '.join(CONTESTANTS)} | adaptive : better |")
    print("|---|---|" + "---|" * (len(CONTESTANTS) + 1))
    for workload, limits in cells:
        rates = {name: next(results) for name in CONTESTANTS}
        gain = rates["adaptive"] / max(rates["replicas"], rates["fixed"])
        told = " | ".join(f"{rate:.1f}" for rate in rates.values())
        print(f"| {workload} | {limits} | {told} | {gain:.2f} |")


def shares_taken(job: tuple[str, float, Limits, bool]) -> str:
    """Of all requests the share taken, of those the share in time, and of all that in time."""
    workload, rate, limits, refuses = job
    requests = play(lambda hardware: Adaptive(hardware, limits, refuses), workload, rate)
    num_taken = sum(one.decode >= 0 for one in requests)
    num_good = sum(one.is_good(limits) for one in requests)
    shares = num_taken / len(requests), num_good / num_taken, num_good / len(requests)
    return " ".join(f"{share:.0%}" for share in shares)


def print_refusals(workers: ProcessPoolExecutor) -> None:
    loads = (0.5, 0.9, 1.1, 1.3, 1.5)
    cells = [
        (workload, Limits(tpot / 1e3, 1.0), refuses)
        for workload in WORKLOADS
        for tpot in (15, 50)
        for refuses in (False, True)
    ]
    jobs = [(name, load * SATURATION[name], *rest) for name, *rest in cells for load in loads]
    results = iter(list(workers.map(shares_taken, jobs)))
    print(f"| workload | limits | refuses | {' | '.join(f'{load:.0%}' for load in loads)} |")
    print("|---|---|---|" + "---|" * len(loads))
    for workload, limits, refuses in cells:
        row = " | ".join(next(results) for _ in loads)
        print(f"| {workload} | {limits} | {'yes' if refuses else 'no'} | {row} |")


def turns_told(job: tuple[str, str, float, Limits]) -> str:
    """Of later turns the share of the history's tokens that was computed where it is, and the
    median first token in ms; of all requests the share in time."""
    name, workload, rate, limits = job
    requests = play(lambda engines: CONTESTANTS[name](engines, limits), workload, rate)
    later = [one for one in requests if one.most_held]
    share = sum(one.held for one in later) / sum(one.most_held for one in later)
    first = 1e3 * quantile([one.first_token for one in later], 0.5)
    good = sum(one.is_good(limits) for one in requests) / len(requests)
    return f"{share:.0%} {first:.0f} {good:.0%}"


def hindsight(job: tuple[str, float, Limits, int]) -> str:
    """Of one seed the share in time of each contestant, and of the best placement found."""
    workload, rate, limits, seed = job
    arrivals = make(workload, rate, SECONDS, seed)
    runs = [Simulation(PAIR, arrivals, build(PAIR, limits)).run() for build in CONTESTANTS.values()]
    counted = [[one for one in run if one.arrival.at >= WARM_SECONDS] for run in runs]
    shares = [sum(one.is_good(limits) for one in run) / len(run) for run in counted]
    starts = [[(one.prefill, one.decode) for one in run] for run in runs]
    best = best_share(PAIR, arrivals, limits, starts, WARM_SECONDS, NUM_TRIES)
    return " ".join(f"{100 * share:.0f}" for share in (*shares, best))


def print_hindsight(workers: ProcessPoolExecutor) -> None:
    cells = [
        ("document", rate, Limits(0.010, first))
        for rate, first in ((2.4, 2.0), (4.0, 1.0), (4.0, 2.0))
    ]
    results = workers.map(hindsight, [(*cell, seed) for cell in cells for seed in SEEDS])
    print(f"{' / '.join(CONTESTANTS)} / hindsight, % in time\n")
    print("| workload | requests/s | limits |" + "".join(f" seed {seed} |" for seed in SEEDS))
    print("|---|---|---|" + "---|" * len(SEEDS))
    for workload, rate, limits in cells:
        row = " | ".join(next(results) for _ in SEEDS)
        print(f"| {workload} | {rate:g} | {limits} | {row} |")


def print_turns(workers: ProcessPoolExecutor) -> None:
    names = ("replicas", "fixed", "adaptive")
    cells = [
        (workload, rate, Limits(tpot, 1.0))
        for workload, rates in ((CONVERSATION, (1.5, 3.0)), ("agentic", (8.0, 14.0)))
        for rate in rates
        for tpot in (0.012, 0.025)
    ]
    jobs = [(name, *cell) for cell in cells for name in names]
    results = iter(list(workers.map(turns_told, jobs)))
    print(f"| workload | requests/s | limits | {' | '.join(names)} |")
    print("|---|---|---|" + "---|" * len(names))
    for workload, rate, limits in cells:
        row = " | ".join(next(results) for _ in names)
        print(f"| {workload} | {rate:g} | {limits} | {row} |")


def share_with_caches(job: tuple[str, float, Limits, tuple[float, float]]) -> float:
    """Share in time of two engines whose KV caches have room for so many tokens."""
    name, rate, limits, caches = job
    requests = play(
        lambda engines: CACHE_CONTESTANTS[name](engines, limits),
        MIXED,
        rate,
        hardware=[Hardware(cache_tokens=tokens) for tokens in caches],
    )
    return sum(one.is_good(limits) for one in requests) / len(requests)


def print_caches(workers: ProcessPoolExecutor) -> None:
    cells = [
        (rate, Limits(tpot, 1.0), caches)
        for caches in ((6e4, 6e4), (3.6e4, 3.6e4), (12e4, 3e4), (2.4e4, 12e4))
        for rate, tpot in ((5.0, 0.015), (7.0, 0.05), (9.0, 0.05))
    ]
    jobs = [(name, *cell) for cell in cells for name in CACHE_CONTESTANTS]
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


def print_fleets(workers: ProcessPoolExecutor) -> None:
    jobs = [(num, name) for num in (4, 16, 64, 256) for name in CONTESTANTS]
    results = iter(list(workers.map(fleet_share, jobs)))
    print(f"| engines | {' | '.join(CONTESTANTS)} |\n|---|" + "---|" * len(CONTESTANTS))
    for num in (4, 16, 64, 256):
        print(f"| {num} | {' | '.join(f'{next(results):.0%}' for _ in CONTESTANTS)} |")


TABLES = {
    "measured": print_measured,
    "grid": print_grid,
    "highest": print_highest,
    "refusals": print_refusals,
    "caches": print_caches,
    "turns": print_turns,
    "hindsight": print_hindsight,
    "fleets": print_fleets,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as workers:
        TABLES[args.table](workers)


if __name__ == "__main__":
    main()
