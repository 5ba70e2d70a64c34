"""`MessageQueue`: Python objects from one writer to N readers of one host, in vLLM's own surface.

The readers share a byte ring with the writer. Of every object each reader gets an equal one, in
order, once, with the content that it had at `enqueue`. No thread and no socket is needed.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import ProtocolError
from .codec import StepClasses
from .ends import End, Reader, Writer
from .ring import RingAddress, RingReader, RingWriter
from .segment import SMALLEST_QUEUE_BYTES, capacity_for, free_shm_bytes

logger = logging.getLogger("vllm.commext.shm")

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

    It is pickled to other processes, and unpickled there before anything knows whether that process
    uses this queue. So importing this module has no effect, and vLLM's own queue is told in plain
    words when it is given one.

    `local_reader_ranks`: the ranks that read, in the order of their places.
    """

    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: BufferHandle | None = None
    local_subscribe_addr: str | None = None
    local_notify_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    tensor_arena_handle: tuple[int, int, int, str] | None = None


class MessageQueue:
    """One end of a queue: the writer's if constructed, a reader's by `create_from_handle`.

    Args:
        n_reader: readers altogether.
        n_local_reader: those of them on this host; all of them.
        local_reader_ranks: their ranks; 0 to n_local_reader - 1 by default.
        max_chunk_bytes, max_chunks: vLLM's queue would reserve their product. Here it is the most
            that may be under way at once; the ring, through which messages of any length are
            streamed, is smaller (`segment.capacity_for`).
        connect_ip: unused; vLLM gives it to every queue.
        enable_shm_tensor_arena: whether large CPU tensors go through one of `arenas`, as long as it
            has room.

    Attributes:
        arenas: the class of them; None where vLLM is not there.
    """

    arenas: ClassVar[type[Any] | None] = None

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
        if n_reader != n_local_reader:
            raise ValueError(
                f"expected {n_reader} n_local_reader, got {n_local_reader}: "
                "readers on other hosts need vLLM's own queue"
            )
        self.handle, ring, arena = Handle(local_reader_ranks=ranks), None, None
        if n_reader > 0:
            ring = _create(n_reader, max_chunk_bytes * max_chunks)
            self.handle.buffer_handle = BufferHandle(n_reader, ring.address)
        if enable_shm_tensor_arena and self.arenas is not None:
            arena = self.arenas(n_reader)
            self.handle.tensor_arena_handle = arena.handle
        self._end: End = Writer(ring, self.step_classes(), arena)
        self.shutting_down, self.local_reader_rank = False, -1

    def export_handle(self) -> Handle:
        """Return what a reader's process needs for `create_from_handle`."""
        return self.handle

    @staticmethod
    def step_classes() -> StepClasses | None:
        """Return the classes of the steps that go field by field."""
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
        place, arena = handle.local_reader_ranks.index(rank), None
        if handle.tensor_arena_handle is not None and cls.arenas is not None:
            arena = cls.arenas(handle.buffer_handle.n_reader, handle.tensor_arena_handle, place)
        self = cls.__new__(cls)
        ring = RingReader.attach(handle.buffer_handle.address, place)
        self.handle, self._end = handle, Reader(ring, place, cls.step_classes(), arena)
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
        """Return the next object, which owns its memory; tensors in an arena keep their slot.

        `indefinite`: a long wait is nothing to write into the log. Raises TimeoutError after
        `timeout` seconds without one, RuntimeError after `shutdown` (once what is there has been
        read) and when the writer has died. What unpickling raises consumes the message.
        """
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
        """Return `RingEnd.counters`; nothing where there are no readers."""
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
