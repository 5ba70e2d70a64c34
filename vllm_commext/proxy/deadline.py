"""Bounds on waits, inside one task, and the end of other tasks."""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

OnLost = set[Callable[[], None]]


class EngineLostError(Exception):
    """The engine has not been reachable for too long."""


class ClientStalledError(Exception):
    """The client takes no data."""


class LeftError(Exception):
    """The engine is to be left."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class _Watch:
    """A block that exceptions of several kinds may end; `asyncio.timeout` has one. *on_lost*: the
    engine's callbacks, which end it with `EngineLostError`."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._raised: type[Exception] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a running asyncio task, and there is none")
        self._task, self._loop = task, task.get_loop()
        self._num_cancels_before = task.cancelling()
        self._begin()
        self._on_lost.add(self._lose)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost.discard(self._lose)
        if self._raised is None or kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        # A cancellation of someone else's that came as well must stay one.
        if self._task.uncancel() > self._num_cancels_before:
            return
        raise self._raised from error

    def _begin(self) -> None:
        raise NotImplementedError

    def _lose(self) -> None:
        self._interrupt(EngineLostError)

    def _interrupt(self, kind: type[Exception]) -> None:
        if self._raised is None:
            self._raised = kind
            self._task.cancel()


class Deadline(_Watch):
    """`with Deadline(seconds, engine.on_lost): ...` raises `TimeoutError` when time is up, and
    `EngineLostError` when the engine is lost; *seconds* None: as long as it can be reached."""

    def __init__(self, seconds: float | None, on_lost: OnLost) -> None:
        super().__init__(on_lost)
        self._seconds = seconds

    def _begin(self) -> None:
        if self._seconds is not None:
            self._timer = self._loop.call_later(self._seconds, self._interrupt, TimeoutError)


class StreamWatch(_Watch):
    """Bounds a stream's waits by one timer. Call `reading` before each wait for the engine and
    `writing` before each for the client; *since* is the loop's time of that call. Raises
    `TimeoutError`, `EngineLostError`, `ClientStalledError` or `LeftError`."""

    def __init__(self, on_lost: OnLost, read_seconds: float, write_seconds: float) -> None:
        super().__init__(on_lost)
        self._limits = {False: read_seconds, True: write_seconds}

    def _begin(self) -> None:
        self.writing()
        self._timer = self._loop.call_later(min(self._limits.values()), self._look)

    def reading(self) -> None:
        self.is_writing, self.since = False, self._loop.time()

    def writing(self) -> None:
        self.is_writing, self.since = True, self._loop.time()

    def _look(self) -> None:
        left = self._limits[self.is_writing] - (self._loop.time() - self.since)
        if left <= 0:
            self._interrupt(ClientStalledError if self.is_writing else TimeoutError)
            return
        self._timer = self._loop.call_later(min(left, *self._limits.values()), self._look)

    def leave(self) -> None:
        """End a wait for the engine with `LeftError`; the client's goes on."""
        if not self.is_writing:
            self._interrupt(LeftError)

    def _lose(self) -> None:
        if not self.is_writing:
            super()._lose()
