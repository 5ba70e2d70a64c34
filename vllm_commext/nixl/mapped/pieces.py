"""From descriptors of a read to the addresses that a kernel copies.

Pure.  NIXL is told of descriptors by their numbers in lists that it was given before; a kernel of
our own is told addresses, for the peer's side those at which its memory is mapped here.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.descriptors import Int32Array, UInt64Array
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.transport.posting import in_pieces

Int64Array = npt.NDArray[np.int64]
MAX_PIECES = 8192
"""Of a launch: the first one is under way while the next one's addresses are worked out."""
MAX_RUNS = 16
"""Of a launch."""
CHUNK_BYTES = 16 << 10
"""Of a piece, that one warp copies at a time."""
MAX_PIECE_BYTES = 1 << 31


class Region(NamedTuple):
    """Memory of a peer: address there, bytes, address here."""

    address: int
    num_bytes: int
    mapped: int


class Run(NamedTuple):
    """Neighbouring pieces of one length, as the kernel has it.

    Attributes:
        end: number of the first chunk behind it.
        first: number of its first piece.
        parts: chunks of a piece.
        num_bytes: of a piece.
    """

    end: int
    first: int
    parts: int
    num_bytes: int


@dataclass(frozen=True)
class Batch:
    """What one launch copies.

    Attributes:
        places: ``[n, 2]``, of each piece the address where it is and the one where it belongs.
        runs: what lengths they have, at most ``MAX_RUNS``.
    """

    places: Int64Array
    runs: tuple[Run, ...]

    @property
    def num_chunks(self) -> int:
        """Chunks of all pieces."""
        return self.runs[-1].end


@dataclass(frozen=True)
class Places:
    """Where the descriptors of a list are; see ``of``.

    Attributes:
        starts: number of each row's first descriptor.
        addresses: of that descriptor.
        lengths: bytes of each descriptor of the row.
        strides: bytes between neighbours in the row.
    """

    starts: Int64Array
    addresses: Int64Array
    lengths: Int64Array
    strides: Int64Array

    @classmethod
    def of(cls, rows: UInt64Array) -> Places:
        """Of ``[n, 5]`` strided descriptors."""
        address, length, _, stride, count = rows.astype(np.int64).T
        return cls(np.cumsum(count) - count, address, length, stride)

    @property
    def has_gaps(self) -> bool:
        """Whether no two descriptors of a row are neighbours in memory."""
        return bool((self.strides != self.lengths).all())

    def at(self, indices: Int32Array) -> tuple[Int64Array, Int64Array]:
        """Address and length of each of these descriptors."""
        row = np.searchsorted(self.starts, indices, side="right") - 1
        address = self.addresses[row] + (indices - self.starts[row]) * self.strides[row]
        return address, self.lengths[row]


def mapped_rows(rows: UInt64Array, regions: Sequence[Region]) -> UInt64Array:
    """The same descriptors at the addresses where their memory is mapped here.

    Args:
        rows: ``[n, 5]`` strided descriptors of the peer's.
        regions: what is mapped of the peer's memory.

    Raises:
        UnsupportedError: one of them is not within a region, so that a kernel must not load it, or
            is too long.
    """
    found = rows.copy()
    known = sorted(regions)
    bases = [region.address for region in known]
    for number, row in enumerate(rows.tolist()):  # numbers of any size: they came from a peer
        address, length, _, stride, count = row
        region = known[max(0, bisect.bisect_right(bases, address) - 1)] if known else None
        end = address + (count - 1) * stride + length
        if region is None or not region.address <= address < end <= sum(region[:2]):
            raise UnsupportedError(
                f"expected all of the KV cache in the memory that is offered, got bytes {address} "
                f"to {end} outside of it"
            )
        if length > MAX_PIECE_BYTES:
            raise UnsupportedError(
                f"expected pieces of at most {MAX_PIECE_BYTES} bytes, got {length}"
            )
        found[number, 0] = address - region.address + region.mapped
    return found


def num_runs(local: Places, remote: Places, pairs: Pairs) -> int:
    """Pieces that are left where neighbours are merged, as NIXL does it; about."""
    if local.has_gaps or remote.has_gaps:
        return len(pairs.local)
    breaks = (np.diff(pairs.local) != 1) | (np.diff(pairs.remote) != 1)
    return int(np.count_nonzero(breaks)) + min(1, len(pairs.local))


def batches(local: Places, remote: Places, pairs: Pairs) -> Iterator[Batch]:
    """What is to be launched to copy these pairs, with a pause between two."""
    for part in in_pieces(len(pairs.local), MAX_PIECES):
        target, lengths = local.at(pairs.local[part])
        source, _ = remote.at(pairs.remote[part])
        yield from _batches_of(np.stack((source, target), axis=1), lengths)


def _batches_of(places: Int64Array, lengths: Int64Array) -> Iterator[Batch]:
    """Pieces of one length side by side, and so many lengths in each batch as a launch takes."""
    if lengths.min() < lengths.max():
        order = np.argsort(lengths, kind="stable")
        places, lengths = places[order], lengths[order]
    ends = [*(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for number in range(0, len(ends), MAX_RUNS):
        stops = ends[number : number + MAX_RUNS]
        first = ends[number - 1] if number else 0
        yield Batch(places[first : stops[-1]], _runs(lengths, first, stops))


def _runs(lengths: Int64Array, first: int, stops: Sequence[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    begin, chunk = first, 0
    for stop in stops:
        num_bytes = int(lengths[begin])
        parts = -(-num_bytes // CHUNK_BYTES)
        chunk += (stop - begin) * parts
        runs.append(Run(chunk, begin - first, parts, num_bytes))
        begin = stop
    return tuple(runs)
