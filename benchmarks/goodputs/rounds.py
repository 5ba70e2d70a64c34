"""Rounds in which all contestants take turns with the same arrivals, within a budget of time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from goodputs.contestants import Contestant
from goodputs.plays import Play
from goodputs.shapes import WORKLOADS
from tests.kit.metrics import scrape
from tests.kit.servers import Server
from vllm_commext.bench import client, figures, workload
from vllm_commext.bench.workload import Arrival, bodies

TRACE = "trace"
IDLE_SECONDS = 15.0
POLL_SECONDS = 0.1
UNFINISHED = ("vllm:num_requests_running", "vllm:num_requests_waiting")
OPEN_ENDED = b'{"max_completion_tokens": 4096, '
"""Engines ignore it in completions, and end at ``max_tokens``; placement takes it for the bound,
and so learns nothing of an answer's length in advance."""
FIRST_TAIL_SECONDS = 6.0
"""What a load is taken to last beyond its arrivals until one has been seen."""


@dataclass(frozen=True)
class Load:
    """How arrivals are made: of a trace file or by seed, their tokens times *factor* and at most
    *most* a request; played for so many seconds, answers waited for so many more."""

    seconds: float
    wait_seconds: float
    factor: float
    most: int
    seed: int
    trace_file: Path | None

    def arrivals(self, name: str, rate: float, seconds: float) -> list[Arrival]:
        if name == TRACE and self.trace_file:
            found = workload.at_rate(workload.read_trace(self.trace_file), rate, seconds)
        else:
            found = WORKLOADS[name](rate, seconds, self.seed)
        return workload.scaled(found, self.factor, self.most)


@dataclass(frozen=True)
class Runner:
    """A contestant with its proxy and its engines."""

    contestant: Contestant
    proxy: Server
    engines: Sequence[Server]


class Rounds:
    """Plays loads on contestants; ``end``: when to begin no more, of the monotonic clock."""

    def __init__(self, load: Load, runners: Sequence[Runner], vocab_size: int, end: float) -> None:
        self._load = load
        self._runners = [*runners]
        self._vocab_size = vocab_size
        self._end = end
        self._tail = FIRST_TAIL_SECONDS
        self._num_rounds = 0
        self._num_loads = 0  # each has tokens of its own

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def turn_seconds(self) -> float:
        """About how long all contestants' turns take, by what they took so far."""
        return len(self._runners) * (self._load.seconds + self._tail)

    def warm_up(self, name: str, rate: float, seconds: float) -> None:
        """The same load on every contestant, uncounted; one whose requests all fail is left out."""
        arrivals = self._load.arrivals(name, rate, seconds)
        for one in [*self._runners]:
            samples = self._play(one, arrivals).samples
            print(f"  {one.contestant.name}: {_short(samples)}", flush=True)
            if all(sample.error for sample in samples):
                print(f"  {one.contestant.name} left out", flush=True)
                self._runners.remove(one)

    def round(self, name: str, rate: float, number: int) -> list[Play]:
        """All contestants' turns, in another order each time; none where the time is over."""
        if self.seconds_left() < self.turn_seconds():
            return []
        arrivals = self._load.arrivals(name, rate, self._load.seconds)
        shift = self._num_rounds % len(self._runners)
        self._num_rounds += 1
        found: list[Play] = []
        for one in [*self._runners[shift:], *self._runners[:shift]]:
            begun = time.monotonic()
            played = self._play(one, arrivals)
            self._tail = max(self._tail, time.monotonic() - begun - self._load.seconds)
            chosen = one.contestant
            late = played.late
            found.append(Play(name, rate, number, chosen.name, chosen.told, late, played.samples))
            print(
                f"  {chosen.name}: {_short(played.samples)}, client {late:.3f} s late", flush=True
            )
        return found

    def _play(self, one: Runner, arrivals: Sequence[Arrival]) -> client.Played:
        self._num_loads += 1
        seed = (self._load.seed, self._num_loads)

        async def play() -> client.Played:
            endpoint = await client.find(one.proxy.url, vocab_size=self._vocab_size)
            made = bodies(arrivals, endpoint.model, endpoint.vocab_size, seed)
            made = [OPEN_ENDED + body[1:] for body in made]
            return await client.play(endpoint, arrivals, made, wait_seconds=self._load.wait_seconds)

        played = asyncio.run(play())
        wait_idle(one.engines)
        return played


def wait_idle(engines: Sequence[Server]) -> None:
    """Wait until engines have no request, for a bounded time; say where that was not enough."""
    end = time.monotonic() + IDLE_SECONDS
    while any(scrape(one.url).total(name) for one in engines for name in UNFINISHED):
        if time.monotonic() > end:
            print(f"  engines still have requests after {IDLE_SECONDS:g} s", flush=True)
            return
        time.sleep(POLL_SECONDS)


def _short(samples: Sequence[figures.Sample]) -> str:
    found = figures.summary(samples)
    first, tpot = (1e3 * found[name][1] for name in ("first", "tpot"))
    text = f"{len(samples)} requests, p90 {first:.0f} ms to the first, {tpot:.1f} ms a token"
    failed = figures.errors(samples)
    return text + (f"; failed: {dict(list(failed.items())[:3])}" if failed else "")
