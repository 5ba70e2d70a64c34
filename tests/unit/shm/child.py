"""The other process of a test: `child.py <command> <pickled arguments in hex>`.

The queue's class is that of COMMEXT_TEST_QUEUE, `ours` or `vllm`. The process prints a pickled
object when it has come to the point that the test waits for, and its results after that."""

import importlib
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from vllm_commext.shm.ring import RingAddress, RingReader, RingWriter

MODULES = {
    "ours": "vllm_commext.shm.queue",
    "vllm": "vllm.distributed.device_communicators.shm_broadcast",
}
KIND = os.environ.get("COMMEXT_TEST_QUEUE", "ours")
SMALL = {"max_chunk_bytes": 1 << 16, "max_chunks": 2}
LARGE = b"large" * 100_000  # beyond the chunk, and beyond the ring, of a small queue


def queue_class() -> Any:
    return importlib.import_module(MODULES[KIND]).MessageQueue


def say(what: object) -> None:
    sys.stdout.write(pickle.dumps(what).hex() + "\n")
    sys.stdout.flush()


def attach(handle: Any, rank: int = 0) -> Any:
    queue = queue_class().create_from_handle(handle, rank)
    say("attached")
    queue.wait_until_ready()
    return queue


def make(**options: Any) -> Any:
    queue = queue_class()(1, 1, **options)
    say(queue.export_handle())
    queue.wait_until_ready()
    return queue


def read_one_and_sleep(handle: Any) -> None:
    queue = attach(handle)
    say(queue.dequeue(timeout=60))
    time.sleep(120)


def read_and_answer(handle: Any) -> None:
    """Read for ever; say the resident pages after each object that is a string."""
    queue = attach(handle)
    while True:
        obj = queue.dequeue(timeout=120)
        if isinstance(obj, str):
            say(int(Path("/proc/self/statm").read_text().split()[1]))


class Delayed:
    """vLLM sends a large message over this socket, after it has announced it in the ring."""

    def __init__(self, socket: Any, dies: bool) -> None:
        self.socket, self.dies = socket, dies

    def send_multipart(self, *args: Any, **options: Any) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
        self.socket.send_multipart(*args, **options)


def say_when_it_waits(queue: Any) -> None:
    """Say so when the writer of a queue has gone to sleep once more."""
    before = queue.counters()["sleeps"]
    while queue.counters()["sleeps"] == before:
        time.sleep(0.001)
    say("waits")


def write_large_slowly(dies: bool) -> None:
    """A large message that takes long, or that its writer does not live to finish; then a small."""
    queue = make(**SMALL)
    if KIND == "vllm":
        queue.local_socket = Delayed(queue.local_socket, dies)
    else:
        queue.enqueue(LARGE)  # all that may be under way
        threading.Thread(target=say_when_it_waits, args=(queue,), daemon=True).start()
    queue.enqueue(LARGE)
    queue.enqueue("small")
    time.sleep(120)


def write_a_queue_and_sleep(folder: str) -> None:
    before = set(os.listdir(folder))
    queue = make()
    queue.enqueue("hello")
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = {line[line.index("/dev/shm/") :].split()[0] for line in maps if "/dev/shm/" in line}
    say((sorted(segments), sorted(set(os.listdir(folder)) - before)))
    time.sleep(120)


def fill_a_small_dev_shm() -> None:
    """Queues for a server of eight workers, all of them used, where a container has its default."""
    writers = [queue_class()(8, 8), *(queue_class()(1, 1) for _ in range(8))]
    readers = [
        [queue_class().create_from_handle(writer.export_handle(), rank) for rank in range(n)]
        for writer, n in zip(writers, [8, *[1] * 8], strict=True)
    ]
    array = np.arange(5_000)
    for writer, ends in zip(writers, readers, strict=True):
        for _ in range(100):
            writer.enqueue(array, timeout=60)
            assert all((end.dequeue(timeout=60) == array).all() for end in ends)
    say("done")


def attach_and_sleep(address: RingAddress, rank: int) -> None:
    reader = RingReader.attach(address, rank)
    say("attached")
    time.sleep(30)
    reader.close()


def attach_and_exec(address: RingAddress, rank: int) -> None:
    reader = RingReader.attach(address, rank)
    another = pickle.dumps("another program").hex()
    program = f"import time; print({another!r}, flush=True); time.sleep(30)"
    os.execv(sys.executable, [sys.executable, "-c", program])
    reader.close()


def attach_and_fork(address: RingAddress, rank: int) -> None:
    reader = RingReader.attach(address, rank)
    if (child := os.fork()) > 0:
        say(child)
    time.sleep(30)
    reader.close()


def create_and_sleep(n_readers: int, capacity_bytes: int) -> None:
    writer = RingWriter.create(n_readers, capacity_bytes)
    say(writer.address)
    time.sleep(30)
    writer.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*pickle.loads(bytes.fromhex(sys.argv[2])))
