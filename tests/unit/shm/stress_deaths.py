"""SIGKILL of random ends of a queue at random moments: the others learn who it was, nothing stays.

    python tests/unit/shm/stress_deaths.py --rounds 500

A survivor has 2 s to raise an error that names the dead process. Where the writer raises, the
other readers learn of its end from it. Some victims die before everyone has attached: then nobody
is promised an error, and the next queue to be created removes what is left."""

import random
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stress import SHAPE, arguments, start

from vllm_commext.shm.queue import MessageQueue

LIMIT_SECONDS = 2.0
GIVE_UP_SECONDS = 20.0
AT_ONCE = 8


def report_error(link: Connection, queue: MessageQueue, work: Any) -> None:
    try:
        queue.wait_until_ready()
        link.send("ready")
        while True:
            work()
    except RuntimeError as error:
        link.send((str(error), time.monotonic()))


def write(link: Connection, n_readers: int, seed: int) -> None:
    rng = random.Random(seed)
    queue = MessageQueue(n_readers, n_readers, **SHAPE)
    link.send(queue.export_handle())
    pause = rng.choice((0, 0, 0.001, 0.02))
    sizes = rng.choice(((10,), (10, 3000), (10, 100_000), (300_000,)))

    def work() -> None:
        queue.enqueue(b"x" * rng.choice(sizes))
        if pause:
            time.sleep(pause)

    report_error(link, queue, work)


def read(link: Connection, handle: Any, rank: int) -> None:
    queue = MessageQueue.create_from_handle(handle, rank)
    report_error(link, queue, queue.dequeue)


@dataclass
class Group:
    processes: list[Any] = field(default_factory=list)
    links: list[Connection] = field(default_factory=list)
    segment: str = ""
    victim: int = 0
    killed: float = 0.0
    early: bool = False

    def add(self, work: Any, *given: object) -> None:
        process, link = start(work, *given)
        self.processes.append(process)
        self.links.append(link)

    def begin(self, rng: random.Random) -> None:
        n_readers = rng.randint(1, 3)
        self.add(write, n_readers, rng.random())
        handle = self.links[0].recv()
        self.segment = handle.buffer_handle.address.name
        self.victim, self.early = rng.randint(0, n_readers), rng.random() < 0.15
        for rank in range(n_readers):
            self.add(read, handle, rank)
        if not self.early:
            for link in self.links:
                assert link.recv() == "ready"

    def kill(self) -> None:
        self.processes[self.victim].kill()
        self.killed = time.monotonic()

    def check(self) -> float:
        """The longest time until a survivor knew; 0 where none is promised to."""
        if self.early:
            return 0.0
        longest, name = 0.0, "writer" if self.victim == 0 else f"reader {self.victim - 1}"
        dead = f"{name} (pid {self.processes[self.victim].pid}, dead"
        for place, link in enumerate(self.links):
            if place == self.victim:
                continue
            assert link.poll(GIVE_UP_SECONDS), f"{place} did not notice the death of {dead}"
            error, moment = link.recv()
            closed = "writer (shut down" if self.victim and place else dead
            assert dead in error or closed in error, error
            longest = max(longest, moment - self.killed)
        assert longest < LIMIT_SECONDS, f"{longest:.2f} s until everyone knew: {dead}"
        return longest

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run(rounds: int, seed: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rng, longest = random.Random(seed), 0.0
    for first in range(0, rounds, AT_ONCE):
        groups = [Group() for _ in range(min(AT_ONCE, rounds - first))]
        try:
            for group in groups:
                group.begin(rng)
            for group in groups:
                time.sleep(rng.random() * 0.05)
                group.kill()
            longest = max(longest, *(group.check() for group in groups))
        finally:
            for group in groups:
                group.end()
        MessageQueue(1, 1, **SHAPE)  # to create one removes what the dead have left
        assert not [one.segment for one in groups if (Path("/dev/shm") / one.segment).exists()]
    sys.stdout.write(f"{rounds} rounds, seed {seed}: at most {longest:.2f} s, nothing left\n")


if __name__ == "__main__":
    given = arguments(__doc__, "rounds").parse_args()
    run(given.rounds, given.seed)
