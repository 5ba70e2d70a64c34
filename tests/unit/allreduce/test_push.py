"""Our own all-reduce kernels without a GPU: their memory's layout, and their compilation."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.allreduce import push, push_layout
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.allreduce.push_layout import FLAG_BYTES, HALVES, PushLayout
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP

ARCHITECTURES = (80, 90, 100, 120)
MOST_THREADS = 1024


def pieces_of_a_half(layout: PushLayout, num_chunks: int) -> list[int]:
    """What a message of so many chunks takes of a half, by the kernels' own description: chunks."""
    if layout.kernel == push_layout.ONE_SHOT:
        return list(range(num_chunks))
    own = layout.max_chunks // layout.world_size
    pieces = [
        peer * own + chunk // layout.world_size
        for peer in range(layout.world_size - 1)
        for chunk in range(0, num_chunks, layout.world_size)
    ]
    return [*pieces, *((layout.world_size - 1) * own + chunk for chunk in range(num_chunks))]


@given(st.integers(2, 8), st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_every_chunk_has_its_own_place(world_size: int, max_bytes: int, num_bytes: int) -> None:
    layout = PushLayout(world_size, max_bytes)
    chunks = -(-min(num_bytes, max_bytes) // layout.chunk_bytes)
    assert layout.max_chunks % world_size == 0
    pieces = pieces_of_a_half(layout, chunks)
    assert len(set(pieces)) == len(pieces)
    assert max(pieces) < layout.half_chunks
    assert layout.flags_offset == HALVES * layout.half_chunks * layout.chunk_bytes
    assert layout.num_bytes - layout.flags_offset == layout.half_chunks * FLAG_BYTES
    assert layout.flags_offset % PACK_BYTES == 0


@given(st.integers(2, 8), st.integers(1, 1 << 22), st.integers(1, 1000))
def test_a_launch_has_a_place_a_chunk_up_to_its_bound(
    world_size: int, num_packs: int, most: int
) -> None:
    layout = PushLayout(world_size, 64 << 20)
    blocks = layout.num_blocks(num_packs, most)
    chunks = -(-num_packs * PACK_BYTES // layout.chunk_bytes)
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
        assert HALVES * layout.half_chunks * layout.chunk_bytes // PACK_BYTES < 2**32


def test_the_kernels_arguments_are_as_the_source_has_them() -> None:
    source = (push.FOLDER / "push_parts.h").read_text()
    body = source.partition("struct Args {")[2].partition("};")[0]
    names = [
        line.split("//")[0].rstrip(" ;\n").split()[-1].partition("[")[0]
        for line in body.strip().splitlines()
    ]
    kind = push.arguments_type(4)
    assert names == [name for name, _ in kind._fields_]  # pyright: ignore[reportGeneralTypeIssues]
    assert ctypes.sizeof(kind) == 8 * 6 + 8 * 4


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", list(ELEMENT_CODES))
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_it_compiles_for_every_architecture(world_size: int, dtype: str, architecture: int) -> None:
    layout = PushLayout(world_size, 1 << 20)
    source = push.program(layout)
    for rank in {0, world_size - 1}:
        cubin = source.compile_cubin(layout.macros(ELEMENT_CODES[dtype], rank), architecture)
        assert cubin.startswith(b"\x7fELF")
        assert layout.kernel.encode() in cubin
        assert b"cuMulticast" not in cubin
        assert b"multimem" not in cubin
