"""Descriptors one by one, for tests that compare single ones, and a plain geometry."""

from typing import Any

import msgspec
import numpy as np

from vllm_commext.nixl.geometry.layout import TOKENS, AttentionGeometry, UInt64Array


def one_plane(
    blocks: int, stride: int, tokens: int, heads: int, head_stride: int, token: int, **changes: Any
) -> AttentionGeometry:
    """Rows of one block each, with *heads* of *tokens* of *token* bytes."""
    rows, held = (blocks, 1, stride, tokens), (heads, False, 1, head_stride)
    made = AttentionGeometry(*rows, *held, token, token, content=TOKENS, dtype="uint8")
    return msgspec.structs.replace(made, **changes)


def expand_rows(rows: UInt64Array) -> UInt64Array:
    """``[sum of counts, 3]`` rows (address, length, device): the same descriptors, one by one."""
    counts = rows[:, 4].astype(np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    position = (np.arange(counts.sum()) - starts).astype(np.uint64)
    repeated = np.repeat(rows, counts, axis=0)
    return np.column_stack(
        (repeated[:, 0] + position * repeated[:, 3], repeated[:, 1], repeated[:, 2])
    ).astype(np.uint64)
