"""A bound on a wait, inside one task and with no task of its own."""

import asyncio
import sys
from types import TracebackType


class Deadline:
    """`with Deadline(seconds): await ...` raises `asyncio.TimeoutError` when time is up.

    Python 3.10 has no `asyncio.timeout`, and its `wait_for` may swallow a cancellation, which
    is how this proxy learns that a client has gone.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Deadline needs a running asyncio task, and there is none")
        self._task = task
        self._num_cancels_before = task.cancelling() if sys.version_info >= (3, 11) else 0
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self._expired or kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        # A cancellation of someone else's that came as well must stay one.
        if sys.version_info >= (3, 11) and self._task.uncancel() > self._num_cancels_before:
            return
        raise asyncio.TimeoutError from error
