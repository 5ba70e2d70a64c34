"""The kernel that copies pieces, on a CPU: every byte, whatever the alignment and the order."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.descriptors import expand_rows
from tests.kit.examples import examples
from tests.kit.host_kernels import COMPILER
from tests.kit.mapped_memory import run_kernel
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.transport import gather
from vllm_commext.nixl.transport.agent import DONE
from vllm_commext.nixl.transport.gather import CHUNK_BYTES, Gather, Gatherer, Places, batches

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")
SIZES = st.one_of(
    st.integers(1, 70),
    st.sampled_from([128, 511, 512, 4096, CHUNK_BYTES - 3, CHUNK_BYTES, CHUNK_BYTES + 1]),
    st.just(2 * CHUNK_BYTES + 31),
)


class ImmediateDevice:
    """Runs each launch before it returns, with so many blocks."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.num_blocks, self.seed = num_blocks, seed

    def make_slab(self) -> object:
        from tests.kit.mapped_memory import HostSlab

        return HostSlab()

    def launch(self, arguments: ctypes.Structure, _: object) -> None:
        run_kernel(arguments, self.num_blocks, seed=self.seed)

    def is_done(self, _: object) -> bool:
        return True


@needs_compiler
@given(
    st.lists(
        st.tuples(SIZES, st.integers(0, 35), st.integers(0, 35), st.integers(1, 3)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
    st.integers(0, 1000),
    st.tuples(st.integers(2, 20), st.integers(1, 4)),
)
@examples(20)
def test_every_byte_of_every_piece_and_no_other(
    rows: list[tuple[int, int, int, int]], num_blocks: int, seed: int, most: tuple[int, int]
) -> None:
    """Pairs in any order, in launches of at most so many pieces and lengths."""
    dice = np.random.default_rng(seed)
    total = sum((size + 80) * count for size, _, _, count in rows) + 64
    source = dice.integers(0, 256, total, dtype=np.uint8)
    target = dice.integers(0, 256, total, dtype=np.uint8)
    lists = [list[list[int]](), list[list[int]]()]
    ends = [target.ctypes.data, source.ctypes.data]
    for size, *gaps, count in rows:
        for side in (0, 1):
            stride = size + gaps[1 - side] % 17
            ends[side] += gaps[side]
            lists[side].append([ends[side], size, 0, stride, count])
            ends[side] += stride * count
    rows_of = [np.array(one, dtype=np.uint64) for one in lists]
    counts = [row[-1] for row in rows]
    starts = np.cumsum(counts) - counts
    paired = [
        (start + own, start + other)
        for start, count in zip(starts, counts, strict=True)
        for own, other in enumerate(dice.permutation(count))
    ]
    order = dice.permutation(np.array(paired, dtype=np.int32))[: dice.integers(1, len(paired) + 1)]
    expected = target.copy()
    own, theirs = (expand_rows(one)[order[:, side]] for side, one in enumerate(rows_of))
    for (a, size, _), (b, *_) in zip(own.tolist(), theirs.tolist(), strict=True):
        to, of = a - target.ctypes.data, b - source.ctypes.data
        expected[to : to + size] = source[of : of + size]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("MAX_PIECES", "MAX_RUNS"), most, strict=True):
            patch.setattr(gather, name, value)
        pairs = Pairs(order[:, 0], order[:, 1], 0)
        found = list(batches(*map(Places.of, rows_of), pairs))
    assert all(len(one.places) <= most[0] and len(one.runs) <= most[1] for one in found)
    gatherer = Gatherer(ImmediateDevice(num_blocks, seed))  # pyright: ignore
    for batch in found:
        made: Gather = gatherer.make(batch)
        gatherer.post(made)
        assert gatherer.state(made) == DONE
        gatherer.release_read(made)
    assert np.array_equal(target, expected)
