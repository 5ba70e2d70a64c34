"""Nobody spins on a core that a peer needs."""

import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.shm.ring import RingReader, RingWriter

Child = subprocess.Popen[str]
Echoes = Callable[..., tuple[RingWriter, list[Child], list[RingReader]]]
ROUND_TRIPS = 2000

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores that this process may run on"
)


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


def share_slept(requests: RingWriter, answers: RingReader) -> float:
    """Of the waits for an answer."""
    before = answers.counters()
    for _ in range(ROUND_TRIPS):
        requests.write(b"x", timeout=20)
        answers.read(timeout=20)
    sleeps, waits = (answers.counters()[name] - before[name] for name in ("sleeps", "waits"))
    assert waits > 0
    return sleeps / waits


def test_nobody_spins_on_the_core_of_its_peer(allowed: list[int], echoes: Echoes) -> None:
    requests, [child], [answers] = echoes(1)
    for pid in (0, child.pid):
        os.sched_setaffinity(pid, {allowed[0]})
    assert share_slept(requests, answers) > 0.9


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
    assert share_slept(requests, answers[0]) > 0.9
