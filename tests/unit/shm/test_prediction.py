"""Waits about as long as a GPU step: when their end is expected, and that nothing is lost by it."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import processes
from vllm_commext.shm.ring import RingReader, RingWriter

SOURCE = Path(__file__).with_name("guess_waits.c")
INCLUDE = Path(__file__).resolve().parents[3] / "csrc" / "shm"
COMPILER = shutil.which("cc") or shutil.which("gcc")
US, MS = 1_000, 1_000_000
LATE_NS, SHARE, LONGEST_NS = 150 * US, 6, 100 * MS
Window = tuple[int, int]
Foresee = Callable[[Sequence[int]], list[Window]]


@pytest.fixture(scope="module")
def foresee(tmp_path_factory: pytest.TempPathFactory) -> Foresee:
    """The window of each wait of a sequence, before it was waited for."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("guess") / "guess_waits"
    words = [COMPILER, "-std=c11", "-O1", "-Wall", "-Werror", f"-I{INCLUDE}", str(SOURCE)]
    processes.run([*words, "-o", str(program)], check=True, seconds=120)

    def run(waits: Sequence[int]) -> list[Window]:
        done = processes.run([program], input="\n".join(map(str, waits)), check=True)
        pairs = (line.split() for line in done.stdout.splitlines())
        return [(int(start), int(end)) for start, end in pairs]

    return run


def steps(mean_ns: int, jitter_ns: int, count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [mean_ns + dice.randint(-jitter_ns, jitter_ns) for _ in range(count)]


@settings(max_examples=25, deadline=None)
@given(st.integers(2 * MS, 90 * MS), st.integers(0, 1000))
def test_even_steps_are_foreseen_and_the_spin_is_bounded(
    foresee: Foresee, mean_ns: int, seed: int
) -> None:
    waits = steps(mean_ns, mean_ns // 100, 60, seed)
    windows = foresee(waits)
    assert windows[:4] == [(0, 0)] * 4
    seen = [(w, wait) for w, wait in zip(windows, waits, strict=True) if w[1]]
    assert len(seen) >= 40
    inside = [start <= wait <= end for (start, end), wait in seen]
    assert sum(inside) >= 0.9 * len(inside)
    for (start, end), wait in seen:
        assert end - start >= 2 * LATE_NS
        assert (end - start) * SHARE <= end + start  # twice the margin, twice the mean
        assert abs((start + end) // 2 - mean_ns) <= mean_ns // 20, wait


def test_steps_that_differ_too_much_are_slept_through(foresee: Foresee) -> None:
    windows = foresee(steps(6 * MS, 4 * MS, 200, 1))
    assert sum(end > 0 for _, end in windows[20:]) <= 10


@pytest.mark.parametrize("wait_ns", [700 * US, LONGEST_NS + MS])
def test_short_steps_and_long_silences_are_not_foreseen(foresee: Foresee, wait_ns: int) -> None:
    assert not any(end for _, end in foresee([wait_ns] * 50))


def test_one_late_step_changes_nothing_and_three_in_a_row_end_it(foresee: Foresee) -> None:
    waits = [5 * MS] * 20 + [1000 * MS] + [5 * MS] * 10 + [1000 * MS] * 3 + [5 * MS] * 6
    windows = foresee(waits)
    assert all(start < 5 * MS < end for start, end in windows[4:34])
    assert windows[34:38] == [(0, 0)] * 4
    assert windows[38][1] > 5 * MS


def test_a_new_length_of_step_is_learned(foresee: Foresee) -> None:
    windows = foresee([20 * MS] * 20 + [5 * MS] * 60)
    start, end = windows[-1]
    assert start < 5 * MS < end < 8 * MS


@pytest.mark.timeout(180)
def test_a_reader_that_predicts_gets_every_record_and_foresees_some() -> None:
    writer = RingWriter.create(1, 1 << 16)
    reader = RingReader.attach(writer.address, 0)
    writer.wait_attached(timeout=60)
    reader.core.predict(True)
    got: list[int] = []

    def read() -> None:
        while not got or got[-1] >= 0:
            got.append(int(bytes(reader.read(timeout=60))))

    thread = threading.Thread(target=read)
    thread.start()
    number, deadline = 0, time.monotonic() + 120
    try:
        while reader.counters()["foreseen"] == 0 and time.monotonic() < deadline:
            time.sleep(0.04)
            writer.write(b"%d" % number, timeout=60)
            number += 1
    finally:
        writer.write(b"-1", timeout=60)
        thread.join(60)
    assert got == [*range(number), -1]
    assert reader.counters()["foreseen"] > 0
    reader.close()
    writer.close()
