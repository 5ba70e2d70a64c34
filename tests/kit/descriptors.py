"""Descriptors one by one, for tests that compare single ones."""

import numpy as np

from vllm_commext.nixl.geometry.layout import UInt64Array


def expand_rows(rows: UInt64Array) -> UInt64Array:
    """``[sum of counts, 3]`` rows (address, length, device): the same descriptors, one by one."""
    counts = rows[:, 4].astype(np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    position = (np.arange(counts.sum()) - starts).astype(np.uint64)
    repeated = np.repeat(rows, counts, axis=0)
    return np.column_stack(
        (repeated[:, 0] + position * repeated[:, 3], repeated[:, 1], repeated[:, 2])
    ).astype(np.uint64)
