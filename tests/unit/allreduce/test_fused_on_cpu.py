"""The fused kernels on a CPU, rank beside rank, against the same steps one after the other."""

import pytest
import torch

from tests.kit.crossed import crossed
from tests.kit.host_kernels import COMPILER
from tests.unit.allreduce.fused_emulation import Call, Ranks, expected, make_call
from vllm_commext.allreduce.fused.kernels import Outputs
from vllm_commext.allreduce.fused.layout import (
    EPILOGUES,
    GROUP_FP8,
    LEAST_WEIGHT_BYTES,
    NORM,
    ONE_PHASE,
    ROW_FP8,
    STATIC_FP8,
    TWO_PHASE,
    Form,
    FusedShape,
)

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine"),
    pytest.mark.timeout(400),  # each compiles several forms, and fibers are slow on a busy machine
]

KERNELS = (ONE_PHASE, TWO_PHASE)
HALF_PACKS = 1 << 14
SHAPES = {
    "bfloat16": FusedShape("bfloat16", "bfloat16", 776),  # 97 packs: a tail in every form
    "float16, no residual": FusedShape("float16", "float32", 264, residual=False),
    "float32, Gemma": FusedShape("float32", "bfloat16", 520, weight_bias=1),
    "static": FusedShape("bfloat16", "bfloat16", 384, epilogue=STATIC_FP8),
    "by row": FusedShape("float16", "float16", 384, epilogue=ROW_FP8),
    "by group": FusedShape("bfloat16", "bfloat16", 640, epilogue=GROUP_FP8),
    "by group, float32": FusedShape("float32", "float32", 384, epilogue=GROUP_FP8),
    "in columns": FusedShape("bfloat16", "bfloat16", 384, True, 0, *EPILOGUES["fp8_group_columns"]),
    "in columns, aligned": FusedShape(
        "float16", "float16", 384, True, 0, *EPILOGUES["fp8_group_columns_4"]
    ),
}


def assert_same(got: Outputs, want: Outputs, where: object) -> None:
    """Bit by bit, but for which NaN it is."""
    for name, mine, theirs in zip(got._fields, got, want, strict=True):
        wide, right = mine.float(), theirs.float()
        assert torch.equal(wide.isnan(), right.isnan()), (name, where)
        assert torch.equal(wide.nan_to_num(), right.nan_to_num()), (name, where)


def check(ranks: Ranks, calls: list[Call], most_blocks: int, seed: int) -> None:
    outputs = ranks.run(calls, most_blocks, seed)
    for index, call in enumerate(calls):
        want = expected(call)
        for rank in range(ranks.world_size):
            assert_same(outputs[rank][index], want, (index, rank, call.form))


@pytest.mark.parametrize(("name", "kernel"), crossed(list(SHAPES), KERNELS, most=4))
def test_two_ranks_get_what_the_steps_give_one_by_one(name: str, kernel: str) -> None:
    """Each row by itself, so that its bits depend on no other row, and on no form."""
    form = Form(kernel, 4 if name == "bfloat16" else 2)
    calls = [make_call(SHAPES[name], form, 2, rows, seed=rows) for rows in (1, 7, 2, 5, 16)]
    check(Ranks(2, HALF_PACKS), calls, most_blocks=3, seed=1)


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in range(4, 9))]
)
def test_more_ranks_get_it_too_and_may_change_the_form_at_any_call(world_size: int) -> None:
    shape = SHAPES["by group"]
    forms = [Form(ONE_PHASE, 2), Form(TWO_PHASE, 1)]
    calls = [
        make_call(shape, forms[index % 3 % 2], world_size, rows, seed=rows)
        for index, rows in enumerate((1, world_size + 1, 2 * world_size, 3, 1))
    ]
    ranks = Ranks(world_size, HALF_PACKS)
    check(ranks, calls, most_blocks=2, seed=world_size)
    assert [state.tolist() for state in ranks.states] == [[len(calls), 0]] * world_size


@pytest.mark.parametrize(
    ("dtype", "kernel"), crossed(["bfloat16", "float16", "float32"], KERNELS, most=2), ids=str
)
def test_every_bit_pattern_passes(dtype: str, kernel: str) -> None:
    """The words that mean "nothing yet" among them: they come out as the NaNs that they are."""
    words = [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0, 0xFFFF0000, 0x0000FFFF, 0x7F800000, 0xFF80FF80]
    shape = FusedShape(dtype, dtype, 64, epilogue=NORM)
    call = make_call(shape, Form(kernel, 1), 3, 8, seed=2)
    raw = torch.tensor(words * 8, dtype=torch.int64).to(torch.int32).view(call.residual.dtype)
    for rank, part in enumerate(call.parts):  # every word from every rank, and one from all
        part[rank] = raw[: shape.hidden]
        part[7] = raw[: shape.hidden]
    call.residual[5] = raw[: shape.hidden]
    check(Ranks(3, HALF_PACKS), [call] * 3, most_blocks=2, seed=3)


def test_what_is_prefetched_of_the_next_weight_changes_nothing() -> None:
    """Of a matrix that is given transposed: a piece of each of its rows."""
    call = make_call(SHAPES["in columns"], Form(ONE_PHASE, 1), 2, 5, seed=4)
    weight = torch.zeros(256, LEAST_WEIGHT_BYTES // 256 // 2, dtype=torch.bfloat16)
    ranks = Ranks(2, HALF_PACKS)
    for outputs in ranks.run([call], 5, seed=4, next_weight=weight.t()):
        assert_same(outputs[0], expected(call), "with a weight")
    assert ranks.pieces == {256}


def test_numbers_of_8_bits_are_rounded_as_torch_rounds_them() -> None:
    """From the smallest to beyond the largest, by a scale of one."""
    shape = FusedShape("float32", "float32", 4096, epilogue=STATIC_FP8)
    call = make_call(shape, Form(ONE_PHASE, 1), 2, 1, seed=9)
    spread = torch.logspace(-12, 3, shape.hidden) * torch.tensor([1.0, -1.0]).repeat(2048)
    call.weight.copy_(spread)
    check(Ranks(2, HALF_PACKS), [call], most_blocks=1, seed=9)
