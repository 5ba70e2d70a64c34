"""Two processes on one core while another one is free: one of them moves, and stays free to."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.shm.ring import RingReader, RingWriter

Child = subprocess.Popen[str]
ROUND_TRIPS = 2000
TRIES = 20

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores that this process may run on"
)


@dataclass
class Pair:
    """This process and one that answers."""

    child: Child
    requests: RingWriter
    answers: RingReader

    def talk(self) -> None:
        for _ in range(ROUND_TRIPS):
            self.requests.write(b"x", timeout=20)
            self.answers.read(timeout=20)

    def confine(self, cores: set[int]) -> None:
        for pid in (0, self.child.pid):
            os.sched_setaffinity(pid, cores)

    def child_moves(self) -> int:
        """Of the reader of the requests so far."""
        self.requests.write(b"moves", timeout=20)
        record = self.answers.read(timeout=20)
        assert isinstance(record, bytes)
        return int(record)

    def moves(self) -> int:
        """Of both processes so far, whichever is the one that moves."""
        return self.child_moves() + self.answers.counters()["moves"]

    def allowed(self) -> list[set[int]]:
        return [os.sched_getaffinity(pid) for pid in (0, self.child.pid)]


@pytest.fixture
def pair(start: Callable[..., Child], said: Callable[[Child], str]) -> Iterator[Pair]:
    before = os.sched_getaffinity(0)
    requests = RingWriter.create(1, 4096)
    child = start("echo", requests.address, 0)
    yield Pair(child, requests, RingReader.attach(pickle.loads(bytes.fromhex(said(child))), 0))
    os.sched_setaffinity(0, before)
    requests.close()


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """With a process on this core that never rests, but lets others go first."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nos.nice(19)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def test_one_of_the_two_moves_and_both_may_still_run_everywhere(pair: Pair) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with busy(second):  # else the kernel may take one of the two there itself
        for _ in range(TRIES):
            pair.confine({first})
            pair.talk()
            assert pair.moves() == 0
            pair.confine({first, second})  # this by itself moves nobody
            pair.talk()
            assert pair.allowed() == [{first, second}] * 2
            if pair.moves():
                return
    pytest.fail(f"nobody has moved in {TRIES} tries")


def test_who_may_run_on_one_core_only_stays_there(pair: Pair) -> None:
    core = {max(os.sched_getaffinity(0))}
    pair.confine(core)
    pair.talk()
    assert (pair.moves(), pair.allowed()) == (0, [core, core])


def test_messages_that_are_seldom_move_nobody(pair: Pair) -> None:
    for _ in range(20):
        pair.requests.write(b"x", timeout=20)
        pair.answers.read(timeout=20)
        time.sleep(0.01)
    assert (pair.child_moves(), pair.requests.counters()["moves"]) == (0, 0)


def test_nobody_spins_on_the_core_of_a_reader_that_has_something_to_read(
    start: Callable[..., Child], said: Callable[[Child], str]
) -> None:
    """The first reader answers from a core of its own, soon enough to spin for. The second one
    cannot run as long as this process does."""
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    requests = RingWriter.create(2, 4096)
    children = [start("echo", requests.address, rank) for rank in (0, 1)]
    answers = [RingReader.attach(pickle.loads(bytes.fromhex(said(child))), 0) for child in children]
    for pid, core in zip(
        (0, children[0].pid, children[1].pid), (first, second, first), strict=True
    ):
        os.sched_setaffinity(pid, {core})
    try:
        for _ in range(ROUND_TRIPS):
            requests.write(b"x", timeout=20)
            for answer in answers:
                answer.read(timeout=20)
    finally:
        os.sched_setaffinity(0, before)
        requests.close()
    assert answers[0].counters()["parks"] > 0.3 * answers[0].counters()["waits"]
