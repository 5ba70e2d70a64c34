"""How pieces of a read are dealt out to slots of staging memory, and what says what is in a slot.

Pure.  The pieces of a read, in the order of its descriptors, are cut into *parts*, each of which
fits a slot; in a slot its pieces lie one behind the other, aligned for the kernel that copies them.
Both sides follow from the same lengths.

A slot has a word in a table of the peer's: the reader's ticket and the number of the part, or 0
while anything else is in the slot or written to it; and between the two, how the part is compressed
(``exponents``), 0 where it is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.gathered.exponents import LEVEL_BITS, MAX_LEVEL
from vllm_commext.nixl.geometry.layout import Int32Array, UInt64Array
from vllm_commext.nixl.geometry.plan import Int64Array, Section
from vllm_commext.nixl.mapped.gather import Places

ALIGNMENT = 16
PART_BITS = 10
TICKET_SHIFT = PART_BITS + LEVEL_BITS
MAX_TICKET = 1 << (64 - TICKET_SHIFT)


def word_of(ticket: int, part: int, level: int = 0) -> int:
    """What stands for a part of a ticket's read; never 0, as no ticket is."""
    return ticket << TICKET_SHIFT | level << PART_BITS | part


def split_level(word: int) -> tuple[int, int]:
    """The word of the part as it was, and its level."""
    level = word >> PART_BITS & MAX_LEVEL
    return word - (level << PART_BITS), level


def begins_of(lengths: Int64Array) -> Int64Array:
    """Where pieces of these lengths begin if they lie one behind the other, and where the last one
    ends: ``[n + 1]``."""
    if len(lengths) and lengths.min() == lengths.max():
        return np.arange(len(lengths) + 1) * (-(-int(lengths[0]) // ALIGNMENT) * ALIGNMENT)
    begins = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum((lengths + (ALIGNMENT - 1)) & -ALIGNMENT, out=begins[1:])
    return begins


def cut(begins: Int64Array, sizes: Iterable[int], max_pieces: int) -> list[slice]:
    """Parts of pieces that begin so, see ``begins_of``, one of each of these sizes: no longer than
    that, save where a piece is."""
    count = len(begins) - 1
    parts: list[slice] = []
    first = 0
    for size in sizes:
        if first == count:
            break
        stop = int(np.searchsorted(begins, begins[first] + size, side="right")) - 1
        stop = max(min(stop, first + max_pieces), first + 1)
        parts.append(slice(first, stop))
        first = stop
    return parts


class Descriptors:
    """What the numbers of a plan's remote descriptors mean.

    Args:
        places: where they are.
        sections: the plan's, one behind the other.
    """

    def __init__(self, places: Places, sections: Sequence[Section]) -> None:
        self._places = places
        sizes = [
            one.remote.rows_per_block
            for one in sections
            for _ in range(one.num_lanes * one.remote.cells_per_row)
        ]
        self._rows_per_block = np.array(sizes, dtype=np.int64)
        self._has_rows_of_blocks = set(sizes) == {1}
        ends = (one.remote_offset + one.num_lanes * one.remote.num_cells for one in sections)
        self._count = max(ends, default=0)

    def at(self, indices: Int32Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The block of each of these descriptors, its address and its length.

        Raises:
            ProtocolError: there are none, or one is no descriptor of the plan.
        """
        if len(indices) == 0 or indices.min() < 0 or indices.max() >= self._count:
            raise ProtocolError(f"expected descriptors 0 to {self._count - 1}, and at least one")
        places = self._places
        row, number = places.find(indices)
        block = number if self._has_rows_of_blocks else number // self._rows_per_block[row]
        address = places.addresses[row] + number * places.strides[row]
        return block, address, places.lengths[row]


def digest_of(rows: UInt64Array) -> bytes:
    """What two sides compare that must mean the same by a descriptor's number; whatever device
    each takes the memory to be on."""
    return hashlib.sha256(np.ascontiguousarray(rows[:, [0, 1, 3, 4]]).tobytes()).digest()
