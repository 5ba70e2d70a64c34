"""`MessageQueue`: Python objects from one writer to N readers, in vLLM's own surface.

Readers on this host share a byte ring with the writer, all others are reached over TCP. Of every
object each reader gets an equal one, in order, once, with the content that it had at `enqueue`.
Local traffic needs no thread, no socket and no file descriptor.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import ProtocolError
from .codec import StepClasses, decode
from .ends import DistantReader, End, LocalReader, Writer
from .remote import MIXED, RemoteReader, RemoteWriter
from .ring import RingAddress, RingReader, RingWriter
from .segment import SMALLEST_QUEUE_BYTES, capacity_for, free_shm_bytes

logger = logging.getLogger("vllm.commext.shm")


@dataclass(frozen=True)
class BufferHandle:
    """The shape that was asked for, and where the ring is that serves it."""

    n_reader: int
    max_chunk_bytes: int
    max_chunks: int
    address: RingAddress

    def __iter__(self) -> Iterator[object]:
        """vLLM's own queue unpacks its handle."""
        raise ProtocolError(MIXED)


@dataclass
class Handle:
    """What a reader attaches to a queue with. The names of its fields are those of vLLM's class.

    It is pickled to other processes, and unpickled there before anything knows whether that process
    uses this queue. So importing this module has no effect, and vLLM's own queue is told in plain
    words when it is given one.

    `local_reader_ranks`: the ranks that read through shared memory, in the order of their places.
    `remote_subscribe_addr`: where all other ranks connect; None if there are none.
    """

    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: BufferHandle | None = None
    local_subscribe_addr: str | None = None
    local_notify_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    tensor_arena_handle: tuple[int, int, int, str] | None = None


class SpinCondition:
    """vLLM's record of how its readers wait, as far as others look at it. Nothing here has an
    effect."""

    def __init__(self) -> None:
        self.last_read = 0.0
        self.busy_loop_s = 0.0
        self.poller = None


class ShmRingBuffer:
    """The memory of a queue's local readers: created, or opened by its handle. Picklable.

    `max_chunk_bytes` and `max_chunks` are what vLLM would reserve. Here their product is what may
    be under way at once; the ring, through which messages are streamed, is much smaller.
    """

    def __init__(
        self, n_reader: int, max_chunk_bytes: int, max_chunks: int, name: RingAddress | None = None
    ) -> None:
        self.n_reader = n_reader
        self.max_chunk_bytes = max_chunk_bytes
        self.max_chunks = max_chunks
        self.is_creator = name is None
        self.writer = _create(n_reader, max_chunk_bytes * max_chunks) if name is None else None
        self.address = self.writer.address if self.writer is not None else name

    def handle(self) -> BufferHandle:
        """What `ShmRingBuffer.open` takes, in any process of this host."""
        assert self.address is not None
        return BufferHandle(self.n_reader, self.max_chunk_bytes, self.max_chunks, self.address)

    @staticmethod
    def open(handle: BufferHandle) -> "ShmRingBuffer":
        """The buffer of that handle; no place in it is taken yet."""
        shape = (handle.n_reader, handle.max_chunk_bytes, handle.max_chunks)
        return ShmRingBuffer(*shape, handle.address)

    def attach(self, rank: int) -> RingReader:
        """Take the place of local reader `rank`."""
        assert self.address is not None
        return RingReader.attach(self.address, rank)

    def __reduce__(self) -> tuple[object, ...]:
        return ShmRingBuffer.open, (self.handle(),)


def _create(n_reader: int, nominal_bytes: int) -> RingWriter:
    capacity = capacity_for(nominal_bytes, free_shm_bytes())
    while True:
        try:
            return RingWriter.create(n_reader, capacity, nominal_bytes)
        except MemoryError:  # others have taken what was free a moment ago
            if capacity <= SMALLEST_QUEUE_BYTES:
                raise
            capacity //= 2


class MessageQueue:
    """One end of a queue: the writer's if constructed, a reader's by `create_from_handle`.

    Args:
        n_reader: readers altogether.
        n_local_reader: those of them on this host.
        local_reader_ranks: their ranks; 0 to n_local_reader - 1 by default.
        max_chunk_bytes, max_chunks: what vLLM's queue would reserve. Messages of any length go
            through the ring, whose size is `segment.capacity_for` of the product.
        connect_ip: the address at which readers on other hosts reach this one.
        enable_shm_tensor_arena: whether large CPU tensors go through one of `arenas`, as long as it
            has room. Where there are readers on other hosts none does.

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
        buffer = remote = arena = None
        if n_local_reader > 0:
            buffer = ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks)
        if n_reader > n_local_reader:
            host, budget = connect_ip or self.own_ip(), max_chunk_bytes * max_chunks
            remote = RemoteWriter(n_reader - n_local_reader, host, budget)
        elif enable_shm_tensor_arena and self.arenas is not None:
            arena = self.arenas(n_local_reader)
        handle = Handle(
            local_reader_ranks=ranks,
            buffer_handle=buffer.handle() if buffer is not None else None,
            remote_subscribe_addr=remote.invitation if remote is not None else None,
            remote_addr_ipv6=remote is not None and remote.is_ipv6,
            tensor_arena_handle=arena.handle if arena is not None else None,
        )
        ring = buffer.writer if buffer is not None else None
        reducers = arena.reducers() if arena is not None else None
        self._set_up(handle, buffer, Writer(ring, remote, self.step_classes(), reducers), arena)
        self.n_local_reader = n_local_reader
        self.n_remote_reader = n_reader - n_local_reader

    def _set_up(
        self, handle: Handle, buffer: ShmRingBuffer | None, end: End, arena: Any = None
    ) -> None:
        """Set what is visible of either end; the names are those of vLLM's class."""
        self.handle, self.buffer, self.tensor_arena, self._end = handle, buffer, arena, end
        self.shutting_down = False
        self.local_reader_rank = -1
        self.local_socket = None
        self.remote_socket = end.remote
        self._spin_condition = SpinCondition() if buffer is not None else None
        # vLLM's class makes a reader of this one where both kinds meet, and sets them until it is
        # told that they do not fit.
        self._is_writer = isinstance(end, Writer)
        self._is_local_reader = isinstance(end, LocalReader)
        self._is_remote_reader = isinstance(end, DistantReader)

    def export_handle(self) -> Handle:
        """What a reader's process needs for `create_from_handle`."""
        return self.handle

    @staticmethod
    def step_classes() -> StepClasses | None:
        """The classes of the steps that go field by field."""
        return None

    @staticmethod
    def own_ip() -> str:
        """The address at which other hosts reach this one."""
        raise ValueError("connect_ip: expected this host's address for remote readers, got None")

    @classmethod
    def create_from_handle(cls, handle: Handle, rank: int) -> "MessageQueue":
        """The reading end for `rank`: local if it is one of the handle's ranks, else remote."""
        if not isinstance(handle, Handle):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"{type(handle).__module__}.{type(handle).__qualname__}"
            raise ProtocolError(f"expected a handle of vllm_commext's queue, got {got}: {MIXED}")
        self = cls.__new__(cls)
        if rank in handle.local_reader_ranks:
            assert handle.buffer_handle is not None
            buffer = ShmRingBuffer.open(handle.buffer_handle)
            place, arena = handle.local_reader_ranks.index(rank), None
            if handle.tensor_arena_handle is not None and cls.arenas is not None:
                arena = cls.arenas(handle.buffer_handle.n_reader, handle.tensor_arena_handle, place)
            end = LocalReader(buffer.attach(place), place, cls.step_classes(), arena)
            self._set_up(handle, buffer, end, arena)
            self.local_reader_rank = place
            return self
        if handle.remote_subscribe_addr is None:
            raise ProtocolError(
                f"rank {rank} is none of the queue's local readers {handle.local_reader_ranks}, "
                "and it has no remote ones"
            )
        remote = RemoteReader(handle.remote_subscribe_addr)
        self._set_up(handle, None, DistantReader(remote, cls.step_classes()))
        return self

    # ---- the meeting ----

    def wait_until_ready(self) -> None:
        """Wait until the writer and all readers are here. All of them have to call it."""
        self._end.wait_until_ready()

    # ---- messages ----

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send `obj` to every reader; it may be changed as soon as this returns.

        Raises TimeoutError after `timeout` seconds without room; then no reader gets it.
        RuntimeError after `shutdown` and when a reader has died. What pickling raises leaves the
        queue as it was.
        """
        self._end.enqueue(obj, timeout)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object, in memory of its own save for tensors in an arena, which it keeps.

        `indefinite`: a long wait is nothing to write into the log. Raises TimeoutError after
        `timeout` seconds without one, RuntimeError after `shutdown` (once what is there has been
        read) and when the writer has died. What unpickling raises consumes the message.
        """
        return self._end.dequeue(timeout, indefinite)

    def broadcast_object(self, obj: object = None) -> Any:
        """The writer sends `obj` and returns it, a reader returns what was sent."""
        if not self._is_writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[bytearray]:
        """Memory of `max_chunk_bytes` to fill; sent as it is when the block ends without error."""
        assert self._is_writer, "only a writer can"
        assert self.buffer is not None, "there are no local readers"
        memory = bytearray(self.buffer.max_chunk_bytes)
        yield memory
        self._end.write_memory(memory, timeout)

    @contextmanager
    def acquire_read(
        self, timeout: float | None = None, indefinite: bool = False
    ) -> Iterator[memoryview]:
        """What `acquire_write` sent."""
        yield self._end.read_memory(timeout, indefinite)

    @staticmethod
    def recv(socket: RemoteReader, timeout: float | None) -> Any:
        """Return the next object from a remote reader's `remote_socket`."""
        return decode(socket.receive(timeout))

    # ---- the end, and what can be observed ----

    def shutdown(self) -> None:
        """End every wait of this end, now and later. From any thread or signal handler."""
        first, self.shutting_down = not self.shutting_down, True
        ring, remote = self._end.ring, self._end.remote
        if ring is not None:
            if first and (dead := ring.dead_peers()):
                names = ", ".join(map(str, dead))
                logger.error("queue %s is shut down; dead: %s", ring.address.name, names)
            ring.cancel()
        if remote is not None:
            remote.cancel()

    def counters(self) -> dict[str, int]:
        """The counters of local traffic: see `RingEnd.counters`."""
        return self._end.ring.counters() if self._end.ring is not None else {}
