"""Parts of gathered reads against brute force: piece by piece, and block by block."""

from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.gathered.exponents import MAX_LEVEL
from vllm_commext.nixl.gathered.slots import (
    ALIGNMENT,
    MAX_TICKET,
    Descriptors,
    begins_of,
    cut,
    split_level,
    word_of,
)
from vllm_commext.nixl.geometry.lanes import Grid
from vllm_commext.nixl.geometry.plan import Section
from vllm_commext.nixl.mapped.gather import Places

SLOT_BYTES = 256


def array(values: Any) -> Any:
    return np.array(values, dtype=np.int64)


@given(st.lists(st.integers(1, SLOT_BYTES), max_size=60), st.integers(1, 9))
def test_parts_are_as_long_as_they_can_be(lengths: list[int], max_pieces: int) -> None:
    expected: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        size = length if length % ALIGNMENT == 0 else length + ALIGNMENT - length % ALIGNMENT
        if size > room or len(expected[-1]) == max_pieces:
            expected.append([])
            room = SLOT_BYTES
        expected[-1].append(number)
        room -= size
    found = cut(begins_of(array(lengths)), repeat(SLOT_BYTES), max_pieces)
    assert [list(range(part.start, part.stop)) for part in found] == expected


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_pieces_of_a_part_lie_apart_and_aligned(lengths: list[int]) -> None:
    taken: set[int] = set()
    *begins, end = begins_of(array(lengths)).tolist()
    for begin, length in zip(begins, lengths, strict=True):
        assert begin % ALIGNMENT == 0
        assert taken.isdisjoint(range(begin, begin + length))
        taken.update(range(begin, begin + length))
    assert max(taken) < end == sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)


@given(st.integers(1, 5), st.integers(1, 1 << 40))
def test_pieces_of_one_length(count: int, length: int) -> None:
    size = -(-length // ALIGNMENT) * ALIGNMENT
    assert begins_of(array([length] * count)).tolist() == [size * one for one in range(count + 1)]


def test_words_differ_and_none_is_that_of_nothing() -> None:
    words = [word_of(ticket, part) for ticket in (1, 2, MAX_TICKET - 1) for part in (0, 1, 1023)]
    assert len(set(words)) == len(words)
    assert min(words) > 0
    assert max(words) < 1 << 64


@given(st.integers(1, MAX_TICKET - 1), st.integers(0, 1023), st.integers(0, MAX_LEVEL))
def test_a_level_leaves_the_rest_of_a_word_alone(ticket: int, part: int, level: int) -> None:
    assert split_level(word_of(ticket, part, level)) == (word_of(ticket, part), level)
    assert 0 < word_of(ticket, part, level) < 1 << 64


GRIDS = st.builds(
    lambda blocks, rows, cells: Grid(blocks * rows, 64, rows, cells, 8),
    *(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)),
)


@st.composite
def sections(draw: Any) -> list[Section]:
    made: list[Section] = []
    offset = 0
    for grid, num_lanes in draw(
        st.lists(st.tuples(GRIDS, st.integers(1, 3)), min_size=1, max_size=3)
    ):
        made.append(Section(0, 0, 1, grid, grid, offset, offset, num_lanes, 8))
        offset += num_lanes * grid.num_cells
    return made


@given(sections(), st.data())
def test_each_descriptor_is_of_the_block_that_has_its_cell(
    made: list[Section], data: st.DataObject
) -> None:
    """And where its row says, and as long; lanes and cells are wherever they are."""
    rows: list[tuple[int, int, int, int, int]] = []
    expected: list[tuple[int, int, int]] = []
    numbers = st.integers(1, 1 << 40)
    for one in made:
        grid = one.remote
        for _ in range(one.num_lanes):
            for _ in range(grid.cells_per_row):
                address, length, stride = (data.draw(numbers) for _ in range(3))
                rows.append((address, length, 3, stride, grid.num_rows))
                for number in range(grid.num_rows):
                    block = number // grid.rows_per_block
                    expected.append((block, address + number * stride, length))
    places = Places.of(np.array(rows, dtype=np.uint64))
    found = Descriptors(places, made)
    order = np.array(data.draw(st.permutations(range(len(expected)))), dtype=np.int32)
    columns = [column.tolist() for column in found.at(order)]
    assert list(zip(*columns, strict=True)) == [expected[number] for number in order.tolist()]
    assert places.lengths_of(order).tolist() == columns[2]
    for wrong in ([], [-1], [len(expected)], [0, len(expected)]):
        with pytest.raises(ProtocolError):
            found.at(np.array(wrong, dtype=np.int32))


def test_lengths_where_all_are_equal() -> None:
    rows = np.array([(0, 48, 0, 64, 5), (1000, 48, 0, 64, 7)], dtype=np.uint64)
    places, indices = Places.of(rows), np.array([11, 0, 4], dtype=np.int32)
    assert places.lengths_of(indices).tolist() == places.at(indices)[1].tolist() == [48] * 3
