"""Wakes up a thread of this process that waits for sockets."""

import contextlib
import os
import threading


class Wakeup:
    """Any thread notifies one that waits for the file descriptor to be readable."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """What a selector takes."""
        return self._fd

    def notify(self) -> None:
        """Wake the thread up; after `close` there is nobody to wake."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget the notifications so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Safe to repeat."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
