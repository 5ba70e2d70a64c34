"""What peers read beside the cache: which cells are free, and where records go."""

from typing import Any

import numpy as np
import pytest

from vllm_commext.nixl.transport.tables import Table


def test_cells_are_taken_whole_or_not_at_all() -> None:
    table = Table("t", np.zeros(9, dtype=np.uint64), 4)
    taken = table.take(3)
    assert taken == [1, 2, 3]
    assert table.take(2) is None
    assert table.take(0) == []
    assert table.take() == [0]
    assert table.take() is None
    table.give_back(taken)
    assert table.take(3) == [1, 2, 3]


class Memory:
    """An agent that reads at once: its lists are rows of the addresses of their descriptors."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []

    def register(self, ranges: list[tuple[int, int]], memory_type: str, device_id: int) -> None:
        assert (memory_type, device_id) == ("DRAM", 0)
        self.registered += ranges

    def prepare(self, name: str, rows: Any, memory_type: str) -> list[tuple[int, int]]:
        assert (name, memory_type) == ("peer", "DRAM")
        return self.prepare_own(rows)

    def prepare_own(self, rows: Any) -> list[tuple[int, int]]:
        ((address, num_bytes, device, stride, count),) = rows.tolist()
        assert device == 0
        return [(address + number * stride, num_bytes) for number in range(count)]

    def make_read(self, local: Any, own: Any, remote: Any, theirs: Any) -> list[Any]:
        return [(local[to], remote[of]) for to, of in zip(own, theirs, strict=True)]


@pytest.mark.parametrize(("shape", "record_bytes", "read"), [((6,), 0, 8), ((6, 4), 24, 24)])
def test_records_of_a_peer_are_read_into_cells(
    shape: tuple[int, ...], record_bytes: int, read: int
) -> None:
    agent: Any = Memory()
    own = Table("t", np.zeros((2, *shape[1:]), dtype=np.uint64), 3, record_bytes)
    theirs = Table("t", np.zeros(shape, dtype=np.uint64), 1, record_bytes)
    assert own.cells.shape == (3, *shape[1:])
    assert own.cells.dtype == np.uint64
    assert own.place == (own.array.ctypes.data, 2)
    with pytest.raises(AssertionError):
        own.of_peer(agent, "peer", theirs.place)
    own.register(agent)
    arrays = own.array, own.cells
    assert agent.registered == [(one.ctypes.data, one.nbytes) for one in arrays]
    remote = own.of_peer(agent, "peer", theirs.place)
    assert (remote.own, remote.num_records) == (own, 6)
    expected = [
        (
            (own.cells[cell : cell + 1].ctypes.data, read),
            (theirs.array[n : n + 1].ctypes.data, read),
        )
        for cell, n in ((2, 0), (0, 5))
    ]
    assert remote.make_read([2, 0], [0, 5]) == expected
