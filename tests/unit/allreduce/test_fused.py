"""The fused kernels without a GPU: their memory, their arguments, and their compilation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.allreduce.fused.layout import (
    GROUP_FP8,
    MOST_WARPS,
    ONE_PHASE,
    ROW_FP8,
    STATIC_FP8,
    TWO_PHASE,
    Form,
    FusedShape,
    choose,
    forms,
    warps,
)
from vllm_commext.gpu.launch import WARP

KERNELS = (ONE_PHASE, TWO_PHASE)
SHAPES = (
    FusedShape("bfloat16", "bfloat16", 8192),
    FusedShape("float16", "float32", 2880, residual=False, epilogue=STATIC_FP8),
    FusedShape("float32", "float32", 4096, weight_bias=1, epilogue=ROW_FP8),
    FusedShape("bfloat16", "bfloat16", 7168, epilogue=GROUP_FP8),
)


def pieces_of_a_half(form: Form, rows: int, world: int) -> list[int]:
    """Where rank 0 keeps rows in a half, in rows, by the kernels' own description."""
    if form.kernel == ONE_PHASE:
        return [place * rows + row for place in range(world - 1) for row in range(rows)]
    turns = -(-rows // world)
    partial = [
        part * turns + row // world for part in range(world - 1) for row in range(0, rows, world)
    ]
    whole = [
        (world - 1 + owner - 1) * turns + row // world
        for owner in range(1, world)
        for row in range(owner, rows, world)
    ]
    return partial + whole


@given(st.integers(2, 8), st.integers(14, 1400), st.sampled_from(KERNELS))
def test_every_row_that_finds_room_has_its_own_place(world: int, half: int, kernel: str) -> None:
    """And with one row more of every rank, one finds none: `half` is in rows."""
    shape, form = SHAPES[0], Form(kernel, 8)
    rows = form.most_rows(shape, half * shape.row_packs + 1, world)
    pieces = pieces_of_a_half(form, rows, world)
    assert len(set(pieces)) == len(pieces)
    assert max(pieces) < half
    assert max(pieces_of_a_half(form, rows + world, world)) >= half


@given(st.integers(1, 1 << 17), st.integers(2, 8), st.sampled_from(KERNELS), st.integers(1, 32))
def test_a_launch_has_a_block_a_row_or_turn_up_to_what_is_resident(
    rows: int, world: int, kernel: str, num_warps: int
) -> None:
    form = Form(kernel, num_warps)
    blocks = form.num_blocks(rows, world, 132)
    assert 1 <= blocks <= 132 * form.blocks_per_multiprocessor
    assert blocks <= rows
    assert form.blocks_per_multiprocessor * num_warps <= MOST_WARPS


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_has_whole_rows_in_its_registers(shape: FusedShape) -> None:
    found = warps(shape)
    assert 1 <= found <= MOST_WARPS
    assert found == MOST_WARPS or found * WARP >= shape.row_packs


@given(st.sampled_from(SHAPES), st.integers(1, 1 << 14), st.integers(2, 8))
def test_what_is_chosen_is_among_what_is_prepared(shape: FusedShape, rows: int, world: int) -> None:
    form = choose(shape, rows, world)
    assert form in forms(shape, world)
    assert world > 2 or form.kernel == ONE_PHASE


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (FusedShape("int8", "bfloat16", 64), "expected one of float32"),
        (FusedShape("bfloat16", "bfloat16", 60), "a multiple of 8 elements, got 60"),
        (FusedShape("bfloat16", "bfloat16", 64, epilogue=GROUP_FP8), "whole groups of 128"),
        (FusedShape("float32", "float32", 1 << 16), "128 KiB at most"),
    ],
)
def test_what_no_kernel_takes_is_refused_with_the_reason(shape: FusedShape, problem: str) -> None:
    assert problem in shape.problem()
