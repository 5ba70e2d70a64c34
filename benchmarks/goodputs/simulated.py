"""Tables of simulated goodput: `python -m goodputs.simulated TABLE`, in the folder benchmarks.

`measured`: beside the cells of a measurement on two H200. `fleets`: adaptive placement beside the
best of all other ways by hindsight, whose order, chunk and split are searched for each cell.
"""

import argparse
import json
import math
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from goodputs import shapes
from goodputs.policies import Adaptive, Fixed, Replicas, Simple, Tuned
from goodputs.simulator import Hardware, Policy, Request, Simulation
from vllm_commext.bench.workload import MIXED, Arrival
from vllm_commext.limits import Limits
from vllm_commext.proxy.policy.engine_speed import area_of

MEASURED = Path(__file__).with_name("measured.json")
"""Shares in time of a run of `goodput.py` on two H200, by way and workload."""
H200 = Hardware(
    step=0.00446,
    answer=39e-6,
    context_token=3.5e-8,
    prompt_context=5.6e-9,
    longest=1.74e-8,
    prompt_token=2.047e-5,
    million_pairs=9.4e-4,
    prompt_step=0.0108,
    overhead=0.0168,
)
"""Fitted to its replicas and fixed roles; the ways that learn are the test."""
SATURATION = {
    "document": 3.0,
    MIXED: 7.5,
    shapes.CONVERSATION: 2.0,
    shapes.CODE: 17.0,
    shapes.BURST: 7.5,
    shapes.BIMODAL: 8.5,
}
"""Requests a second that an engine could take without any limit, about."""


def saturation(trace: Sequence[Arrival]) -> float:
    """The same of a trace, by times of prompts and tokens."""
    of, seconds = Hardware(), 0.0
    for one, held in zip(trace, shapes.held_tokens(trace), strict=True):
        new = one.prompt_tokens - held
        seconds += new * of.prompt_token + of.million_pairs * area_of(new, held)
        seconds += one.output_tokens * (of.answer + of.context_token * one.prompt_tokens)
    return 0.85 * len(trace) / seconds  # of the workloads above it is 0.74 to 0.91


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
PAUSE_SECONDS = 100.0
"""Between two loads on a contestant: the others' turns."""


def replayed(row: Mapping[str, Any], play: Mapping[str, Any]) -> dict[str, list[Request]]:
    """One way's requests of a measurement by workload: a warm-up, then rounds. Turns repeat other
    answers than engines gave, so what has gone out is held. Late ones do not end."""
    loads, pair = [play["warm-up"], *play["loads"] * play["rounds"]], (H200, H200)
    arrivals: list[Arrival] = []
    ends: list[float] = []
    found: dict[str, list[Request]] = {}
    for number, (workload, rate, seconds) in enumerate(loads):
        drawn = shapes.WORKLOADS[workload](rate, seconds, play["seed"])
        for one, held in zip(drawn, shapes.held_tokens(drawn), strict=True):
            group = one.group * len(loads) + number if one.group >= 0 else -1
            at = one.at + number * PAUSE_SECONDS
            arrivals.append(replace(one, at=at, group=group, shared_tokens=held))
            ends.append(number * PAUSE_SECONDS + drawn[-1].at + play["wait"])
    policy = CONTESTANTS[row["way"].split()[0]](pair, Limits(*row["told"]))
    for request, end in zip(Simulation(pair, arrivals, policy).run(), ends, strict=True):
        number = int(request.arrival.at // PAUSE_SECONDS)
        request.end = request.end if request.end <= end else math.inf
        found.setdefault(loads[number][0] if number else "", []).append(request)
    return found


def print_measured(_: argparse.Namespace) -> None:
    content = json.loads(MEASURED.read_text())
    limits = [Limits(tpot, content["first"]) for tpot in content["tpot"]]
    print("| workload | way |", *(f"{1e3 * one.tpot:g} ms |" for one in limits))
    print("|---|---|" + "---|" * len(limits))
    for row in content["rows"]:
        found = replayed(row, content["play"])
        for workload, good in row["good"].items():
            both = zip([_share(found[workload], one) for one in limits], good, strict=True)
            cells = [f"{100 * simulated:.0f}, {100 * measured:.0f}" for simulated, measured in both]
            print("|", " | ".join([workload, row["way"], *cells]), "|")


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


def print_fleets(args: argparse.Namespace) -> None:
    print("| engines | load | cells | best other | adaptive | least | mean | below 0.97 |")
    print("|---|---|---|---|---|---|---|---|")
    lost: list[str] = []
    for num, at in product(args.engines, args.loads):
        pairs: list[tuple[float, float]] = []
        for workload, seed in product(args.workloads, args.seeds):
            cell = Cell(num, workload, at, seed)
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


TABLES = {"measured": print_measured, "fleets": print_fleets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--engines", type=int, nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument("--workloads", nargs="+", choices=SATURATION, default=SATURATION)
    parser.add_argument("--traces", type=Path, nargs="+", help="JSON lines or CSV: these alone")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of saturation")
    parser.add_argument("--set", nargs="+", default=(), help="the policy's: placement.MARGIN=0.2")
    parser.add_argument("--seeds", type=int, nargs="+", default=(201,), help="of the arrivals")
    args = parser.parse_args()
    for module, constant, value in [one.replace("=", ".", 1).split(".", 2) for one in args.set]:
        setattr(import_module("vllm_commext.proxy.policy." + module), constant, literal_eval(value))
    for path in args.traces or ():
        trace = shapes.read_trace(path)
        shapes.WORKLOADS[path.stem] = shapes.windows_of(trace)
        SATURATION[path.stem] = saturation(trace)
    args.workloads = [path.stem for path in args.traces or ()] or args.workloads
    TABLES[args.table](args)


if __name__ == "__main__":
    main()
