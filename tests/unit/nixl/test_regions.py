"""Regions against the addresses of every element, which numpy's own strided views give."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.regions import Region, region_of_cache

ADDRESS = 0x7F00_0000_1000


@dataclass(frozen=True)
class Cache:
    """A tensor as ``region_of_cache`` sees it, and how many blocks the manager hands out."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    num_blocks: int

    def region(self) -> Region:
        return region_of_cache(
            "layer",
            address=ADDRESS,
            shape=self.shape,
            strides=self.strides,
            item_bytes=self.item_bytes,
            num_blocks=self.num_blocks,
        )

    def block_addresses(self) -> list[npt.NDArray[np.int64]]:
        """Address of every element of each of the manager's blocks, ascending."""
        span = 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)
        )
        offsets = np.lib.stride_tricks.as_strided(
            np.arange(span, dtype=np.int64), self.shape, [8 * step for step in self.strides]
        )
        blocks = np.split(offsets, self.num_blocks)
        return [np.sort(ADDRESS + self.item_bytes * block.ravel()) for block in blocks]


def matches(region: Region, cache: Cache) -> bool:
    """Whether each block of the region is exactly the bytes of the cache's block."""
    for index, found in enumerate(cache.block_addresses()):
        first = region.base_address + index * region.stride_bytes
        expected = np.arange(first, first + region.block_bytes, cache.item_bytes)
        if not np.array_equal(found, expected):
            return False
    return region.num_blocks == cache.num_blocks


@st.composite
def one_run_caches(draw: st.DrawFn) -> Cache:
    """Blocks of one run each: inner dimensions dense in any order, rows apart or kernel-sized."""
    inner = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(inner))))
    strides = [0] * len(inner)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= inner[dim]
    num_blocks = draw(st.integers(1, 5))
    rows_per_block = draw(st.integers(1, 3))
    gap = draw(st.integers(0, 7)) if rows_per_block == 1 else 0
    return Cache(
        (num_blocks * rows_per_block, *inner),
        (step + gap, *strides),
        draw(st.sampled_from([1, 2, 4])),
        num_blocks,
    )


@st.composite
def any_caches(draw: st.DrawFn) -> Cache:
    inner = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(inner), max_size=len(inner)))
    num_blocks = draw(st.integers(1, 3))
    rows = num_blocks * draw(st.integers(1, 2))
    return Cache((rows, *inner), (draw(st.integers(1, 30)), *strides), 2, num_blocks)


@given(one_run_caches())
@settings(max_examples=60, deadline=None)
def test_blocks_of_one_run_are_described_to_the_byte(cache: Cache) -> None:
    region = cache.region()
    assert matches(region, cache)
    assert (region.name, region.base_address) == ("layer", ADDRESS)


@given(any_caches())
@settings(max_examples=120, deadline=None)
def test_whatever_is_accepted_is_right(cache: Cache) -> None:
    try:
        region = cache.region()
    except UnsupportedError:
        return
    assert matches(region, cache)


@pytest.mark.parametrize(
    ("shape", "strides", "num_blocks"),
    [
        pytest.param((2, 4, 3), (1, 6, 2), 2, id="blocks innermost"),
        pytest.param((4, 2, 8), (8, 32, 1), 4, id="K and V in two halves"),
        pytest.param((4, 2, 8), (32, 16, 1), 4, id="hole within a block"),
        pytest.param((4, 3), (3, 0), 4, id="broadcast dimension"),
        pytest.param((4, 8), (10, 1), 2, id="hole between kernel blocks"),
    ],
)
def test_scattered_blocks_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], num_blocks: int
) -> None:
    cache = Cache(shape, strides, 2, num_blocks)
    with pytest.raises(UnsupportedError) as raised:
        cache.region()
    assert "layer layer" in str(raised.value)
    assert str(shape) in str(raised.value)


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_rows_that_are_no_multiple_of_the_blocks_are_refused(num_rows: int) -> None:
    with pytest.raises(UnsupportedError, match="multiple of the 4 blocks"):
        Cache((num_rows, 8), (8, 1), 2, 4).region()


def test_the_comparison_notices_a_wrong_region() -> None:
    cache = Cache((4, 2, 8), (20, 8, 1), 2, 4)
    right = cache.region()
    assert matches(right, cache)
    for wrong in (
        Region("layer", right.base_address + 2, right.stride_bytes, right.block_bytes, 4),
        Region("layer", right.base_address, right.block_bytes, right.block_bytes, 4),
        Region("layer", right.base_address, right.stride_bytes, right.block_bytes + 2, 4),
        Region("layer", right.base_address, right.stride_bytes, right.block_bytes, 3),
    ):
        assert not matches(wrong, cache)
