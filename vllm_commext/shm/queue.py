"""`MessageQueue`: Python objects from one writer to N readers of one host, in vLLM's own surface.

The readers share a byte ring with the writer. Of every object each reader gets an equal one, in
order, once, with the content that it had at `enqueue`. No thread and no socket is needed.

An end is used by one thread at a time, and not by a signal handler that interrupts its own call.
Each waits in steps, with a line in the log after each; what raises leaves it as it was."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import CommextTimeoutError, ProtocolError
from .codec import Decoder, Encoder, Record, StepClasses
from .ring import (
    TIMEOUT,
    Peer,
    RingAddress,
    RingEnd,
    RingReader,
    RingWriter,
    next_steps,
    warning_interval,
)
from .segment import SMALLEST_QUEUE_BYTES, capacity_for, free_shm_bytes

logger = logging.getLogger("vllm.commext.shm")

LONGEST = threading.TIMEOUT_MAX
REENTERED = "this end of the queue is in use by the call that a signal handler interrupted"
Received = bytes | list[bytes | bytearray]


class End:
    name: str  # in the log
    ring: RingEnd | None  # this end of it; None for a writer without readers

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._take_turn, self._end_turn = self._turn.acquire, self._turn.release  # 100 ns less
        self._owns_turn: Callable[[], bool] = self._turn._is_owned  # pyright: ignore
        self._interval = warning_interval()

    def enqueue(self, obj: object, timeout: float | None) -> None:
        raise RuntimeError("only the writer can enqueue")

    def dequeue(self, timeout: float | None, indefinite: bool) -> Any:
        raise RuntimeError("only a reader can dequeue")

    def wait_until_ready(self) -> None:
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
    """The writing end; `ring` is None where there are no readers."""

    def __init__(self, ring: RingWriter | None, classes: StepClasses | None) -> None:
        super().__init__()
        self.name, self.ring = "the writer", ring
        if ring is not None:
            self._core = ring.core
        encoder = Encoder(classes)
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

    def __init__(self, ring: RingReader, place: int, classes: StepClasses | None) -> None:
        super().__init__()
        self.name = f"reader {place}"
        self.ring = self._reader = ring
        self._core = ring.core
        self._decode = Decoder(classes).decode

    def wait_until_ready(self) -> None:
        self._until(self._core.wait_ready, self._reader)

    def dequeue(self, timeout: float | None, indefinite: bool) -> Any:
        if self._owns_turn():
            raise RuntimeError(REENTERED)
        try:
            if not self._take_turn(False):
                timeout = self._wait_for_turn(timeout)
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


MIXED = (
    "this message queue was made by vllm_commext, and the process that attaches to it uses vLLM's "
    "own: set VLLM_COMMEXT, VLLM_COMMEXT_SHM_QUEUE and VLLM_PLUGINS alike in all processes of this "
    "server, and install the same vllm-commext in all their environments"
)


@dataclass(frozen=True)
class BufferHandle:
    """The number of readers, and the address of their ring."""

    n_reader: int
    address: RingAddress

    def __iter__(self) -> Iterator[object]:
        """Refuse vLLM's own queue, which unpacks its handle."""
        raise ProtocolError(MIXED)


@dataclass
class Handle:
    """Lets a reader attach to a queue. The names of its fields are those of vLLM's class.

    It is unpickled in other processes before anything knows whether these use this queue. So
    importing this module has no effect, and vLLM's own queue gets plain words when given one."""

    local_reader_ranks: list[int] = field(default_factory=list)  # in the order of their places
    buffer_handle: BufferHandle | None = None
    local_subscribe_addr: str | None = None
    local_notify_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    tensor_arena_handle: tuple[int, int, int, str] | None = None


class MessageQueue:
    """One end of a queue: the writer's if constructed, a reader's by `create_from_handle`.

    Args:
        n_reader, n_local_reader: readers; all of them are on this host.
        local_reader_ranks: 0 to n_local_reader - 1 by default.
        max_chunk_bytes, max_chunks: vLLM's queue would reserve their product. Here it is the most
            that may be under way at once; the ring, through which messages of any length are
            streamed, is smaller (`segment.capacity_for`).
        connect_ip: unused; vLLM gives it to every queue.
        enable_shm_tensor_arena: False; vLLM gives it to every queue.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        if len(ranks) != n_local_reader:
            raise ValueError(f"expected {n_local_reader} local_reader_ranks, got {ranks}")
        if n_reader != n_local_reader or enable_shm_tensor_arena:
            raise ValueError(
                f"expected {n_reader} n_local_reader and no arena, got {n_local_reader} and "
                f"{enable_shm_tensor_arena}: readers on other hosts, and large tensors in an "
                "arena, need vLLM's own queue"
            )
        self.handle, ring = Handle(local_reader_ranks=ranks), None
        if n_reader > 0:
            ring = _create(n_reader, max_chunk_bytes * max_chunks)
            self.handle.buffer_handle = BufferHandle(n_reader, ring.address)
        self._end: End = Writer(ring, self.step_classes())
        self.shutting_down, self.local_reader_rank = False, -1

    def export_handle(self) -> Handle:
        return self.handle

    @staticmethod
    def step_classes() -> StepClasses | None:
        return None

    @classmethod
    def create_from_handle(cls, handle: Handle, rank: int) -> "MessageQueue":
        """Make the reading end for `rank`, one of the handle's ranks."""
        if not isinstance(handle, Handle):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"{type(handle).__module__}.{type(handle).__qualname__}"
            raise ProtocolError(f"expected a handle of vllm_commext's queue, got {got}: {MIXED}")
        if rank not in handle.local_reader_ranks:
            ranks = handle.local_reader_ranks
            raise ProtocolError(f"rank {rank} is none of the queue's local readers {ranks}")
        assert handle.buffer_handle is not None
        place = handle.local_reader_ranks.index(rank)
        self = cls.__new__(cls)
        ring = RingReader.attach(handle.buffer_handle.address, place)
        self.handle, self._end = handle, Reader(ring, place, cls.step_classes())
        self.shutting_down, self.local_reader_rank = False, place
        return self

    def wait_until_ready(self) -> None:
        """Wait until the writer and all readers are here. All of them have to call it."""
        self._end.wait_until_ready()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send `obj` to every reader; it may be changed as soon as this returns.

        Raises TimeoutError after `timeout` seconds without room; then no reader gets it.
        RuntimeError after `shutdown` and when a reader has died. What pickling raises leaves the
        queue as it was.
        """
        self._end.enqueue(obj, timeout)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object, which owns its memory.

        `indefinite`: a long wait is nothing to write into the log. Raises TimeoutError after
        `timeout` seconds without one, RuntimeError after `shutdown` (once what is there has been
        read) and when the writer has died. What unpickling raises consumes the message."""
        return self._end.dequeue(timeout, indefinite)

    def broadcast_object(self, obj: object = None) -> Any:
        """Send `obj` and return it at the writer, return what was sent at a reader."""
        if not isinstance(self._end, Writer):
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def shutdown(self) -> None:
        """End every wait of this end, now and later. From any thread or signal handler."""
        first, self.shutting_down = not self.shutting_down, True
        if (ring := self._end.ring) is None:
            return
        if first and (dead := ring.dead_peers()):
            names = ", ".join(map(str, dead))
            logger.error("queue %s is shut down; dead: %s", ring.address.name, names)
        ring.cancel()

    def counters(self) -> dict[str, int]:
        return self._end.ring.counters() if self._end.ring is not None else {}


def _create(n_reader: int, nominal_bytes: int) -> RingWriter:
    capacity = capacity_for(nominal_bytes, free_shm_bytes())
    while True:
        try:
            return RingWriter.create(n_reader, capacity, nominal_bytes)
        except MemoryError:  # others have taken what was free a moment ago
            if capacity <= SMALLEST_QUEUE_BYTES:
                raise
            capacity //= 2
