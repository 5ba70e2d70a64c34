"""Our own all-reduce kernel without a GPU: its memory's layout, and its compilation."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.allreduce import push
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.allreduce.push import PROGRAM, PushLayout
from vllm_commext.gpu.launch import ELEMENT_CODES

ARCHITECTURES = (80, 90, 100, 120)


@given(st.integers(2, 8), st.integers(1, 1 << 26), st.integers(1, 1 << 26))
def test_every_chunk_of_every_peer_has_its_own_place(
    world_size: int, max_bytes: int, num_bytes: int
) -> None:
    layout = PushLayout(world_size, max_bytes)
    num_packs = -(-min(num_bytes, max_bytes) // PACK_BYTES)
    chunks = -(-num_packs // layout.chunk_packs)
    assert chunks <= layout.flags_stride
    assert num_packs <= layout.half_packs
    peers = world_size - 1
    parts = [
        ((half * peers + peer) * layout.half_packs * PACK_BYTES, num_packs * PACK_BYTES)
        for half in range(2)
        for peer in range(peers)
    ]
    flags = [
        (layout.flags_offset + peer * layout.flags_stride * 4, chunks * 4) for peer in range(peers)
    ]
    regions = sorted([*parts, *flags])
    ends = [start + length for start, length in regions]
    starts = [start for start, _ in regions[1:]] + [layout.num_bytes]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert all(start % PACK_BYTES == 0 for start, _ in parts)


@given(st.integers(1, 1 << 22), st.integers(1, 1000))
def test_a_launch_has_a_warp_a_chunk_up_to_its_bound(num_packs: int, most: int) -> None:
    layout = PushLayout(2, 64 << 20)
    blocks = layout.num_blocks(num_packs, most)
    chunks = -(-num_packs // layout.chunk_packs)
    assert 1 <= blocks <= most
    assert blocks == most or blocks * push.PUSHERS >= chunks > (blocks - 1) * push.PUSHERS


def test_the_kernels_arguments_are_as_the_source_has_them() -> None:
    source = PROGRAM.main.read_text()
    body = source.partition("struct Args {")[2].partition("};")[0]
    names = [
        line.split("//")[0].rstrip(" ;\n").split()[-1].partition("[")[0]
        for line in body.strip().splitlines()
    ]
    kind = push.arguments_type(4)
    assert names == [name for name, _ in kind._fields_]  # pyright: ignore[reportGeneralTypeIssues]
    assert ctypes.sizeof(kind) == 8 * (8 + 4)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", list(ELEMENT_CODES))
def test_it_compiles_for_every_architecture(dtype: str, architecture: int) -> None:
    for rank in range(2):
        macros = push.macros(dtype, 2, rank)
        cubin = PROGRAM.compile_cubin(macros, architecture)
        assert cubin.startswith(b"\x7fELF")
        assert b"push_all_reduce" in cubin
        assert b"cuMulticast" not in cubin
        assert b"multimem" not in cubin
