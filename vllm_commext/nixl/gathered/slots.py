"""How pieces of a read are dealt out to slots of staging memory, and what says what is in a slot.

Pure.  The pieces of a read, in the order of its descriptors, are cut into *parts*, each of which
fits a slot; in a slot its pieces lie one behind the other, aligned for the kernel that copies them.
Both sides follow from the same lengths.

A slot has a word in a table of the peer's: the reader's ticket and the number of the part, or 0
while anything else is in the slot or written to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.layout import Int32Array, UInt64Array
from vllm_commext.nixl.geometry.plan import Section

Int64Array = npt.NDArray[np.int64]
ALIGNMENT = 16
PART_BITS = 16
MAX_TICKET = 1 << (64 - PART_BITS)


def word_of(ticket: int, part: int) -> int:
    """What stands for a part of a ticket's read; never 0, as no ticket is."""
    return ticket << PART_BITS | part


def aligned(lengths: Int64Array) -> Int64Array:
    """Bytes that pieces take in a slot."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def offsets_of(lengths: Int64Array) -> Int64Array:
    """Where each piece of a part begins in its slot."""
    sizes = aligned(lengths)
    return np.cumsum(sizes) - sizes


def cut(lengths: Int64Array, slot_bytes: int, max_pieces: int) -> list[slice]:
    """Parts of pieces of these lengths, none longer than a slot."""
    ends = np.cumsum(aligned(lengths))
    parts: list[slice] = []
    begin = 0
    while begin < len(lengths):
        room = slot_bytes + (int(ends[begin - 1]) if begin else 0)
        stop = min(int(np.searchsorted(ends, room, side="right")), begin + max_pieces)
        parts.append(slice(begin, stop))
        begin = stop
    return parts


class Descriptors:
    """Which remote block each remote descriptor of a plan is of.

    Args:
        sections: the plan's.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self._offsets = np.array([one.remote_offset for one in sections], dtype=np.int64)
        grids = [one.remote for one in sections]
        columns = [
            (grid.num_cells, grid.num_rows, grid.cells_per_row, grid.cells_per_block)
            for grid in grids
        ]
        self._columns = np.array(columns, dtype=np.int64)
        ends = (one.remote_offset + one.num_lanes * one.remote.num_cells for one in sections)
        self._count = max(ends, default=0)

    def blocks_of(self, indices: Int32Array) -> Int64Array:
        """The block of each of these descriptors.

        Raises:
            ProtocolError: there are none, or one is no descriptor of the plan.
        """
        if len(indices) == 0 or indices.min() < 0 or indices.max() >= self._count:
            raise ProtocolError(f"expected descriptors 0 to {self._count - 1}, and at least one")
        section = np.searchsorted(self._offsets, indices, side="right") - 1
        num_cells, num_rows, per_row, per_block = self._columns[section].T
        cell, row = np.divmod((indices - self._offsets[section]) % num_cells, num_rows)
        return (row * per_row + cell) // per_block


def digest_of(rows: UInt64Array) -> bytes:
    """What two sides compare that must mean the same by a descriptor's number; whatever device
    each takes the memory to be on."""
    return hashlib.sha256(np.ascontiguousarray(rows[:, [0, 1, 3, 4]]).tobytes()).digest()
