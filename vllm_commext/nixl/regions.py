"""KV-cache memory as regions: one run of equally spaced blocks for each layer's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_commext.errors import UnsupportedError


@dataclass(frozen=True)
class Region:
    """Blocks of one layer's KV cache in one rank's memory.

    Block ``i`` is the bytes ``[base_address + i*stride_bytes, ... + block_bytes)``.

    Attributes:
        name: layer name; regions of two engines are matched by it.
        base_address: address of block 0.
        stride_bytes: distance between the starts of neighbouring blocks.
        block_bytes: bytes of one block that are transferred.
        num_blocks: blocks in the region.
    """

    name: str
    base_address: int
    stride_bytes: int
    block_bytes: int
    num_blocks: int


def region_of_cache(
    name: str,
    *,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    item_bytes: int,
    num_blocks: int,
) -> Region:
    """Describe a layer's cache tensor, whose first dimension counts (kernel) blocks.

    An attention kernel may use smaller blocks than the cache manager; the first dimension is then
    a multiple of ``num_blocks`` and one of the manager's blocks is several neighbouring rows.

    Args:
        address: address of element 0.
        shape: sizes of the tensor's dimensions.
        strides: distances of the dimensions, in elements.
        item_bytes: bytes of an element.
        num_blocks: blocks that the cache manager hands out.

    Raises:
        UnsupportedError: the bytes of one block do not lie in one run.
    """
    rows_per_block, rest = divmod(shape[0], num_blocks)
    if rest or rows_per_block == 0:
        raise UnsupportedError(
            f"layer {name}: expected a cache whose first dimension is a multiple of the "
            f"{num_blocks} blocks, got shape {tuple(shape)}"
        )
    row_elements = _dense_elements(shape[1:], strides[1:])
    if row_elements is None or (rows_per_block > 1 and strides[0] != row_elements):
        raise UnsupportedError(
            f"layer {name}: expected the bytes of one block in one run, got shape "
            f"{tuple(shape)} with strides {tuple(strides)}"
        )
    return Region(
        name=name,
        base_address=address,
        stride_bytes=strides[0] * rows_per_block * item_bytes,
        block_bytes=row_elements * rows_per_block * item_bytes,
        num_blocks=num_blocks,
    )


def _dense_elements(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements of a tensor that fills one run of memory in some order of its dimensions, else
    None."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return expected
