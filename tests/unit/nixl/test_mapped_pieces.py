"""From descriptors to addresses, against descriptors that are written out one by one;
`test_gather_kernel.py` has what is copied between them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.descriptors import expand_rows
from tests.kit.examples import examples
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import UInt64Array
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.transport import gather
from vllm_commext.nixl.transport.gather import Places, Region, batches, mapped_rows


@st.composite
def rows_of_a_list(draw: st.DrawFn) -> UInt64Array:
    """Descriptors of a list, of which no two overlap."""
    address, rows = 1 << 46, list[list[int]]()
    for size in draw(st.lists(st.sampled_from((1, 48, 100)), min_size=1, max_size=24)):
        stride, count = size + draw(st.integers(0, 40)), draw(st.integers(1, 5))
        address += draw(st.integers(0, 40))
        rows.append([address, size, 0, stride, count])
        address += stride * count
    return np.array(rows, dtype=np.uint64)


def test_a_read_of_one_size_is_one_run_a_launch() -> None:
    count = 2 * gather.MAX_PIECES + 5
    rows = np.array([[4096, 32768, 0, 65536, count]], dtype=np.uint64)
    order = np.arange(count, dtype=np.int32)
    found = list(batches(Places.of(rows), Places.of(rows), Pairs(order, order, 0)))
    assert [len(batch.places) for batch in found] == [gather.MAX_PIECES, gather.MAX_PIECES, 5]
    assert [batch.runs for batch in found[2:]] == [((10, 0, 2, 32768),)]


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=12),
    st.sampled_from([(64, 64), (64, 80), (80, 64)]),
)
@examples(40)
def test_neighbours_on_both_sides_count_once(
    order: list[tuple[int, int]], strides: tuple[int, int]
) -> None:
    rows = [np.array([[4096, 64, 0, stride, 12]], dtype=np.uint64) for stride in strides]
    ends = [(-1, -1), *((4096 + a * strides[0], 4096 + b * strides[1]) for a, b in order)]
    expected = sum(
        (one[0] + 64, one[1] + 64) != two for one, two in zip(ends, ends[1:], strict=False)
    )
    chosen = np.array(order, dtype=np.int32)
    pairs = Pairs(chosen[:, 0], chosen[:, 1], 64 * len(order))
    assert gather.num_runs(Places.of(rows[0]), Places.of(rows[1]), pairs) == expected


@given(rows_of_a_list(), st.data())
@examples(25)
def test_descriptors_go_with_their_region(rows: UInt64Array, data: st.DataObject) -> None:
    """Regions may end within no descriptor; each is mapped somewhere else."""
    last = [int(row[0] + (row[4] - 1) * row[3] + row[1]) for row in rows]
    ends = sorted({data.draw(st.sampled_from(last)) for _ in range(3)} | {last[-1]})
    regions, begin = list[Region](), int(rows[0, 0])
    for number, end in enumerate(ends):
        regions.append(Region(begin, end - begin, (number + 1) << 50))
        begin = end
    moved = expand_rows(mapped_rows(rows, data.draw(st.permutations(regions))))
    for (before, *_), (after, *_) in zip(expand_rows(rows).tolist(), moved.tolist(), strict=True):
        region = next(one for one in regions if one.address <= before < one.address + one.num_bytes)
        assert after - region.mapped == before - region.address


@pytest.mark.parametrize(
    "row",
    [
        [4095, 16, 0, 16, 4],
        [4096, 16, 0, 16, 17],
        [4096, 257, 0, 16, 1],
        [4200, 16, 0, 1000, 2],
        [8192, 16, 0, 16, 1],
        [0, 16, 0, 16, 1],
        [4096, 16, 0, (1 << 64) - 16, 2],
        [4096, 16, 0, 1 << 40, 1 << 40],
    ],
)
def test_what_is_not_within_a_region_is_refused(row: list[int]) -> None:
    """Else a kernel would load it, and end the process's use of the GPU."""
    regions = [Region(4096, 256, 1 << 50)]
    with pytest.raises(UnsupportedError, match="outside of it"):
        mapped_rows(np.array([row], dtype=np.uint64), regions)
    with pytest.raises(UnsupportedError, match="outside of it"):
        mapped_rows(np.array([row], dtype=np.uint64), [])


def test_a_piece_beyond_what_a_launch_can_count_is_refused() -> None:
    size = gather.MAX_PIECE_BYTES + 1
    rows = np.array([[4096, size, 0, size, 1]], dtype=np.uint64)
    with pytest.raises(UnsupportedError, match="pieces of at most"):
        mapped_rows(rows, [Region(4096, size, 1 << 50)])
