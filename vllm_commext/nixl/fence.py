"""Fences: how a decode engine proves that what it read was still the request's.

A prefill worker has a board of 64-bit epochs in registered memory, one a slot.  The scheduler side
gives each finished prefill a slot and a ticket, which go out with the request parameters; the
slot's epoch is at most the ticket as long as the request's blocks are held.  The worker raises the
epoch above the ticket *before* it reports the blocks as free.  The decode worker reads the epoch
after the blocks: if it is still at most the ticket, the blocks were the request's all the while.
"""

from __future__ import annotations

from collections import deque

import numpy as np

NUM_SLOTS = 65536
"""Finished prefills that one engine can hold at a time."""
NUM_CELLS = 1024
"""Fences that one worker can read at a time."""
EPOCH_BYTES = 8


def is_fresh(epoch: int, ticket: int) -> bool:
    """Whether the blocks were still held when the epoch was read."""
    return epoch <= ticket


class FenceSlots:
    """The scheduler side's slots: which are free, and how often each was used."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._free = deque(range(num_slots))
        self._tickets: dict[int, int] = {}
        self._taken: dict[str, int] = {}

    def take(self, request_id: str) -> tuple[int, int] | None:
        """A (slot, ticket) for a request, None where all slots are taken.

        The slot that has been free for the longest comes first.
        """
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken[request_id] = slot
        return slot, self._tickets.get(slot, 0)

    def give_back(self, request_id: str) -> None:
        """All workers have raised the slot's epoch: the next user gets the next ticket."""
        slot = self._taken.pop(request_id, None)
        if slot is not None:
            self._tickets[slot] = self._tickets.get(slot, 0) + 1
            self._free.append(slot)


class FenceBoard:
    """One worker's epochs, which peers read, and cells, into which it reads those of peers.

    Attributes:
        epochs: ``[NUM_SLOTS]`` uint64.
        cells: ``[NUM_CELLS]`` uint64.
    """

    def __init__(self) -> None:
        self.epochs = np.zeros(NUM_SLOTS, dtype=np.uint64)
        self.cells = np.zeros(NUM_CELLS, dtype=np.uint64)
        self._free_cells = list(range(NUM_CELLS))

    def end(self, slot: int, ticket: int) -> None:
        """A request's blocks are about to be freed."""
        self.epochs[slot] = ticket + 1

    def take_cell(self) -> int | None:
        """A cell to read a peer's epoch into, None where all are in use."""
        return self._free_cells.pop() if self._free_cells else None

    def read_cell(self, cell: int) -> int:
        """The epoch that has arrived in a cell, which is free again."""
        self._free_cells.append(cell)
        return int(self.cells[cell])
