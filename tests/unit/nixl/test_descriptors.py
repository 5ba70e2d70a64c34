"""Descriptor lists against lists written out one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.nixl.geometry.layout import expand_rows, strided_row

ROWS = st.lists(
    st.tuples(
        st.integers(0, 1 << 47),
        st.integers(1, 1 << 32),
        st.integers(0, 7),
        st.integers(0, 1 << 40),
        st.integers(0, 9),
    ),
    max_size=6,
)
Row = tuple[int, int, int, int, int]


def written_out(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [
        (address + number * stride, num_bytes, device)
        for address, num_bytes, device, stride, count in rows
        for number in range(count)
    ]


def expanded(rows: list[Row]) -> list[tuple[int, ...]]:
    found = expand_rows(np.array(rows, dtype=np.uint64).reshape(-1, 5))
    assert (found.shape[1], found.dtype) == (3, np.uint64)
    return [tuple(map(int, row)) for row in found]


@given(ROWS)
@settings(max_examples=60)
def test_expanded_rows_are_the_descriptors_one_by_one(rows: list[Row]) -> None:
    assert expanded(rows) == written_out(rows)


def test_addresses_of_the_upper_half_survive() -> None:
    rows = [(0xFFFF_8000_0000_0000, 1 << 20, 0, 1 << 40, 3)]
    assert expanded(rows) == written_out(rows)


def test_neighbours_as_one_row() -> None:
    row = strided_row(address=(1 << 63) + 5, num_bytes=8, count=3, device_id=2)
    assert (row.shape, row.dtype) == ((1, 5), np.uint64)
    assert [tuple(map(int, one)) for one in expand_rows(row)] == [
        ((1 << 63) + 5 + 8 * number, 8, 2) for number in range(3)
    ]
