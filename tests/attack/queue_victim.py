"""The writer of two message queues as a process: one is in use, the other still waits for its
reader, so that its port is open."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attack.judge import soft_limit
from tests.kit.ports import LOOPBACK
from vllm_commext.shm.queue import MessageQueue

BOUND_SECONDS = 30.0


@dataclass
class QueueVictim:
    """The process, this process's reader, and the ports of both queues."""

    process: subprocess.Popen[bytes]
    reader: MessageQueue
    ports: Sequence[int]

    @property
    def pids(self) -> Sequence[int]:
        return [self.process.pid]

    @property
    def serving(self) -> Sequence[int]:
        return self.pids

    def honest(self) -> None:
        """One message, from when it is asked for."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        got = self.reader.dequeue(timeout=BOUND_SECONDS)
        if got != "hello":
            raise ValueError(f"expected hello, got {got!r}")

    def held(self) -> Mapping[str, float]:
        return {"descriptors": float(len(os.listdir(f"/proc/{self.process.pid}/fd")))}


@contextmanager
def queue(folder: Path) -> Iterator[QueueVictim]:
    """The writer, at the usual soft limit of descriptors."""
    command = [sys.executable, "-m", __name__]
    with soft_limit(), (folder / "writer.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    try:
        assert process.stdout is not None
        handles: list[Any] = pickle.loads(bytes.fromhex(process.stdout.readline().decode()))
        addresses = [str(handle.remote_subscribe_addr) for handle in handles]
        ports = [int(address.split("/")[2].rpartition(":")[2]) for address in addresses]
        yield QueueVictim(process, MessageQueue.create_from_handle(handles[0], -1), ports)
    finally:
        process.kill()
        process.wait()


def _write() -> None:
    writers = [MessageQueue(1, 0, connect_ip=LOOPBACK) for _ in range(2)]
    handles = [writer.export_handle() for writer in writers]
    sys.stdout.write(pickle.dumps(handles).hex() + "\n")
    sys.stdout.flush()
    while sys.stdin.readline():
        writers[0].enqueue("hello", timeout=BOUND_SECONDS)


if __name__ == "__main__":
    _write()
