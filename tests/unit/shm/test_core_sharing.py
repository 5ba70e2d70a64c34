"""Two processes on one core while another one is free: one of them moves, and stays free to."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.shm.ring import RingReader, RingWriter

Child = subprocess.Popen[str]
Echoes = Callable[..., tuple[RingWriter, list[Child], list[RingReader]]]
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


@pytest.fixture(autouse=True)
def allowed() -> Iterator[list[int]]:
    """The cores that this process may run on, and may again afterwards."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


@pytest.fixture
def echoes(start: Callable[..., Child], said: Callable[[Child], str]) -> Iterator[Echoes]:
    """So many processes that answer: the queue of the requests, they, and their answers. The queue
    has room for all requests of a test."""
    made: list[RingWriter] = []

    def make(count: int, work_s: float = 0) -> tuple[RingWriter, list[Child], list[RingReader]]:
        requests = RingWriter.create(count, 1 << 20)
        made.append(requests)
        children = [start("echo", requests.address, rank, work_s) for rank in range(count)]
        addresses = [pickle.loads(bytes.fromhex(said(child))) for child in children]
        return requests, children, [RingReader.attach(address, 0) for address in addresses]

    yield make
    for requests in made:
        requests.close()


@pytest.fixture
def pair(echoes: Echoes) -> Pair:
    requests, [child], [answers] = echoes(1)
    return Pair(child, requests, answers)


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """With a process on this core that never rests, but lets others go first."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nos.nice(19)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def test_one_of_the_two_moves_and_both_may_still_run_everywhere(
    allowed: list[int], pair: Pair
) -> None:
    first, second = allowed[:2]
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
    allowed: list[int],
    echoes: Echoes,
) -> None:
    """The first reader answers from a core of its own, soon enough to spin for. The second one was
    last on this process's core, and is stopped: it has something to read all the time."""
    first, second = allowed[:2]
    requests, children, answers = echoes(2, 50e-6)
    for pid, core in zip(
        (0, children[0].pid, children[1].pid), (first, second, first), strict=True
    ):
        os.sched_setaffinity(pid, {core})
    for answer in answers:
        requests.write(b"x", timeout=20)
        answer.read(timeout=20)
    children[1].send_signal(signal.SIGSTOP)
    before = answers[0].counters()
    for _ in range(ROUND_TRIPS):
        requests.write(b"x", timeout=20)
        answers[0].read(timeout=20)
    sleeps, waits = (answers[0].counters()[name] - before[name] for name in ("sleeps", "waits"))
    assert sleeps > 0.9 * waits > 0
