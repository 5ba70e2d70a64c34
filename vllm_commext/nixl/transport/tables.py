"""Tables of which peers read records, and cells into which records of theirs are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_commext.nixl.geometry.layout import Int32Array
from vllm_commext.nixl.transport.agent import NixlAgent

Words = npt.NDArray[np.uint64]


class Table:
    """One worker's records of one kind, and its cells for those of peers.

    Args:
        name: of the kind, the same on all workers.
        array: ``[num_records, ...]`` uint64, the records one behind the other.
        num_cells: records of peers that can be read at a time; ``cells`` is ``[num_cells, ...]``.
        record_bytes: of a record that are read, 0 for all.
    """

    def __init__(self, name: str, array: Words, num_cells: int, record_bytes: int = 0) -> None:
        self.name = name
        self.array = array
        self.cells: Words = np.zeros((num_cells, *array.shape[1:]), dtype=np.uint64)
        self._free = list(range(num_cells))
        self._record_bytes = record_bytes or array.strides[0]
        self._cell_list: Any = None

    @property
    def place(self) -> tuple[int, int]:
        return self.array.ctypes.data, len(self.array)

    def register(self, agent: NixlAgent) -> None:
        arrays = self.array, self.cells
        agent.register([(array.ctypes.data, array.nbytes) for array in arrays], "DRAM", 0)
        self._cell_list = agent.prepare_own(self._rows(self.cells.ctypes.data, len(self.cells)))

    def of_peer(self, agent: NixlAgent, name: str, place: tuple[int, int]) -> RemoteTable:
        assert self._cell_list is not None  # registered before there are peers
        prepared = agent.prepare(name, self._rows(*place), "DRAM")
        return RemoteTable(self, prepared, place[1], agent, self._cell_list)

    def _rows(self, address: int, count: int) -> Words:
        row = [address, self._record_bytes, 0, self.array.strides[0], count]
        return np.array([row], dtype=np.uint64)

    def take(self, count: int = 1) -> list[int] | None:
        """Cells for this many records, in rising order; None while too few are free."""
        begin = len(self._free) - count
        if begin < 0:
            return None
        taken = sorted(self._free[begin:])
        del self._free[begin:]
        return taken

    def give_back(self, cells: Sequence[int]) -> None:
        self._free += cells


@dataclass(frozen=True)
class RemoteTable:
    """A peer's table; ``own`` has the cells for it."""

    own: Table
    prepared: Any
    num_records: int
    _agent: NixlAgent
    _cell_list: Any

    def make_read(self, cells: Sequence[int], records: Sequence[int] | Int32Array) -> Any:
        own, theirs = np.asarray(cells, dtype=np.int32), np.asarray(records, dtype=np.int32)
        return self._agent.make_read(self._cell_list, own, self.prepared, theirs)
