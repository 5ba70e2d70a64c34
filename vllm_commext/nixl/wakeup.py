"""Wakes up a thread of this process that waits for sockets; and, over a wakeup socket, an engine
with nothing to compute when a worker's transfer has ended.

Each notification is one datagram to a Unix socket of the scheduler's process; it says that
something has ended and nothing more, the outcomes themselves come with vLLM's next step.  The
socket is in a folder of this user's alone, which is gone once all workers have connected.  Workers
on other hosts cannot notify, and then the scheduler looks often.
"""

import contextlib
import os
import queue
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Wakeup:
    """Any thread notifies one that waits for the file descriptor to be readable."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


MAX_WAIT_SECONDS = 1.0
"""Where all workers can notify; a look that no notification asks for is for statistics."""
LOOK_SECONDS = 0.005  # where a worker cannot
_CLOSE_SECONDS = 1.0
_NOTIFICATION = b""
_MAX_PATH_BYTES = 107
_NAME = "wakeup"


class WakeupSocket:
    """The scheduler's end.

    Attributes:
        address: what workers need to know; "" where there is no place for a socket.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        # Numbers of the workers that have not connected yet, as they say them.
        self._missing = {str(number).encode() for number in range(num_workers)}
        self._num_notifications = 0
        self._num_seen = 0
        self._is_closed = False
        self._sleeper: threading.Condition | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = ""
        self._leave: Callable[[], object] = lambda: None
        with contextlib.suppress(OSError):
            self.address = self._bind()
        self._thread = threading.Thread(target=self._listen, name="commext-wakeup", daemon=True)
        if self.address:
            self._thread.start()

    def wait(self, arrivals: queue.Queue[Any]) -> bool:
        """Sleep until a worker notifies, something arrives in the queue, or ``MAX_WAIT_SECONDS``
        are over; whether a worker has notified since the last call."""
        self._sleeper = arrivals.not_empty
        with arrivals.not_empty:
            arrivals.not_empty.wait_for(
                lambda: self._num_notifications != self._num_seen or bool(arrivals.queue),
                LOOK_SECONDS if self._missing else MAX_WAIT_SECONDS,
            )
        num_seen, self._num_seen = self._num_seen, self._num_notifications
        return self._num_seen != num_seen

    def notify(self) -> None:
        self._num_notifications += 1
        sleeper = self._sleeper
        if sleeper is not None:
            with sleeper:
                sleeper.notify_all()

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # a full socket wakes it up as well
                self._own.send(_NOTIFICATION)
            self._thread.join(_CLOSE_SECONDS)
        self._leave()
        self._own.close()
        self._socket.close()

    def _bind(self) -> str:
        folder = tempfile.mkdtemp(prefix="commext-")
        if len(os.fsencode(folder)) + 1 + len(_NAME) > _MAX_PATH_BYTES:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="commext-", dir="/tmp")
        self._leave = weakref.finalize(self, _remove, folder, os.getpid())
        address = f"{folder}/{_NAME}"
        self._socket.bind(address)
        self._own.connect(address)
        self._own.setblocking(False)
        return address

    def _listen(self) -> None:
        while True:
            message = self._socket.recv(64)
            if self._is_closed:
                return
            if message == _NOTIFICATION:
                self.notify()
                continue
            self._missing.discard(message)
            if not self._missing:
                self._leave()


def _remove(folder: str, pid: int) -> None:
    """Not by a process that was forked from the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def notifier(address: str, worker: int) -> Callable[[], None]:
    """A worker's end: what notifies a wakeup socket; it never waits.  Its socket closes when
    no process has it any more.

    Args:
        worker: the worker's number; said once, at once.
    """
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)

    def send(message: bytes) -> None:
        # There is none on another host, and a full socket holds some that are not read yet.
        with contextlib.suppress(OSError):
            sender.send(message)

    def notify() -> None:
        send(_NOTIFICATION)

    with contextlib.suppress(OSError):
        sender.connect(address)
    send(str(worker).encode())
    weakref.finalize(notify, sender.close)
    return notify
