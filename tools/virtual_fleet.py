"""The real proxy before stand-in engines, in virtual time: load on the machine changes nothing.

    python -m tools.virtual_fleet --engines 4 --workloads mixed code --loads 0.9 --told 12:1000

Engines, proxy and client share one event loop, whose clock goes on to the next timer when no socket
has had anything for a millisecond. What the proxy computes takes no time, so its policy and its
queues are seen, and not its speed. Each play has a fleet of its own, which knows nothing yet.

Ways: adaptive placement, given each pair of limits by itself; replicas and fixed roles, with each
order of prompts (arrival; by each limit to the first token), tokens of a step and split. Rows are
JSON; `--table` reads files of them and writes each cell's best other way, by hindsight, beside it.
"""

import argparse
import asyncio
import json
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from goodputs.contestants import FIXED, REPLICAS, Contestant, in_order, limits_of, ordered  # noqa: E402
from goodputs.engines import BOTH, EngineSet  # noqa: E402
from goodputs.rounds import OPEN_ENDED  # noqa: E402
from goodputs.shapes import WORKLOADS  # noqa: E402
from goodputs.simulated import LOADS, SATURATION, SPLITS  # noqa: E402

from tests.kit.ports import LOOPBACK  # noqa: E402
from tools import stand_in  # noqa: E402
from vllm_commext.bench import client, figures, workload  # noqa: E402
from vllm_commext.cli.proxy import add_arguments, make_config  # noqa: E402
from vllm_commext.proxy import routes_readiness_shutdown as server  # noqa: E402
from vllm_commext.proxy.config import ADAPTIVE, ARRIVAL, LOCAL, ProxyConfig  # noqa: E402

VOCABULARY, CHECK_SECONDS, WAIT_SECONDS = 32000, 3.0, 8.0
QUIET_SECONDS = 0.001


class Clock(selectors.DefaultSelector):
    """Stands for time while a loop waits."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout else timeout)
        if found or not timeout:
            return found
        if not (found := super().select(QUIET_SECONDS)):
            Clock.now += timeout
        return found


class Loop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return Clock.now


async def listening(runner: web.AppRunner) -> str:
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    return f"http://{LOOPBACK}:{runner.addresses[0][1]}"


def config_of(way: Contestant, urls: Sequence[str]) -> ProxyConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return make_config(parser.parse_args(way.proxy_options(urls)))


def ways_of(names: Sequence[str], num: int, args: argparse.Namespace) -> list[Contestant]:
    chunks = [EngineSet(BOTH, chunk) for chunk in args.chunks]
    told = args.told if ADAPTIVE in names else ()
    found = [replace(ordered(EngineSet(BOTH, 2048), limits), name=ADAPTIVE) for limits in told]
    orders: dict[str, tuple[str, ...]] = {ARRIVAL: ("--prompt-order", ARRIVAL)}
    for first in sorted({limits.first for limits in args.told}):
        orders[f"in order {1e3 * first:g}"] = in_order(first)
    for (order, by), engines in product(orders.items(), chunks):
        text = f"{order} {engines.step}"
        if REPLICAS in names:
            found.append(Contestant(f"{REPLICAS} {text}", engines, ("--placement", LOCAL, *by)))
        for one in SPLITS[num] if FIXED in names else ():
            found.append(Contestant(f"{FIXED} {one}P {text}", engines, by, one))
    return found


async def play(
    num: int, load: float, name: str, seed: int, way: Contestant, args: argparse.Namespace
) -> dict[str, Any]:
    """A row: shares in time by pairs of limits."""
    hardware = replace(stand_in.HARDWARE, step_tokens=way.engines.step)
    engines = [
        web.AppRunner(stand_in.app_of(number, hardware), access_log=None, handler_cancellation=True)
        for number in range(num)
    ]
    urls = [await listening(one) for one in engines]
    proxy = server.make_runner(server.ProxyApp(config_of(way, urls)))
    url = await listening(proxy)
    await asyncio.sleep(CHECK_SECONDS)
    endpoint = await client.find(url, vocab_size=VOCABULARY)
    arrivals = WORKLOADS[name](load * SATURATION[name] * num, args.seconds, seed)
    made = workload.bodies(arrivals, endpoint.model, VOCABULARY, (seed, 1))
    bodies = [OPEN_ENDED + body[1:] for body in made]
    samples = (await client.play(endpoint, arrivals, bodies, wait_seconds=WAIT_SECONDS)).samples
    for runner in (proxy, *engines):
        await runner.cleanup()
    good = {
        f"{1e3 * limits.tpot:.0f}/{1e3 * limits.first:.0f}": figures.num_good(samples, limits)
        for limits in ([way.told] if way.told else args.told)
    }
    cell = {"engines": num, "load": load, "workload": name, "seed": seed}
    return {**cell, "way": way.name, "total": len(samples), "good": good}


def table(paths: Sequence[Path]) -> str:
    """Percent in time of adaptive placement and of the best other way, of each cell, and their
    ratio."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        for limits, good in row["good"].items():
            key = row["engines"], row["load"], row["workload"], limits, row["seed"]
            cells.setdefault(key, {})[row["way"]] = good / row["total"]
    lines = [
        "| engines | load | workload | given | seed | best other | adaptive | ratio |",
        "|---" * 8 + "|",
    ]
    for (num, load, name, limits, seed), shares in sorted(cells.items()):
        mine = shares.pop(ADAPTIVE, None)
        if mine is None or not shares:
            continue
        best = max(shares, key=lambda way: shares[way])
        ratio = f"{mine / shares[best]:.2f}" if shares[best] else "-"
        cell = f"| {num} | {load:.0%} | {name} | {limits} | {seed} "
        lines.append(f"{cell}| {shares[best]:.0%} ({best}) | {mine:.0%} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", choices=SATURATION, default=SATURATION)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of saturation")
    parser.add_argument("--told", type=limits_of, default=limits_of("12:1000,25:500"))
    parser.add_argument(
        "--ways", nargs="+", choices=(ADAPTIVE, REPLICAS, FIXED), default=[ADAPTIVE]
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048], help="of the other ways")
    parser.add_argument("--seconds", type=float, default=16.0, help="of arrivals")
    parser.add_argument("--seeds", type=int, nargs="+", default=[601], help="of the arrivals")
    parser.add_argument("--table", type=Path, nargs="+", help="files of rows to compare")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    time.monotonic = time.perf_counter = lambda: Clock.now
    for cell in product(args.engines, args.loads, args.workloads, args.seeds):
        for way in ways_of(args.ways, cell[0], args):
            loop = Loop(Clock())
            print(json.dumps(loop.run_until_complete(play(*cell, way, args))), flush=True)
            loop.close()


if __name__ == "__main__":
    main()
