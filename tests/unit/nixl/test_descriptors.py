"""Descriptor arrays against lists written out one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.nixl.descriptors import block_indices, expand_rows, strided_rows
from vllm_commext.nixl.regions import Region

REGIONS = st.lists(
    st.builds(
        Region,
        name=st.just("layer"),
        base_address=st.integers(0, 1 << 47),
        stride_bytes=st.integers(0, 1 << 32),
        block_bytes=st.integers(1, 1 << 32),
        num_blocks=st.integers(0, 9),
    ),
    max_size=6,
)


def written_out(regions: list[Region], device_id: int) -> list[tuple[int, int, int]]:
    return [
        (region.base_address + block * region.stride_bytes, region.block_bytes, device_id)
        for region in regions
        for block in range(region.num_blocks)
    ]


@given(REGIONS, st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_expanded_rows_are_the_blocks_one_by_one(regions: list[Region], device_id: int) -> None:
    rows = strided_rows(regions, device_id)
    assert (rows.shape, rows.dtype) == ((len(regions), 5), np.uint64)
    expanded = expand_rows(rows)
    assert (expanded.shape[1], expanded.dtype) == (3, np.uint64)
    assert [tuple(map(int, row)) for row in expanded] == written_out(regions, device_id)


def test_addresses_of_the_upper_half_survive() -> None:
    region = Region("layer", 0xFFFF_8000_0000_0000, 1 << 40, 1 << 20, 3)
    rows = expand_rows(strided_rows([region], 0))
    assert [tuple(map(int, row)) for row in rows] == written_out([region], 0)


@given(st.data(), st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_indices_point_at_the_blocks_in_every_region(
    data: st.DataObject, num_regions: int, num_blocks: int
) -> None:
    regions = [
        Region(f"layer{number}", number * 1_000_000, 512, 128, num_blocks)
        for number in range(num_regions)
    ]
    ids = data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=12))
    indices = block_indices(
        np.array(ids, dtype=np.int64), num_regions=num_regions, num_blocks=num_blocks
    )
    assert indices.dtype == np.int32
    descriptors = written_out(regions, 0)
    assert [descriptors[index][0] for index in indices] == [
        region.base_address + block * region.stride_bytes for region in regions for block in ids
    ]
