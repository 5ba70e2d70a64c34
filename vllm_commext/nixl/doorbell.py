"""A doorbell between an engine's workers and its scheduler: a worker rings when a transfer has
ended, so that an engine with nothing to compute can sleep until then.

Each ring is one datagram to a Unix socket of the scheduler's process; it says that something has
ended and nothing more, the outcomes themselves come with vLLM's next step.  Workers on other hosts
cannot ring, and then the scheduler looks often.
"""

import contextlib
import os
import queue
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any

MAX_WAIT_SECONDS = 1.0
"""Where all workers can ring; a look that no ring asks for is for statistics."""
LOOK_SECONDS = 0.005
"""Where a worker cannot."""
_CLOSE_SECONDS = 1.0
_CLOSE = b"close"
_RING = b""


class Doorbell:
    """The scheduler's end.

    Attributes:
        address: what workers need to know; a name in Linux' abstract namespace, which has no file.

    Args:
        num_workers: workers of this engine.
    """

    def __init__(self, num_workers: int) -> None:
        self.address = f"\0commext-{os.getpid()}-{uuid.uuid4().hex}"
        self._num_workers = num_workers
        self._workers: set[bytes] = set()
        self._num_rings = 0
        self._num_seen = 0
        self._sleeper: threading.Condition | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._listen, name="commext-doorbell", daemon=True)
        self._thread.start()

    def wait(self, arrivals: queue.Queue[Any]) -> bool:
        """Sleep until a worker rings, something arrives in the queue, or ``MAX_WAIT_SECONDS`` are
        over; whether a worker has rung since the last call."""
        all_can_ring = len(self._workers) >= self._num_workers
        self._sleeper = arrivals.not_empty
        with arrivals.not_empty:
            arrivals.not_empty.wait_for(
                lambda: self._num_rings != self._num_seen or bool(arrivals.queue),
                MAX_WAIT_SECONDS if all_can_ring else LOOK_SECONDS,
            )
        num_seen, self._num_seen = self._num_seen, self._num_rings
        return self._num_seen != num_seen

    def ring(self) -> None:
        """Wake the engine up from a thread of this process."""
        self._num_rings += 1
        sleeper = self._sleeper
        if sleeper is not None:
            with sleeper:
                sleeper.notify_all()

    def close(self) -> None:
        """End the thread, bounded; may be called again."""
        if self._thread.is_alive():
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as own:
                own.sendto(_CLOSE, self.address)
            self._thread.join(_CLOSE_SECONDS)
        self._socket.close()

    def _listen(self) -> None:
        while (message := self._socket.recv(64)) != _CLOSE:
            if message != _RING:
                self._workers.add(message)
                continue
            self.ring()


def ringer(address: str, worker: str) -> Callable[[], None]:
    """A worker's end: what rings a doorbell; it never waits.  Its socket closes when nobody has it
    any more.

    Args:
        address: the doorbell's, from another process.
        worker: what tells this worker from others; said once, at once.
    """
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)

    def send(message: bytes) -> None:
        # There is none on another host, and a full socket holds rings that are not heard yet.
        with contextlib.suppress(OSError):
            sender.sendto(message, address)

    def ring() -> None:
        send(_RING)

    send(worker.encode())
    weakref.finalize(ring, sender.close)
    return ring
