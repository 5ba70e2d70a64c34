"""Our own all-reduce kernels without a GPU: their memory's layout, and their compilation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.allreduce import push
from vllm_commext.allreduce.limits import PACK_BYTES
from vllm_commext.allreduce.push import CHUNK_PACKS, HALVES, PushLayout
from vllm_commext.gpu.launch import WARP

MOST_THREADS = 1024


def pieces_of_a_half(layout: PushLayout, num_packs: int) -> list[int]:
    """Where the packs of a message stand in a half, by the kernels' own description."""
    if layout.kernel == push.ONE_SHOT:
        return list(range(num_packs))
    own = layout.max_packs // layout.world_size
    summed = [
        index // (CHUNK_PACKS * layout.world_size) * CHUNK_PACKS + index % CHUNK_PACKS
        for index in range(num_packs)
        if index // CHUNK_PACKS % layout.world_size == 0
    ]
    pieces = [peer * own + index for peer in range(layout.world_size - 1) for index in summed]
    return [*pieces, *((layout.world_size - 1) * own + index for index in range(num_packs))]


@given(st.integers(2, 8), st.integers(1, 1 << 16), st.integers(1, 1 << 16))
def test_every_pack_has_its_own_place(world_size: int, max_bytes: int, num_bytes: int) -> None:
    layout = PushLayout(world_size, max_bytes)
    assert layout.max_packs % (world_size * CHUNK_PACKS) == 0
    pieces = pieces_of_a_half(layout, -(-min(num_bytes, max_bytes) // PACK_BYTES))
    assert len(set(pieces)) == len(pieces)
    assert max(pieces) < layout.half_packs
    assert layout.num_bytes == HALVES * layout.half_packs * PACK_BYTES


@given(st.integers(2, 8), st.integers(1, 1 << 22), st.integers(1, 1000))
def test_a_launch_has_a_place_a_chunk_up_to_its_bound(
    world_size: int, num_packs: int, most: int
) -> None:
    layout = PushLayout(world_size, 64 << 20)
    blocks = layout.num_blocks(num_packs, most)
    chunks = -(-num_packs // CHUNK_PACKS)
    assert 1 <= blocks <= most
    each = layout.block_chunks
    assert blocks == most or blocks * each >= chunks > (blocks - 1) * each


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_block_has_whole_warps_that_a_multiprocessor_holds_twice(world_size: int) -> None:
    layout = PushLayout(world_size, 1 << 20)
    assert layout.threads % WARP == 0
    assert push.BLOCKS_PER_MULTIPROCESSOR * layout.threads <= MOST_THREADS
    assert layout.block_chunks % (1 if world_size == 2 else world_size) == 0


def test_the_largest_message_is_counted_in_32_bits() -> None:
    for world_size in range(2, 9):
        layout = PushLayout(world_size, push.MAX_MESSAGE_BYTES)
        assert HALVES * layout.half_packs < 2**32
