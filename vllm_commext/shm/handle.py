"""What a reader is given to attach to a queue: `Handle`, and in it the ring's `ShmRingBuffer`.

Both are pickled to other processes, and unpickled there before anything knows whether that
process uses this queue at all. So importing this module has no effect, and vLLM's own queue is told
in plain words when it is given one of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import ProtocolError
from .layout import SMALLEST_QUEUE_BYTES, capacity_for
from .ring import RingAddress, RingReader, RingWriter
from .segment import free_shm_bytes

MIXED = (
    "this message queue was made by vllm_commext, and the process that attaches to it uses vLLM's "
    "own: set VLLM_COMMEXT, VLLM_COMMEXT_SHM_QUEUE and VLLM_PLUGINS alike in all processes of this "
    "server, and install the same vllm-commext in all their environments"
)
REMOTE_SCHEME = "commext-tcp://"  # vLLM's own queue cannot connect to that, and says so


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
    """Of a queue. The fields, and their names, are those of vLLM's class.

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


class ShmRingBuffer:
    """The memory of a queue's local readers: created, or opened by its handle. Picklable.

    `max_chunk_bytes` and `max_chunks` are what vLLM would reserve. Here their product is what may
    be under way at once; the ring, through which messages are streamed, is much smaller.
    """

    def __init__(
        self,
        n_reader: int,
        max_chunk_bytes: int,
        max_chunks: int,
        name: RingAddress | None = None,
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
