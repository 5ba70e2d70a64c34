"""Sums and gathers of CPU tensors among processes of one host, through rings in shared memory.

Each rank has a ring that all others read. In a collective a rank writes its own data into its ring,
then reads everybody else's: a gather, and for a sum the addition at every rank, in the order of
ranks, so that all have the same bits (the direct all-reduce of Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, 2005). Long tensors go in pieces that
fit a ring, so no rank waits for room while another one waits for data.

    group = RingGroup.connect(Collective.over(process_group))  # a collective call, too
    group.all_reduce(tensor)
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from ..collective import Collective
from ..errors import CommextError, ProtocolError
from .ring import TIMEOUT, RingAddress, RingReader, RingWriter, next_steps, warning_interval
from .segment import LARGEST_RING_BYTES, capacity_for, free_shm_bytes

logger = logging.getLogger("vllm.commext.shm")

PIECE_BYTES = 1 << 20
# Each of several ranks reads what all others wrote; where that is more than this many bytes, Gloo's
# sum is faster, which has every rank add up a part of the tensor (benchmarks/cpu_collectives.py).
MOST_READ_BYTES = 3 << 20
TIMEOUT_SECONDS = 1800.0  # torch's for a collective
SUMMED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
SUMMABLE = frozenset(
    [*SUMMED_IN, torch.float32, torch.float64]
    + [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)


def pieces(num_items: int, item_bytes: int, limit_bytes: int) -> Iterator[slice]:
    """Slices that follow one another and cover ``num_items``, of at most ``limit_bytes`` each."""
    step = limit_bytes // item_bytes
    if step < 1:
        raise ValueError(f"limit_bytes: expected {item_bytes} or more, got {limit_bytes}")
    for start in range(0, num_items, step):
        yield slice(start, min(start + step, num_items))


def is_worth_it(dtype: torch.dtype, num_bytes: int, world_size: int) -> bool:
    """Return whether rings sum such tensors faster than Gloo; the same at all ranks."""
    return dtype in SUMMABLE and (
        world_size == 2 or num_bytes * (world_size - 1) <= MOST_READ_BYTES
    )


class RingGroup:
    """One rank's place among ranks that sum and gather together. Make it with `connect`.

    All ranks make the same calls in the same order, with tensors of the same shape and dtype; one
    thread at a time. An error ends the group: the others' waits end with one that names this rank.
    """

    @classmethod
    def connect(cls, collective: Collective) -> "RingGroup":
        """Connect rings among all ranks; all raise CommextError where one of them cannot."""
        group = cls(collective.rank, collective.world_size)
        try:
            addresses = collective.run(group._create)
            collective.agree(lambda: group._attach(addresses))
        except BaseException:
            group.close()
            raise
        return group

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout_seconds = TIMEOUT_SECONDS
        self._interval = warning_interval()
        self._writer: RingWriter | None = None
        self._readers: Mapping[int, RingReader] = {}
        self._limit_bytes = 0
        self._tags: dict[tuple[str, torch.dtype], bytes] = {}

    def _create(self) -> RingAddress:
        capacity = capacity_for(LARGEST_RING_BYTES, free_shm_bytes(), LARGEST_RING_BYTES)
        self._writer = RingWriter.create(self.world_size - 1, capacity)
        return self._writer.address

    def _attach(self, addresses: list[RingAddress]) -> None:
        me = self.rank
        self._readers = {
            rank: RingReader.attach(address, me if me < rank else me - 1)
            for rank, address in enumerate(addresses)
            if rank != me
        }
        # A quarter of a ring stays in the cores' caches; the piece before may still be in it.
        smallest = min(address.capacity_bytes for address in addresses)
        self._limit_bytes = min(smallest // 4, PIECE_BYTES)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, of any shape, with the sum of all ranks' tensors.

        bfloat16 and float16 are summed in float32 and rounded once. ProtocolError where another
        rank does something else, PeerLostError where it has died or shut down its end,
        CommextTimeoutError where it has not come within ``timeout_seconds``."""
        flat = tensor.contiguous().view(-1)
        # A sum of two is rounded once in any case.
        wide = SUMMED_IN.get(tensor.dtype) if self.world_size > 2 else None
        for piece in pieces(len(flat), flat.itemsize, self._limit_bytes):
            own = flat[piece]
            parts = self._all_parts("sum", own)
            total = parts[0].to(wide or own.dtype)
            for part in parts[1:]:
                total.add_(part)
            own.copy_(total)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put all ranks' tensors one after the other, by rank, into ``output``.

        ``output``: contiguous, ``world_size`` times as many elements. Errors as `all_reduce`."""
        if output.numel() != tensor.numel() * self.world_size or not output.is_contiguous():
            raise ValueError(
                f"output: expected a contiguous tensor of {self.world_size} x {tensor.numel()} "
                f"elements, got {tuple(output.shape)} with strides {output.stride()}"
            )
        flat, rows = tensor.contiguous().view(-1), output.view(self.world_size, -1)
        for piece in pieces(len(flat), flat.itemsize, self._limit_bytes):
            for row, part in zip(rows, self._all_parts("gather", flat[piece]), strict=True):
                row[piece].copy_(part)

    def close(self) -> None:
        """End every wait of this rank, and tell the others that it will not come back."""
        if self._writer is not None:
            self._writer.close()
        for reader in self._readers.values():
            reader.close()

    def _all_parts(self, what: str, own: torch.Tensor) -> list[torch.Tensor]:
        """Send ``own``; return the parts of all ranks by rank, of this one ``own`` itself."""
        if (tag := self._tags.get((what, own.dtype))) is None:
            tag = self._tags[what, own.dtype] = f"{what} of {own.dtype}".encode()
        data = own.view(torch.uint8).numpy()
        parts = [own] * self.world_size
        try:
            self._write((tag, data))
            for rank, reader in self._readers.items():
                sent, part = self._read(rank, reader)
                if sent != tag or len(part) != data.nbytes:
                    self._differ(f"{tag!r}, {data.nbytes}", rank, f"{sent!r}, {len(part)}")
                parts[rank] = torch.frombuffer(part, dtype=own.dtype)
        except BaseException:
            self.close()
            raise
        return parts

    def _write(self, record: tuple[bytes, Any]) -> None:
        writer = self._writer
        assert writer is not None, "made by connect"
        status = writer.core.write(record, self._interval, True, False)
        for seconds, step, _ in self._steps():
            if status != TIMEOUT:
                break
            self._tell(writer.slowest_reader(), "has not read", seconds)
            status = writer.core.write(record, step, True, True)
        writer.check(status)

    def _read(self, rank: int, reader: RingReader) -> "list[bytes | bytearray]":
        record = reader.core.read(self._interval)
        for seconds, step, _ in self._steps():
            if record != TIMEOUT:
                break
            self._tell(f"rank {rank}, {reader.peers()[0]},", "has not written", seconds)
            record = reader.core.read(step)
        if isinstance(record, int):
            try:
                reader.fail(record)
            except CommextError as error:
                raise type(error)(f"rank {rank}: {error}") from error
        if not isinstance(record, list) or len(record) != 2:
            raise ProtocolError(f"rank {rank}: unknown collective message")
        return record

    def _differ(self, mine: str, rank: int, theirs: str) -> NoReturn:
        raise ProtocolError(
            f"rank {self.rank} calls for a {mine} bytes, and rank {rank} for a {theirs} bytes: all "
            "ranks must make the same calls in the same order, with tensors of the same kind"
        )

    def _steps(self) -> Iterator[tuple[float, float, bool]]:
        return next_steps(self._interval, self._interval, self.timeout_seconds)

    def _tell(self, who: object, what: str, seconds: float) -> None:
        logger.info("%s %s for %.0f s, says rank %d of a sum", who, what, seconds, self.rank)
