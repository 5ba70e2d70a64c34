"""Messages of random sizes through the queue, to 1 to 4 readers: none lost, doubled, torn, moved.

    python tests/unit/shm/stress_traffic.py --messages 10000000
    python tests/unit/shm/stress_traffic.py --messages 1000000 --torment 10000

All the processes fork children that drop their copies of the queue. With ``--torment N`` one of
them, N times for each number of readers, is stopped for a moment, or its signal handler raises out
of whatever it is doing."""

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from stress import SHAPE, arguments, start

from vllm_commext.shm.queue import MessageQueue

WAIT_SECONDS = 60
POOL_SIZE = 1021
FORK_EVERY = 5000


def make_pool() -> list[bytes]:
    rng = random.Random(7)
    sizes = [rng.choice((300, 300, 300, 300, 3000)) for _ in range(POOL_SIZE)]
    sizes[::100] = [100 << 10] * len(sizes[::100])
    return [rng.randbytes(rng.randrange(most)) for most in sizes]


POOL = make_pool()


def message(number: int) -> tuple[int, bytes]:
    return number, POOL[number * 7919 % POOL_SIZE]


class Interrupted(Exception):  # noqa: N818 - not an error
    """What the signal's handler raises."""


def raise_once(*_: object) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    raise Interrupted


def attempt(call: Callable[[], Any]) -> Any:
    """What `call` returns, or None if a signal came at any moment from before to after it."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        result = call()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    except Interrupted:
        return None
    return result


def fork_and_drop(ends: list[MessageQueue]) -> None:
    pid = os.fork()
    if pid == 0:
        ends.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)


def write_all(ends: list[MessageQueue], count: int) -> None:
    queue = ends[0]
    for number in range(count):
        while queue.counters()["messages"] == number:
            attempt(lambda number=number: queue.enqueue(message(number), timeout=WAIT_SECONDS))
        if number % FORK_EVERY == 0:
            fork_and_drop(ends)


def read_all(ends: list[MessageQueue], count: int) -> int:
    """How many messages a signal has taken between the queue's return and the caller."""
    queue, number, taken = ends[0], 0, 0
    while number < count:
        got = attempt(lambda: queue.dequeue(timeout=WAIT_SECONDS))
        read = queue.counters()["messages"]
        if got is None:
            assert read in (number, number + 1), f"expected {number} messages, got {read}"
            taken += read - number
        else:
            assert got == message(number), f"message {number} differs"
            assert read == number + 1
        number = read
        if number % FORK_EVERY == 0:
            fork_and_drop(ends)
    return taken


def write(link: Connection, n_readers: int, count: int) -> None:
    queue = MessageQueue(n_readers, n_readers, **SHAPE)
    link.send(queue.export_handle())
    queue.wait_until_ready()
    write_all([queue], count)
    link.send(queue.counters())
    link.recv()  # the queue stays until all have read


def read(link: Connection, rank: int, count: int) -> None:
    queue = MessageQueue.create_from_handle(link.recv(), rank)
    queue.wait_until_ready()
    taken = read_all([queue], count)
    link.send((queue.counters(), taken))


def torment_until_read(processes: list[Any], links: list[Connection], most: int) -> None:
    """At most so often, because a writer that is interrupted again and again may not finish."""
    rng = random.Random(11)
    for _ in range(most):
        if all(link.poll() for link in links):
            return
        victim = rng.choice(processes)
        if not victim.is_alive():
            return
        if rng.random() < 0.1:
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(rng.random() * 0.02)
            os.kill(victim.pid, signal.SIGCONT)
        else:
            os.kill(victim.pid, signal.SIGUSR1)
        time.sleep(rng.random() * 0.01)


def run(n_readers: int, count: int, torment: int) -> None:
    signal.signal(signal.SIGUSR1, raise_once)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # and in all children
    writer, to_writer = start(write, n_readers, count)
    handle = to_writer.recv()
    pairs = [start(read, rank, count) for rank in range(n_readers)]
    readers, links = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for link in links:
        link.send(handle)
    started = time.monotonic()
    if torment:
        torment_until_read([writer, *readers], links, torment)
    results = [link.recv() for link in links]  # EOFError if one has failed
    seconds = time.monotonic() - started
    assert to_writer.recv()["messages"] == count
    to_writer.send("end")
    for process in (writer, *readers):
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0, f"{process} has failed"
    assert all(counters["messages"] == count for counters, _ in results)
    taken = f", {sum(taken for _, taken in results)} taken by signals" if torment else ""
    sys.stdout.write(f"{count} messages to {n_readers} readers in {seconds:.1f} s{taken}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = arguments(__doc__, "messages")
    parser.add_argument("--torment", type=int, default=0, help="signals for each number of readers")
    given = parser.parse_args()
    for n in (1, 2, 3, 4):
        run(n, given.messages // 4, given.torment)
