"""What is sent and what is measured."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_commext.testing.processes import cpu_seconds

from .links import Link

KIB, MIB = 1 << 10, 1 << 20
SIZES = (100, 10 * KIB, 100 * KIB, MIB, 12 * MIB, 24 * MIB)
GAPS_SECONDS = (0.002, 0.01, 0.05, 1.4)
ARRAYS_FROM = 100 * KIB
LONG_GAP_SECONDS = 1.0
SILENCE_SECONDS = 5.0
CALM_SECONDS = 1.2  # for so long vLLM's readers keep a core busy after a message


class Cell(NamedTuple):
    """One figure: `value` in `unit` of a contestant in a case, of one round."""

    placement: str
    n_readers: int
    case: str
    unit: str
    contestant: str
    value: float


Figures = list[tuple[str, str, float]]  # case, unit, value
Measurement = Callable[[Link], Figures]


def scheduler_output(n_requests: int) -> Any:
    """vLLM's own, of a decode step of so many requests."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    names = [f"cmpl-{number:032x}-0" for number in range(n_requests)]
    output = SchedulerOutput.make_empty()
    cached = CachedRequestData.make_empty()
    cached.req_ids = names
    cached.new_block_ids = [
        ([number],) if number % 16 == 0 else None for number in range(n_requests)
    ]
    cached.num_computed_tokens = [100 + number for number in range(n_requests)]
    cached.num_output_tokens = list(range(n_requests))
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    output.total_num_scheduled_tokens = n_requests
    return output


def named(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def payloads(sizes: Sequence[int]) -> dict[str, Any]:
    import torch  # not in the readers, which start much sooner without

    made: dict[str, Any] = {}
    for size in sizes:
        made[f"{named(size)} bytes"] = os.urandom(size)
        if size >= ARRAYS_FROM:
            made[f"{named(size)} numpy"] = np.frombuffer(os.urandom(size), np.uint8).copy()
            made[f"{named(size)} torch"] = torch.randint(0, 255, (size,), dtype=torch.uint8)
    for n_requests in (8, 256):
        made[f"SchedulerOutput of {n_requests}"] = scheduler_output(n_requests)
    return made


def pickling_us() -> dict[str, float]:
    """What a round trip of 100 KiB takes of ours without any queue: twice to the parts of a record
    and back."""
    from vllm_commext.shm.codec import Encoder, decode

    encode, found = Encoder().encode, {}
    for case, obj in payloads([ARRAYS_FROM]).items():
        record = encode(obj)
        parts = record if isinstance(record, bytes) else [owned(part) for part in record]
        times = []
        for _ in range(2000):
            started = time.perf_counter_ns()
            encode(obj)
            decode(parts)
            times.append((time.perf_counter_ns() - started) / 500)
        found[case] = percentile(times, 0.5)
    return found


def owned(part: Any) -> bytes | bytearray:
    return part if isinstance(part, bytes) else bytearray(part)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def timed(link: Link, obj: object, until: Callable[[int], bool], gap: float = 0.0) -> list[float]:
    """Microseconds of each round trip until it is enough."""
    found: list[float] = []
    while not until(len(found)):
        if gap:
            time.sleep(gap)
        started = time.perf_counter_ns()
        link.round_trip(obj)
        found.append((time.perf_counter_ns() - started) / 1e3)
    return found


def round_trips(case: str, obj: object, seconds: float) -> Measurement:
    def measure(link: Link) -> Figures:
        link.round_trip(obj)  # the first of its kind may import something, and touches memory
        end = time.perf_counter() + seconds
        found = timed(link, obj, lambda count: count >= 5 and time.perf_counter() >= end)
        name = f"round trip, {case}"
        return [(name, "us p50", percentile(found, 0.5)), (name, "us p99", percentile(found, 0.99))]

    return measure


def throughput(size: int, seconds: float) -> Measurement:
    message = (os.urandom(size),)

    def measure(link: Link) -> Figures:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in range(50):
                link.send(message)
            count += 50
        link.round_trip("the last")
        rate = count / (time.perf_counter() - started)
        return [(f"throughput, {named(size)}", "messages/s", rate)]

    return measure


def paced(gap: float, seconds: float) -> Measurement:
    """Round trips of 100 bytes at this gap, and what both sides use of a core."""
    obj, times = b"x" * 100, max(2, int(seconds / gap))

    def measure(link: Link) -> Figures:
        reader, writer = cpu_seconds([link.pids[0]]), cpu_seconds(["self"])
        started = time.perf_counter()
        found = timed(link, obj, lambda count: count >= times, gap)
        wall = time.perf_counter() - started
        name = f"one message every {gap * 1e3:g} ms"
        figures = [(name, "us p50", percentile(found, 0.5))]
        if gap < LONG_GAP_SECONDS:
            figures.append((name, "us p99", percentile(found, 0.99)))
        share = 100 / wall
        reader = cpu_seconds([link.pids[0]]) - reader
        figures.append(
            (name, "% of a core, reader", (cpu_seconds([link.pids[0]]) - reader) * share)
        )
        figures.append((name, "% of a core, writer", (cpu_seconds(["self"]) - writer) * share))
        return figures

    return measure


def silence(links: dict[str, Link]) -> dict[str, float]:
    """What one reader of each uses of a core, in percent, in the seconds after a message."""
    before = {}
    for name, link in links.items():
        link.round_trip("the last")
        before[name] = cpu_seconds([link.pids[0]])
    time.sleep(SILENCE_SECONDS)
    share = 100 / SILENCE_SECONDS
    return {
        name: (cpu_seconds([link.pids[0]]) - before[name]) * share for name, link in links.items()
    }


def groups(
    sizes: Sequence[int], gaps: Sequence[float], seconds: float, pace_seconds: float
) -> Iterator[list[Measurement]]:
    """What one contestant measures in a row before it is the next one's turn."""
    made = [round_trips(case, obj, seconds) for case, obj in payloads(sizes).items()]
    for first in range(0, len(made), 5):
        yield made[first : first + 5]
    yield [throughput(size, seconds) for size in (100, 10 * KIB)]
    yield [paced(gap, max(pace_seconds, 2 * gap)) for gap in gaps]


def one_round(
    links: dict[str, Link], measurements: list[list[Measurement]], placement: str, n_readers: int
) -> Iterator[Cell]:
    """Every group, and in it one contestant after the other."""
    for group in measurements:
        for name, link in links.items():
            for measure in group:
                for case, unit, value in measure(link):
                    yield Cell(placement, n_readers, case, unit, name, value)
            if name == "vllm":
                time.sleep(CALM_SECONDS)
    case, unit = f"{SILENCE_SECONDS:g} s of silence", "% of a core, reader"
    for name, share in silence(links).items():
        yield Cell(placement, n_readers, case, unit, name, share)
