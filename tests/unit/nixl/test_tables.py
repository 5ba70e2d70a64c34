"""What peers read beside the cache: which cells are free, and what a description says of it."""

import numpy as np
from msgspec.structs import replace

from tests.unit.nixl.test_wire_description import DESCRIPTION
from vllm_commext.nixl.prefill.fence import NUM_SLOTS
from vllm_commext.nixl.reuse.generations import GenerationTable
from vllm_commext.nixl.stream.progress import ProgressTable
from vllm_commext.nixl.tables import WorkerTables
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import tables_in


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


def test_a_description_says_where_each_table_is() -> None:
    progress, generations = ProgressTable(3, num_rows=5), GenerationTable(7, 4)
    every, least = WorkerTables(progress, generations), WorkerTables()
    fields = every.described()
    assert fields == {
        "fence_address": every.fences.nonces.ctypes.data,
        "num_fence_slots": NUM_SLOTS,
        "stream_headers": progress.headers.ctypes.data,
        "num_stream_rows": 5,
        "stream_entries": progress.entries.ctypes.data,
        "pieces_per_row": 3,
        "generations": generations.generations.ctypes.data,
        "num_generations": 7,
    }
    for tables in (every, least):
        found = tables_in(replace(DESCRIPTION, **tables.described()))
        assert found == {name: table.place for name, table in tables.by_name.items()}
