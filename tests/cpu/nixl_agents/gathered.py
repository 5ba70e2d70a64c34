"""Engines whose pieces are packed, and a hybrid's caches; every read is gathered, in parts of few
pieces."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.cpu.nixl_agents.harness import BLOCK_SIZE, Bytes
from vllm_commext.nixl.gathered import read
from vllm_commext.nixl.geometry.layout import (
    FULL,
    STATE,
    TOKENS,
    AttentionGeometry,
    CacheLayout,
    Family,
    Group,
    StateGeometry,
    StatePart,
)
from vllm_commext.nixl.log import RateLimitedLog

SLOTS = {
    "gathered_reads": True,
    "gather_slots": 2,
    "gather_slot_bytes": 1 << 20,
    "gather_min_pieces": 1,
}
LONG_SECONDS = 60.0


def gather_everything(patch: Any, max_pieces: int = 5) -> None:
    """In parts of few pieces, however slow this machine; its first failures are logged, whatever
    was logged before."""
    patch.setattr(read, "_log", RateLimitedLog())
    patch.setattr(read, "MAX_PIECES", max_pieces)
    patch.setattr(read, "PATIENCE_SECONDS", LONG_SECONDS)
    patch.setattr("vllm_commext.nixl.gathered.packer.SILENT_SECONDS", LONG_SECONDS)


NUM_HEADS, HEAD_BYTES = 4, 48
X_UNITS, X_BYTES, B_BYTES, SSM_BYTES = 8, 12, 20, 40
NUM_LAYERS = 4
"""The first two have attention, the others states."""


def stride_of(tp_size: int, layer: int) -> int:
    """Bytes of a block of a rank."""
    if layer < 2:
        return NUM_HEADS // tp_size * HEAD_BYTES
    return X_UNITS // tp_size * (X_BYTES + SSM_BYTES) + B_BYTES


def hybrid_layout(
    tp_size: int, tp_rank: int, num_blocks: int
) -> Callable[[Sequence[Bytes]], CacheLayout]:
    """A cache of two attention layers and two with states, on rows of memory."""
    own_units = X_UNITS // tp_size
    attention = AttentionGeometry(
        num_rows=num_blocks,
        rows_per_block=1,
        row_stride=stride_of(tp_size, 0),
        row_tokens=BLOCK_SIZE,
        num_heads=NUM_HEADS,
        replicated=False,
        num_planes=1,
        head_stride=HEAD_BYTES,
        token_stride=HEAD_BYTES // BLOCK_SIZE,
        token_bytes=HEAD_BYTES // BLOCK_SIZE,
        content=TOKENS,
        dtype="uint8",
    )
    after_x = own_units * X_BYTES
    parts = (
        StatePart("x", "uint8", 0, X_UNITS, False, X_BYTES),
        StatePart("B", "uint8", after_x, 1, True, B_BYTES),
        StatePart("ssm", "uint8", after_x + B_BYTES, X_UNITS, False, SSM_BYTES),
    )
    states = StateGeometry(num_blocks, stride_of(tp_size, 2), parts)

    def make(memory: Sequence[Bytes]) -> CacheLayout:
        addresses = [row.ctypes.data for row in memory]
        return CacheLayout(
            tp_size=tp_size,
            tp_rank=tp_rank,
            num_blocks=num_blocks,
            groups=[Group(FULL, BLOCK_SIZE), Group(STATE, 1 << 20)],
            families=[
                Family(0, ["a0", "a1"], addresses[:2], attention),
                Family(1, ["s0", "s1"], addresses[2:], states),
            ],
        )

    return make


def units(row: Bytes, tp_size: int, layer: int, block: int) -> list[Any]:
    """Views of the units that a rank has in a block: heads, or x's, B, then ssm's."""
    start = block * stride_of(tp_size, layer)
    if layer < 2:
        sizes = [HEAD_BYTES] * (NUM_HEADS // tp_size)
    else:
        own = X_UNITS // tp_size
        sizes = [X_BYTES] * own + [B_BYTES] + [SSM_BYTES] * own
    ends = np.cumsum(sizes)
    return [
        row[start + end - size : start + end]
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]


def copy_block(
    own: Sequence[Bytes], sources: Sequence[Sequence[Bytes]], layer: int, to: int, block: int
) -> None:
    """What one rank's block gets of the ranks that have its units, unit by unit; B is the first
    rank's."""
    size = len(sources)
    theirs = [units(memory[layer], size, layer, block) for memory in sources]
    if layer < 2:
        flat = [unit for rank in theirs for unit in rank]
    else:
        count = X_UNITS // size
        flat = [unit for rank in theirs for unit in rank[:count]] + [theirs[0][count]]
        flat += [unit for rank in theirs for unit in rank[count + 1 :]]
    for unit, source in zip(units(own[layer], 1, layer, to), flat, strict=True):
        unit[:] = source
