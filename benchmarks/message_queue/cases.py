"""What is sent and what is measured."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.kit.processes import cpu_seconds

from .links import Answers, Link

if TYPE_CHECKING:
    from .engine_steps import StepMaker

KIB, MIB = 1 << 10, 1 << 20
GAPS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 1.4)
STEP_REQUESTS = (8, 256)
STEP_GAPS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05)
STEPS, WARM_STEPS = 300, 10
LEAST_SAMPLES = 100  # of a case whose 99th percentile is told
ENGINE_SECONDS = 0.0005
LONG_GAP_SECONDS = 1.0
SILENCE_SECONDS = 5.0
BUSY_SECONDS, BUSY_BYTES = 0.3, 23_000_000
BOTH_WAYS = 20  # messages of 1 MiB: ten times our ring
TENSORS, TENSOR_CALLS = (96 * MIB,), 10
CALM_SECONDS = 1.2  # for so long vLLM's readers keep a core busy after a message


class Cell(NamedTuple):
    """One figure: `value` in `unit` of a variant in a case, of one round."""

    placement: str
    n_readers: int
    case: str
    unit: str
    variant: str
    value: float


Figures = list[tuple[str, str, float]]  # case, unit, value
Measurement = Callable[[Link], Figures]


def named(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def step_encoding_us() -> dict[str, dict[str, float]]:
    """Microseconds of a step of so many requests without any queue, by what encodes it: the call to
    a record, the record to the call, and the same for the answer, together."""
    from vllm_commext.compat.shm_queue import vllm_steps
    from vllm_commext.shm.codec import Decoder, Encoder

    classes, found = vllm_steps(), {}
    for n_requests in STEP_REQUESTS:
        steps = list(step_maker(n_requests).steps(300, in_one_call=True))
        found[f"step of {n_requests}"] = of_kind = {}
        for name, kind in (("the step codec", classes), ("pickle", None)):
            ends = [(Encoder(kind), Decoder(kind)) for _ in range(2)]
            times = []
            for step in steps:
                started = time.perf_counter_ns()
                for (encoder, decoder), message in zip(
                    ends, (step.calls[0], step.answers[0]), strict=True
                ):
                    record: Any = encoder.encode(message)
                    decoder.decode(record)
                times.append((time.perf_counter_ns() - started) / 1e3)
            of_kind[name] = percentile(times, 0.5)
    return found


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


@functools.cache
def step_maker(n_requests: int) -> StepMaker:
    from .engine_steps import StepMaker  # imports vLLM's scheduler, which readers do without

    return StepMaker(n_requests)


def engine_steps(n_requests: int, gap: float, seconds: float, *, in_one_call: bool) -> Measurement:
    """Steps of vLLM's scheduler, there and back, beyond the `gap` that the worker computes in each.

    Where there is one, the engine is busy between two steps, as vLLM's scheduler is.
    """
    count = max(LEAST_SAMPLES, int(seconds / (gap + ENGINE_SECONDS))) if gap else STEPS
    kind = ", in one call" if in_one_call else ""
    name = f"step of {n_requests}{kind}"
    if gap:
        name += f", beyond the worker's {gap * 1e3:g} ms"

    def measure(link: Link) -> Figures:
        steps = list(step_maker(n_requests).steps(WARM_STEPS + count, in_one_call=in_one_call))
        answers = [answer for step in steps for answer in step.answers]
        link.round_trip(Answers(answers, gap))
        found = []
        for step in steps:
            if gap:
                occupied(ENGINE_SECONDS)
            started = time.perf_counter()
            link.step(step.calls)
            found.append((time.perf_counter() - started - gap) * 1e6)
        found = found[WARM_STEPS:]
        return [(name, "us p50", percentile(found, 0.5)), (name, "us p99", percentile(found, 0.99))]

    return measure


def occupied(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def call(argument: object) -> tuple[Any, ...]:
    return ("execute_model", (argument,), {}, 0)


def to_a_busy_reader() -> Measurement:
    """How long a large array keeps the writer, where the first reader is busy meanwhile."""
    array = np.frombuffer(os.urandom(BUSY_BYTES), np.uint8).copy()
    case = f"{BUSY_BYTES // 10**6} MB to a reader that is busy for {BUSY_SECONDS * 1e3:g} ms"

    def measure(link: Link) -> Figures:
        link.round_trip(Answers([("done", "busy"), ("done", None)], BUSY_SECONDS))
        link.send(call(None))
        time.sleep(BUSY_SECONDS / 10)
        started = time.perf_counter()
        link.send(call(array))
        held = time.perf_counter() - started
        for _ in range(2):
            link.receive[0]()
        return [(case, "ms that the writer is held", held * 1e3)]

    return measure


def both_ways() -> Measurement:
    """Calls and answers, all of which are sent before the first answer is taken."""
    array = np.frombuffer(os.urandom(MIB), np.uint8).copy()

    def measure(link: Link) -> Figures:
        if link.holds_little:
            return []
        link.round_trip(Answers([("done", array)] * BOTH_WAYS, 0.0))
        started = time.perf_counter()
        for _ in range(BOTH_WAYS):
            link.send(call(array))
        for _ in range(BOTH_WAYS):
            link.receive[0]()
        took = time.perf_counter() - started
        return [(f"{BOTH_WAYS} MiB both ways at once", "ms", took * 1e3)]

    return measure


def tensor_calls(size: int) -> Measurement:
    """Calls with a large tensor of random numbers, each after the answer to the one before."""

    def measure(link: Link) -> Figures:
        import torch

        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
        link.round_trip(Answers([("done", None)] * (1 + TENSOR_CALLS), 0.0))
        link.step([call(tensor)])  # the first use of its memory
        found = []
        for _ in range(TENSOR_CALLS):
            started = time.perf_counter()
            link.step([call(tensor)])
            found.append((time.perf_counter() - started) * 1e3)
        return [(f"call with a tensor of {named(size)}", "ms p50", percentile(found, 0.5))]

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
    obj, is_long = b"x" * 100, gap >= LONG_GAP_SECONDS
    times = max(2 if is_long else LEAST_SAMPLES, int(seconds / gap))

    def measure(link: Link) -> Figures:
        reader, writer = cpu_seconds([link.pids[0]]), cpu_seconds(["self"])
        started = time.perf_counter()
        found = timed(link, obj, lambda count: count >= times, gap)
        wall = time.perf_counter() - started
        name = f"one message every {gap * 1e3:g} ms"
        figures = [(name, "us p50", percentile(found, 0.5))]
        if not is_long:
            figures.append((name, "us p99", percentile(found, 0.99)))
        share = 100 / wall
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
    tensors: Sequence[int],
    gaps: Sequence[float],
    step_gaps: Sequence[float],
    seconds: float,
    pace_seconds: float,
) -> Iterator[list[Measurement]]:
    """What one variant measures in a row before it is the next one's turn."""
    yield [
        engine_steps(n_requests, 0, seconds, in_one_call=in_one_call)
        for n_requests in STEP_REQUESTS
        for in_one_call in (False, True)
    ]
    for gap in step_gaps:
        yield [engine_steps(n, gap, pace_seconds, in_one_call=False) for n in STEP_REQUESTS]
    yield [throughput(size, seconds) for size in (100, 10 * KIB)]
    yield [to_a_busy_reader(), both_ways()]
    if tensors:
        yield [tensor_calls(size) for size in tensors]
    if gaps:
        yield [paced(gap, pace_seconds) for gap in gaps]


def one_round(
    links: dict[str, Link],
    measurements: list[list[Measurement]],
    placement: str,
    n_readers: int,
    *,
    with_silence: bool,
) -> Iterator[Cell]:
    """Every group, and in it one variant after the other; then silence, if so."""
    for group in measurements:
        for name, link in links.items():
            for measure in group:
                for case, unit, value in measure(link):
                    yield Cell(placement, n_readers, case, unit, name, value)
            if name == "vllm":
                time.sleep(CALM_SECONDS)
    if not with_silence:
        return
    case, unit = f"{SILENCE_SECONDS:g} s of silence", "% of a core, reader"
    for name, share in silence(links).items():
        yield Cell(placement, n_readers, case, unit, name, share)
