"""NIXL descriptor lists as numpy arrays.

NIXL 1.5 takes a list in the strided form, a row ``(address, length, device, stride, count)`` for
``count`` equally long descriptors ``stride`` bytes apart; older versions take the expanded form, a
row ``(address, length, device)`` for each.
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]


def strided_row(*, address: int, num_bytes: int, count: int, device_id: int = 0) -> UInt64Array:
    """``[1, 5]``: ``count`` neighbouring descriptors of ``num_bytes`` bytes each."""
    return np.array([[address, num_bytes, device_id, num_bytes, count]], dtype=np.uint64)


def expand_rows(rows: UInt64Array) -> UInt64Array:
    """``[sum of counts, 3]`` rows (address, length, device): the same descriptors, one by one."""
    counts = rows[:, 4].astype(np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    position = (np.arange(counts.sum()) - starts).astype(np.uint64)
    repeated = np.repeat(rows, counts, axis=0)
    return np.column_stack(
        (repeated[:, 0] + position * repeated[:, 3], repeated[:, 1], repeated[:, 2])
    ).astype(np.uint64)
