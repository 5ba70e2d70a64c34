"""Bounds on waits, inside one task and with no task of their own."""

import asyncio
from types import TracebackType

from vllm_commext.proxy.engines import Engine


class EngineLostError(Exception):
    """The engine that was waited for has not been reachable for too long."""


class Interruption:
    """Cancels its task from outside and turns that cancellation into an exception of its own, as
    `asyncio.timeout` does with one exception and one time."""

    def __init__(self) -> None:
        self._raised: type[Exception] | None = None

    def begin(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a running asyncio task, and there is none")
        self._task = task
        self._num_cancels_before = task.cancelling()

    def interrupt(self, kind: type[Exception]) -> None:
        if self._raised is None:
            self._raised = kind
            self._task.cancel()

    def end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Raise what `interrupt` was given, if that is why the block ends."""
        if self._raised is None or kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        # A cancellation of someone else's that came as well must stay one.
        if self._task.uncancel() > self._num_cancels_before:
            return
        raise self._raised from error


class Deadline:
    """`with Deadline(seconds, engine): await ...` raises `TimeoutError` when time is up, and
    `EngineLostError` when *engine* is lost; *seconds* None: as long as it can be reached."""

    def __init__(self, seconds: float | None, engine: Engine) -> None:
        self._seconds = seconds
        self._engine = engine
        self._interruption = Interruption()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._interruption.begin()
        if self._seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._expire)
        self._engine.on_lost.add(self._lose)

    def _expire(self) -> None:
        self._interruption.interrupt(asyncio.TimeoutError)

    def _lose(self) -> None:
        self._interruption.interrupt(EngineLostError)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._engine.on_lost.discard(self._lose)
        self._interruption.end(kind, error)


class UploadWatch:
    """`with UploadWatch(...) as watch: ...` raises `asyncio.TimeoutError` when less has come than
    *bytes_per_second* after *grace_seconds*. num_bytes: what has come, for the caller to set."""

    def __init__(self, grace_seconds: float, bytes_per_second: float) -> None:
        self._grace_seconds = grace_seconds
        self._bytes_per_second = bytes_per_second
        self._interruption = Interruption()
        self.num_bytes = 0

    def __enter__(self) -> "UploadWatch":
        self._interruption.begin()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer = self._loop.call_later(self._grace_seconds, self._look)
        return self

    def _look(self) -> None:
        end = self._began + self._grace_seconds + self.num_bytes / self._bytes_per_second
        if self._loop.time() >= end:
            self._interruption.interrupt(asyncio.TimeoutError)
        else:
            self._timer = self._loop.call_at(end, self._look)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._interruption.end(kind, error)


class ClientStalledError(Exception):
    """The client takes no data."""


class StreamWatch:
    """The bounds on a stream's waits, by one timer for all of it.

    Call `reading` before each wait for the engine and `writing` before each wait for the
    client; *since* is the loop's time of the last call. `asyncio.TimeoutError`,
    `EngineLostError` or `ClientStalledError` ends the block.
    """

    def __init__(self, engine: Engine, read_seconds: float, write_seconds: float) -> None:
        self._engine = engine
        self._limits = {False: read_seconds, True: write_seconds}
        self._interruption = Interruption()

    def __enter__(self) -> "StreamWatch":
        self._interruption.begin()
        self._loop = asyncio.get_running_loop()
        self.writing()
        self._timer = self._loop.call_later(min(self._limits.values()), self._look)
        self._engine.on_lost.add(self._lose)
        return self

    def reading(self) -> None:
        self._is_writing, self.since = False, self._loop.time()

    def writing(self) -> None:
        self._is_writing, self.since = True, self._loop.time()

    def _look(self) -> None:
        left = self._limits[self._is_writing] - (self._loop.time() - self.since)
        if left <= 0:
            kind = ClientStalledError if self._is_writing else asyncio.TimeoutError
            self._interruption.interrupt(kind)
            return
        self._timer = self._loop.call_later(min(left, *self._limits.values()), self._look)

    def _lose(self) -> None:
        if not self._is_writing:
            self._interruption.interrupt(EngineLostError)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._engine.on_lost.discard(self._lose)
        self._interruption.end(kind, error)
