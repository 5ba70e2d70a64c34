"""The proxy's costs: processor time a token and a request, and the latency that it adds.

Engines that answer at once and pace their tokens stand in for vLLM, so what is left is the
proxy. Four ways to the same decode engine take turns in every round: directly, through
`vllm-commext proxy`, through it with `--no-resume`, and through a two-step proxy of FastAPI and
httpx in the manner of vLLM's toy (`proxy_load/toy.py`). Added latency is what a way takes longer
than the direct one. Of long streams the processor time of two more is measured, which say what the
machine and the library take at least: relays that do nothing else (`proxy_load/floor.py`).

Streams that begin one after the other tell the latency: each lasts a second or ten tokens, and is
followed by another one. Long streams that all begin within one interval tell the processor time of
a token, and how long the first tokens of so many requests at once take.

    python benchmarks/proxy.py --rounds 3 --seconds 8
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import repository  # noqa: F401
from machine import load_average, machine
from proxy_load.client import Samples, run_clients
from proxy_load.processes import HERE, engine, running, wait_listening

from tests.kit.ports import free_port
from tests.kit.processes import cpu_seconds
from tests.kit.supervisor import descendants

DIRECT, OURS, TOY = "direct", "vllm-commext", "FastAPI + httpx"
NO_RESUME = "vllm-commext --no-resume"
FLOORS = {"aiohttp alone": "aiohttp", "bytes alone": "bytes"}
"""Ways that are measured with long streams only, and what `proxy_load/floor.py` calls them."""
WARM_UP_SECONDS = 1.0
BIG_BODY_BYTES = 33_000_000
PROMPT = "Disaggregated prefill means that " * 8
# Streams, and the seconds between two tokens of one: the rate of all together is about the same.
PACES = ((1, 0.02), (32, 0.02), (64, 0.05), (512, 0.4))
LONG_PACES = ((32, 0.02),)
STREAM_SECONDS, MIN_STREAM_TOKENS = 1.0, 10


@dataclass
class Row:
    """One way in one round of one load; times in seconds, of the first token, and of a later
    token from the engine to the client."""

    way: str
    load: str
    num_tokens: int
    num_requests: int
    num_failed: int
    cpu_us_per_token: float
    cpu_us_per_request: float
    first_token_p50: float
    first_token_p99: float
    transit_p50: float
    transit_p99: float
    transit_max: float


def quantile(values: Sequence[float], fraction: float) -> float:
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


@contextmanager
def way_to(way: str, prefill: int, decode: int, folder: Path) -> Iterator[tuple[int, int | None]]:
    """The port to ask at, and the process to charge."""
    if way == DIRECT:
        yield decode, None
        return
    port = free_port()
    urls = [f"http://127.0.0.1:{each}" for each in (prefill, decode)]
    command = [sys.executable, str(HERE / "toy.py"), str(port), *urls]
    if way in FLOORS:
        command = [sys.executable, str(HERE / "floor.py"), FLOORS[way], str(port), str(decode)]
    if way in (OURS, NO_RESUME):
        command = [sys.executable, "-m", "vllm_commext", "proxy", "--port", str(port)]
        command += ["--prefill", urls[0], "--decode", urls[1], "--log-level", "warning"]
        command += ["--no-resume"] if way == NO_RESUME else []
    with running(command, folder / "proxy.log") as process:
        wait_listening(port)
        yield port, process.pid


def used(pid: int | None) -> float:
    """Processor seconds of a process and of all below it; 0.0 where there is none."""
    return 0.0 if pid is None else cpu_seconds([pid, *descendants(pid)])


def measured(way: str, load: str, samples: Samples, cpu: float) -> Row:
    first, transit = samples.first_token, samples.transit
    return Row(
        way,
        load,
        samples.num_tokens,
        samples.num_requests,
        samples.num_failed,
        1e6 * cpu / max(1, samples.num_tokens),
        1e6 * cpu / max(1, samples.num_requests),
        quantile(first, 0.5),
        quantile(first, 0.99),
        quantile(transit, 0.5),
        quantile(transit, 0.99),
        max(transit, default=float("nan")),
    )


def one_round(way: str, folder: Path, seconds: float) -> list[Row]:
    """Every load on one way."""
    rows: list[Row] = []
    with ExitStack() as stack:
        prefill = stack.enter_context(engine(folder, "prefill"))
        decode = stack.enter_context(engine(folder, "decode"))
        port, pid = stack.enter_context(way_to(way, prefill, decode, folder))

        def run(
            load: str, num_clients: int, interval: float, max_tokens: int, spread: float = 0.0
        ) -> None:
            body = {"model": "m", "prompt": PROMPT, "max_tokens": max_tokens}
            body |= {"stream": max_tokens > 1, "token_interval": interval}
            asyncio.run(run_clients(port, num_clients, body, WARM_UP_SECONDS))
            before = used(pid)
            samples = asyncio.run(run_clients(port, num_clients, body, seconds, spread))
            cpu = used(pid) - before
            rows.append(measured(way, load, samples, cpu))

        for num_streams, interval in PACES if way not in FLOORS else ():
            tokens = max(MIN_STREAM_TOKENS, int(STREAM_SECONDS / interval))
            load = f"{num_streams} streams of {tokens} tokens, {1e3 * interval:g} ms"
            run(load, num_streams, interval, tokens, tokens * interval)
        for num_streams, interval in LONG_PACES:
            load = f"{num_streams} long streams, {1e3 * interval:g} ms"
            run(load, num_streams, interval, int(seconds / interval))
        if way in FLOORS:
            return rows
        run("requests of one token, 32 clients", 32, 0.0, 1)
        if way != DIRECT:
            sender = [sys.executable, str(HERE / "big_bodies.py"), str(port)]
            arguments = [str(BIG_BODY_BYTES), str(seconds + WARM_UP_SECONDS)]
            with subprocess.Popen([*sender, *arguments], stdout=subprocess.PIPE) as big:
                run("16 streams, 20 ms, beside bodies of 33 MB", 16, 0.02, int(seconds / 0.02))
                answered = big.communicate(timeout=120)[0].decode()
            rows[-1].load += f" ({answered} in a round)"
    return rows


def medians(rows: Sequence[Row], way: str, load: str) -> dict[str, float]:
    """Each figure's median over the rounds."""
    of = [asdict(row) for row in rows if row.way == way and row.load.startswith(load)]
    numbers = [name for name, value in of[0].items() if isinstance(value, int | float)]
    return {name: statistics.median(row[name] for row in of) for name in numbers}


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A table in Markdown: medians of the rounds, latency less that of the direct way."""
    yield (
        "| load | way | CPU us a token | CPU us a request | first token added, p50 / p99 ms "
        "| later token added, p50 / p99 ms | later token at most, ms | failed |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    loads = list(dict.fromkeys(row.load.partition(" (")[0] for row in rows))
    for load in loads:
        is_direct_known = any(row.way == DIRECT and row.load == load for row in rows)
        direct = medians(rows, DIRECT, load) if is_direct_known else {}
        ways = (row.way for row in rows if row.load.startswith(load) and row.way != DIRECT)
        for way in dict.fromkeys(ways):
            got = medians(rows, way, load)
            added = {name: 1e3 * (value - direct.get(name, 0.0)) for name, value in got.items()}
            first = f"{added['first_token_p50']:.2f} / {added['first_token_p99']:.2f}"
            later = f"{added['transit_p50']:.2f} / {added['transit_p99']:.2f}"
            yield (
                f"| {load} | {way} | {got['cpu_us_per_token']:.0f} "
                f"| {got['cpu_us_per_request']:.0f} | {first} | {later} "
                f"| {1e3 * got['transit_max']:.1f} | {got['num_failed']:.0f} |"
            )


def conditions() -> str:
    packages = ("aiohttp", "uvloop", "fastapi", "httpx", "uvicorn")
    return f"{machine(*packages)}, load average {load_average()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--json", type=Path, help="where to write every row")
    args = parser.parse_args()
    rows: list[Row] = []
    lines = [f"before: {conditions()}"]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for way in (DIRECT, OURS, NO_RESUME, TOY, *FLOORS):
                rows += one_round(way, Path(folder), args.seconds)
    lines += ["", *report(rows), "", f"after: {conditions()}"]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 1 if any(row.num_failed for row in rows if row.way == OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
