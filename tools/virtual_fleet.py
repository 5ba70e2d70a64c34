"""The real proxy before stand-in engines, in virtual time: load on the machine changes nothing.

    python -m tools.virtual_fleet --engines 4 --workloads mixed code --loads 0.9 --told 12:1000

Engines, proxy and client share one event loop, whose clock goes on to the next timer when no socket
has had anything for a millisecond. What the proxy computes takes no time, so its policy and its
queues are seen, and not its speed. Each cell has a fleet of its own, which knows nothing yet.
"""

import argparse
import asyncio
import selectors
import sys
import time
from itertools import product
from pathlib import Path

from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from goodputs.contestants import limits_of  # noqa: E402
from goodputs.rounds import OPEN_ENDED  # noqa: E402
from goodputs.shapes import WORKLOADS  # noqa: E402
from goodputs.simulated import LOADS, SATURATION  # noqa: E402

from tests.kit.ports import LOOPBACK  # noqa: E402
from tools import stand_in  # noqa: E402
from vllm_commext.bench import client, figures, workload  # noqa: E402
from vllm_commext.limits import Limits  # noqa: E402
from vllm_commext.proxy import routes_readiness_shutdown as server  # noqa: E402
from vllm_commext.proxy.config import ProxyConfig  # noqa: E402

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


async def play(num: int, load: float, name: str, limits: Limits, args: argparse.Namespace) -> str:
    """A line of a table: % in time, and of what."""
    rate = load * SATURATION[name] * num
    engines = [
        web.AppRunner(stand_in.app_of(number), access_log=None, handler_cancellation=True)
        for number in range(num)
    ]
    both = tuple([await listening(one) for one in engines])
    tpot, first = (round(1e3 * seconds) for seconds in (limits.tpot, limits.first))
    proxy = server.make_runner(
        server.ProxyApp(ProxyConfig((), (), both, tpot_ms=tpot, ttft_ms=first))
    )
    url = await listening(proxy)
    await asyncio.sleep(CHECK_SECONDS)
    endpoint = await client.find(url, vocab_size=VOCABULARY)
    arrivals = WORKLOADS[name](rate, args.seconds, args.seed)
    made = workload.bodies(arrivals, endpoint.model, VOCABULARY, (args.seed, 1))
    bodies = [OPEN_ENDED + body[1:] for body in made]
    samples = (await client.play(endpoint, arrivals, bodies, wait_seconds=WAIT_SECONDS)).samples
    for runner in (proxy, *engines):
        await runner.cleanup()
    share = figures.num_good(samples, limits) / max(len(samples), 1)
    placed = ", ".join(f"{way} {count}" for way, count in figures.placements(samples).items())
    return f"| {num} | {load:.0%} | {name} | {tpot}/{first} | {share:.0%} | {placed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", choices=SATURATION, default=SATURATION)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of saturation")
    parser.add_argument("--told", type=limits_of, default=limits_of("12:1000,25:500"))
    parser.add_argument("--seconds", type=float, default=16.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=601, help="of the arrivals")
    args = parser.parse_args()
    time.monotonic = time.perf_counter = lambda: Clock.now
    print("| engines | load | workload | given | in time | placed |\n|---|---|---|---|---|---|")
    for cell in product(args.engines, args.loads, args.workloads, args.told):
        loop = Loop(Clock())
        print(loop.run_until_complete(play(*cell, args)), flush=True)
        loop.close()


if __name__ == "__main__":
    main()
