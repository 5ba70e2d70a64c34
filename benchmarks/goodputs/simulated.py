"""Tables of simulated goodput: `python -m goodputs.simulated TABLE`, in the folder benchmarks.

`measured`: beside the cells of a measurement on two H100. `fleets`: adaptive placement beside the
best of all other ways by hindsight, whose order, chunk and split are searched for each cell.
`ablation`: what each constant of the policy earns.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from goodputs import shapes
from goodputs.policies import Adaptive, Fixed, Replicas, Simple, Tuned
from goodputs.simulator import Hardware, Policy, Request, Simulation
from vllm_commext.bench.figures import QUANTILES, quantile
from vllm_commext.bench.workload import MIXED
from vllm_commext.limits import Limits
from vllm_commext.proxy.policy import load, placement, speed

PAIR = (Hardware(), Hardware())
MEASURED = Path(__file__).with_name("measured.json")
"""What `goodput.py` wrote on two H100, 2026-11-26; the simulator's times are fitted to it."""
SECONDS, WARM_SECONDS, SEEDS = 45.0, 10.0, (1, 2, 3)
SATURATION = {
    "document": 3.0,
    MIXED: 7.5,
    shapes.CONVERSATION: 2.0,
    shapes.CODE: 17.0,
    shapes.BURST: 7.5,
    shapes.BIMODAL: 8.5,
}
"""Requests a second that an engine could take without any limit, about."""
Build = Callable[[Sequence[Hardware], Limits], Policy]
CONTESTANTS: dict[str, Build] = {
    "replicas": lambda hardware, limits: Replicas(hardware),
    "fixed": lambda hardware, limits: Fixed(hardware),
    "adaptive": lambda hardware, limits: Adaptive(hardware, limits, is_ordered=False),
    "ordered": Adaptive,
    "simple": Simple,
}
CHUNKS = 512, 1024, 2048, 4096
SPLITS = {2: (1,), 3: (1, 2), 4: (1, 2, 3), 8: (2, 3, 4, 5), 16: (4, 6, 8, 10)}
"""Numbers of prefill engines that are tried, by the number of engines."""
TOLD = [Limits(tpot, first) for first in (0.5, 1.0) for tpot in (0.010, 0.012, 0.015, 0.025)]
LOADS = 0.6, 0.9
MIN_SHARE = 0.1
"""Cells in which no other way has as many in time are left out."""
ENOUGH = 0.97
MEASURED_LIMITS = [Limits(tpot, 1.0) for tpot in (0.010, 0.012, 0.015, 0.020, 0.025)]
PAUSE_SECONDS = 100.0
"""Between two loads on a contestant: the others' turns."""


def share_good(
    name: str, workload: str, rate: float, limits: Limits, seeds: Sequence[int] = SEEDS
) -> float:
    """Share of a contestant's requests that are in time, those of the first seconds left out."""
    found: list[Request] = []
    for seed in seeds:
        policy = CONTESTANTS[name](PAIR, limits)
        arrivals = shapes.WORKLOADS[workload](rate, SECONDS, seed)
        requests = Simulation(PAIR, arrivals, policy).run()
        found += [one for one in requests if one.arrival.at >= WARM_SECONDS]
    return sum(one.is_good(limits) for one in found) / max(len(found), 1)


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


def print_measured(_: argparse.Namespace) -> None:
    content = json.loads(MEASURED.read_text())
    seconds = float(content["about"]["arrivals"].split()[0])
    rows = {(row["way"].split()[0], row["rate"]): row for row in content["rows"]}
    rates = list(dict.fromkeys(rate for _, rate in rows))
    print("| requests/s | way | simulated | measured |\n|---|---|---|---|")
    for way in ("replicas", "fixed", "adaptive"):
        for rate, requests in replayed(way, rates, seconds).items():
            cells = simulated_figures(requests), measured_figures(rows[way, rate])
            print(f"| {rate:g} | {way} | {' | '.join(cells)} |")


class Cell(NamedTuple):
    num: int
    workload: str
    load: float
    seed: int

    def requests(self, build: Build, limits: Limits, chunk: int = 2048) -> list[Request]:
        seconds, warm = (24.0, 6.0) if self.num <= 4 else (16.0, 5.0)
        hardware = [Hardware(noise=0.1, step_tokens=chunk)] * self.num
        rate = self.load * SATURATION[self.workload] * self.num
        arrivals = shapes.WORKLOADS[self.workload](rate, seconds, self.seed)
        requests = Simulation(hardware, arrivals, build(hardware, limits)).run()
        return [one for one in requests if one.arrival.at >= warm]

    def share(self, build: Build, limits: Limits) -> float:
        return _share(self.requests(build, limits), limits)


def _share(requests: Sequence[Request], limits: Limits) -> float:
    return sum(one.is_good(limits) for one in requests) / max(len(requests), 1)


def _roles(num: int) -> Build:
    return lambda hardware, limits: Tuned(hardware, limits, num)


def others(cell: Cell) -> dict[Limits, dict[str, float]]:
    """Share in time of all other ways, by limits. Only the order depends on limits told."""
    found: dict[Limits, dict[str, float]] = {limits: {} for limits in TOLD}
    ways = [(f"replicas, {chunk}", _roles(0), chunk) for chunk in CHUNKS]
    ways += [(f"{num} prefill", _roles(num), 2048) for num in SPLITS[cell.num]]
    ways += [(name, CONTESTANTS[name], 2048) for name in ("replicas", "fixed")]
    for (name, build, chunk), first in product(ways, {one.first for one in TOLD}):
        requests = cell.requests(build, Limits(0.012, first), chunk)
        for limits in [one for one in TOLD if one.first == first]:
            found[limits][name] = _share(requests, limits)
    for limits in TOLD:
        found[limits]["simple"] = cell.share(Simple, limits)
    return found


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for each in product(args.engines, args.workloads, args.loads, args.seeds):
        yield Cell(*each)


def print_fleets(args: argparse.Namespace) -> None:
    print("| engines | load | cells | best other | adaptive | least | mean | below 0.97 |")
    print("|---|---|---|---|---|---|---|---|")
    lost: list[str] = []
    for num, at in product(args.engines, args.loads):
        pairs: list[tuple[float, float]] = []
        for cell in cells(argparse.Namespace(**{**vars(args), "engines": [num], "loads": [at]})):
            for limits, shares in others(cell).items():
                best = max(shares, key=lambda name: shares[name])
                if shares[best] >= MIN_SHARE:
                    share = cell.share(Adaptive, limits)
                    pairs.append((share, shares[best]))
                    if share < ENOUGH * shares[best]:
                        lost.append(f"{cell}, {limits}: {share:.0%}, {best} {shares[best]:.0%}")
        ratios = [share / best for share, best in pairs] or [0.0]
        means = [sum(each) / len(pairs) for each in zip(*pairs, strict=True)] or [0.0, 0.0]
        figures = f"{means[1]:.0%} | {means[0]:.0%} | {min(ratios):.2f} | "
        figures += f"{sum(ratios) / len(ratios):.2f} | {sum(one < ENOUGH for one in ratios)}"
        print(f"| {num} | {at:.0%} | {len(pairs)} | {figures} |", flush=True)
    print("\n".join(["", *lost]))


CHANGES: list[tuple[Any, str, Any]] = [
    (placement, "MAX_SEEN", 1000),
    (placement, "DELAY_WEIGHT", 1e-6),
    (placement, "OTHERS_DELAY", 0.0),
    (placement, "GIVEN_UP", 1e9),
    (load, "RECENT_SECONDS", 10.0),
    (load, "SAME_STEP_SECONDS", 0.0),
    (load, "SPARED", 1.0),
    (load, "SPARED", 0.1),
    (load, "IN_TIME", 1.0),
    (speed, "FORGETTING", 0.997),
    (speed, "MAX_RATIO", 1e9),
    (speed, "UNKNOWN_LENGTHS", (1,)),
    (speed, "_SPREAD", {0: 1.0}),
]
"""A module's constant, and a value with which it does little."""


def print_ablation(args: argparse.Namespace) -> None:
    print("| constant | with | share in time |\n|---|---|---|")
    for module, name, value in [(placement, "MAX_SEEN", placement.MAX_SEEN), *CHANGES]:
        before = getattr(module, name)
        setattr(module, name, value)
        shares = [cell.share(Adaptive, limits) for cell in cells(args) for limits in TOLD]
        setattr(module, name, before)
        print(f"| {name} | {value} | {sum(shares) / len(shares):.1%} |", flush=True)


TABLES = {"measured": print_measured, "fleets": print_fleets, "ablation": print_ablation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--engines", type=int, nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument("--workloads", nargs="+", choices=SATURATION, default=SATURATION)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of saturation")
    parser.add_argument("--seeds", type=int, nargs="+", default=(201,), help="of the arrivals")
    args = parser.parse_args()
    TABLES[args.table](args)


if __name__ == "__main__":
    main()
