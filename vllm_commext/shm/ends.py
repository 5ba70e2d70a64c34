"""The two kinds of end that a queue has: its writer and its readers.

An end is used by one thread at a time, and not by a signal handler that interrupts its own call.
Each waits in steps, with a line in the log after each; what raises leaves it as it was.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import CommextTimeoutError
from .codec import Decoder, Encoder, Record, StepClasses
from .ring import TIMEOUT, Peer, RingEnd, RingReader, RingWriter, next_steps, warning_interval

logger = logging.getLogger("vllm.commext.shm")

LONGEST = threading.TIMEOUT_MAX
REENTERED = "this end of the queue is in use by the call that a signal handler interrupted"
Received = bytes | list[bytes | bytearray]


class End:
    """One end of a queue.

    Attributes:
        ring: this end of the ring; None for a writer without readers.
        name: the end's name in the log.
    """

    name: str
    ring: RingEnd | None

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._take_turn, self._end_turn = self._turn.acquire, self._turn.release  # 100 ns less
        self._owns_turn: Callable[[], bool] = self._turn._is_owned  # pyright: ignore
        self._interval = warning_interval()

    def enqueue(self, obj: object, timeout: float | None) -> None:
        """See `MessageQueue`."""
        raise RuntimeError("only the writer can enqueue")

    def dequeue(self, timeout: float | None, indefinite: bool) -> Any:
        """See `MessageQueue`."""
        raise RuntimeError("only a reader can dequeue")

    def wait_until_ready(self) -> None:
        """See `MessageQueue`."""
        raise NotImplementedError

    def _until(self, wait: Callable[[float], int], ring: RingEnd) -> None:
        started = time.monotonic()
        while (status := wait(self._interval)) == TIMEOUT:
            missing = ring.first_missing() or ring.peers()[0]
            self._tell("has not come", time.monotonic() - started, missing, ring)
        ring.check(status)

    def _wait_for_turn(self, timeout: float | None) -> float | None:
        """Take the turn from another thread; return what of the timeout is left then."""
        started = time.monotonic()
        if not self._take_turn(True, -1 if timeout is None else min(max(timeout, 0), LONGEST)):
            raise CommextTimeoutError("another thread used this end all the time")
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - started))

    def _tell(self, what: str, seconds: float, who: Peer, ring: RingEnd) -> None:
        """Log the line about a long wait, in place of vLLM's: first who is waited for."""
        logger.info(
            "%s %s for %.0f s, says %s of queue %s; all: %s; %s",
            *(who, what, seconds, self.name, ring.address.name),
            *(ring.describe_peers(), ring.counters()),
        )


class Writer(End):
    """The writing end; `ring` is None where there are no readers, `arena` takes large tensors."""

    def __init__(
        self, ring: RingWriter | None, classes: StepClasses | None, arena: Any = None
    ) -> None:
        super().__init__()
        self.name, self.ring, self.arena = "the writer", ring, arena
        if ring is not None:
            self._core = ring.core
        encoder = Encoder(classes, arena and arena.reducers())
        self._encode, self._forget_step = encoder.encode, encoder.forget

    def wait_until_ready(self) -> None:
        if (ring := self.ring) is not None:
            assert isinstance(ring, RingWriter)
            self._until(ring.core.wait_attached, ring)
            ring.wait_attached(0)
            ring.announce_ready()

    def enqueue(self, obj: object, timeout: float | None) -> None:
        if self._owns_turn():
            raise RuntimeError(REENTERED)
        try:
            if not self._take_turn(False):
                timeout = self._wait_for_turn(timeout)
            record = self._encode(obj)
            if self.ring is None:
                return
            is_long = timeout is None or timeout > self._interval
            wait = self._interval if is_long else timeout
            if status := self._core.write(record, wait, is_long, False):
                self._write_on(status, record, timeout, self.ring)
        except BaseException:
            if self._owns_turn():  # else it is another thread's message, which is being sent
                self._forget_step()
            raise
        finally:
            try:  # noqa: SIM105 - nothing may come between the end of the work and this call
                self._end_turn()
            except RuntimeError:  # it was never ours
                pass

    def _write_on(self, status: int, record: Record, timeout: float | None, ring: RingEnd) -> None:
        """Go on after the first long wait, with a line in the log after each."""
        for waited, step, is_last in next_steps(self._interval, self._interval, timeout):
            if status != TIMEOUT:
                break
            self._tell("has not read", waited, ring.slowest_reader(), ring)
            status = self._core.write(record, step, not is_last, True)
        ring.check(status)


class Reader(End):
    """A reading end, with this place in the ring."""

    def __init__(
        self, ring: RingReader, place: int, classes: StepClasses | None, arena: Any = None
    ) -> None:
        super().__init__()
        self.name = f"reader {place}"
        self.ring = self._reader = ring
        self._core = ring.core
        self._decode = Decoder(classes).decode
        self._flush_arena: Callable[[], None] | None = arena and arena.flush_releases

    def wait_until_ready(self) -> None:
        self._until(self._core.wait_ready, self._reader)

    def dequeue(self, timeout: float | None, indefinite: bool) -> Any:
        if self._owns_turn():
            raise RuntimeError(REENTERED)
        try:
            if not self._take_turn(False):
                timeout = self._wait_for_turn(timeout)
            if self._flush_arena is not None:
                self._flush_arena()
            wait = timeout
            if not indefinite and (timeout is None or timeout > self._interval):
                wait = self._interval
            record = self._core.read(wait)
            if isinstance(record, int):
                record = self._read_on(record, wait, timeout)
            message = self._decode(record)  # before another thread does with the next
        finally:
            try:  # noqa: SIM105 - as in enqueue
                self._end_turn()
            except RuntimeError:
                pass
        return message  # not above: a handler might raise between the value and the end of the turn

    def _read_on(self, status: int, waited: float | None, timeout: float | None) -> Received:
        record: Received | int = status
        for so_far, step, _ in next_steps(waited, self._interval, timeout):
            if record != TIMEOUT:
                break
            self._tell("has not written", so_far, self._reader.peers()[0], self._reader)
            record = self._core.read(step)
        if isinstance(record, int):
            self._reader.fail(record)
        return record
