"""NIXL descriptor lists of regions, as numpy arrays.

A list holds every block of every region, region after region: block ``b`` of region ``r`` has the
index ``r * num_blocks + b``.  NIXL 1.5 takes it in the strided form, a row ``(address, length,
device, stride, count)`` a region; older versions take the expanded form, a row ``(address, length,
device)`` a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_commext.nixl.regions import Region

UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]


def strided_rows(regions: Sequence[Region], device_id: int) -> UInt64Array:
    """``[num_regions, 5]`` rows (address, block bytes, device, stride, count)."""
    return np.array(
        [
            (
                region.base_address,
                region.block_bytes,
                device_id,
                region.stride_bytes,
                region.num_blocks,
            )
            for region in regions
        ],
        dtype=np.uint64,
    ).reshape(-1, 5)


def expand_rows(rows: UInt64Array) -> UInt64Array:
    """``[sum of counts, 3]`` rows (address, block bytes, device): the same descriptors, one by
    one."""
    counts = rows[:, 4].astype(np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    position = (np.arange(counts.sum()) - starts).astype(np.uint64)
    repeated = np.repeat(rows, counts, axis=0)
    return np.column_stack(
        (repeated[:, 0] + position * repeated[:, 3], repeated[:, 1], repeated[:, 2])
    ).astype(np.uint64)


def block_indices(
    block_ids: npt.NDArray[np.int64], *, num_regions: int, num_blocks: int
) -> Int32Array:
    """Indices of the given blocks in every region's part of the list, region after region."""
    offsets = np.arange(num_regions, dtype=np.int64) * num_blocks
    return (offsets[:, None] + block_ids[None, :]).ravel().astype(np.int32)
