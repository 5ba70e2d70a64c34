"""The fused op: its steps, what the compiler sees, and who serves it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.dispatcher import FusedPolicy
from vllm_commext.allreduce.fused import kernels as fused
from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.allreduce.fused.kernels import Operands, PushFused
from vllm_commext.allreduce.fused.layout import (
    EPILOGUES,
    GROUP_FP8,
    ROW_FP8,
    Form,
    FusedShape,
    forms,
)
from vllm_commext.allreduce.fused.op import FusedNorm, all_reduce_add_rms_norm
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.errors import ConfigError, UnsupportedError

EPS, HIDDEN = 1e-5, 256
OP = torch.ops.vllm_commext.all_reduce_add_rms_norm
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


twofold = fused_op.after_all_reduce(lambda x: x + x)


@pytest.fixture
def twice() -> Iterator[str]:
    fused_op.register_group("twice", FusedNorm(twofold, None, FusedPolicy(None)))
    yield "twice"
    fused_op.forget_group("twice")


def rows_of(dtype: torch.dtype, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return x, residual, torch.randn(HIDDEN, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [0, 1])
def test_without_kernels_the_steps_serve(twice: str, dtype: torch.dtype, bias: int) -> None:
    x, residual, weight = rows_of(dtype)
    out, z, scales = OP(x, residual, weight, EPS, twice, weight_bias=bias)
    assert torch.equal(z, (x + x) + residual)
    wanted = torch.nn.functional.rms_norm(z.double(), (HIDDEN,), weight.double() + bias, EPS)
    torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert scales.numel() == 0
    alone = OP(x, None, weight, EPS, twice)
    assert torch.equal(alone[1], x + x)


@pytest.mark.parametrize("epilogue", list(EPILOGUES)[1:])
def test_numbers_of_8_bits_times_their_scale_are_the_norm(twice: str, epilogue: str) -> None:
    x, residual, weight = rows_of(torch.bfloat16)
    given = torch.tensor([0.05])
    norm = OP(x, residual, weight, EPS, twice)[0].float()
    out, _, scales = OP(x, residual, weight, EPS, twice, epilogue, given)
    used = given.expand(len(x), 1) if epilogue == "fp8_static" else scales
    wide = out.float().view(*used.shape, -1) * used[..., None]
    assert out.dtype is torch.float8_e4m3fn
    torch.testing.assert_close(wide.view(norm.shape), norm, rtol=2**-4, atol=2e-3)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("rows", [0, 3])
def test_the_compiler_sees_what_the_op_does(twice: str, epilogue: str, rows: int) -> None:
    x, residual, weight = rows_of(torch.bfloat16, rows)
    scale = torch.tensor([0.1])
    torch.library.opcheck(OP, (x, residual, weight, EPS, twice, epilogue, scale))
    torch.library.opcheck(OP, (x, None, weight, EPS, twice, epilogue, scale))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4)}, "expected"),
        ({"weight": torch.zeros(8)}, "expected .rows, hidden"),
        ({"residual": torch.zeros(2, HIDDEN)}, "expected a residual as the input"),
        ({"epilogue": "int4"}, "expected one of norm"),
        ({"epilogue": "fp8_static"}, "expected one float32"),
        ({"group": "nobody"}, "expected one of the groups"),
    ],
)
def test_what_is_wrong_is_said(twice: str, change: dict[str, Any], message: str) -> None:
    x, residual, weight = rows_of(torch.bfloat16)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": EPS, "group": twice}
    with pytest.raises(ConfigError, match=message):
        all_reduce_add_rms_norm(**{**arguments, **change})


class Backend:
    name = limits.FUSED_PUSH

    def __init__(self, problem: str = "") -> None:
        self.problem, self.prepared, self.runs = problem, 0, 0

    def prepare(self, _: FusedShape) -> None:
        self.prepared += 1
        if self.problem:
            raise UnsupportedError(self.problem)

    def takes(self, _: FusedShape, num_rows: int) -> bool:
        return num_rows < 7

    def run(self, given: Operands) -> fused.Outputs:
        self.runs += 1
        return fused.make_outputs(given.shape, given.x, None)


ROW_BYTES = 2 * HIDDEN
MEASURED = Table(
    *(2, {}, "test"),
    {
        "bfloat16": (
            Row(2 * ROW_BYTES, (limits.UNFUSED, limits.FUSED_PUSH)),
            Row(4 * ROW_BYTES, (limits.FUSED_PUSH, limits.UNFUSED)),
        )
    },
)


@pytest.mark.parametrize("problem", ["", "no compiler"])
@pytest.mark.parametrize("forced", [None, limits.PUSH, limits.NCCL])
def test_the_fastest_serves_that_all_ranks_have(problem: str, forced: str | None) -> None:
    backend = Backend(problem)
    norm = FusedNorm(twofold, backend, FusedPolicy(MEASURED, forced))
    by_kernel = {None: {4, 5}, limits.PUSH: {1, 4, 5}, limits.NCCL: set[int]()}[forced]
    for count in (4, 1, 0, 5, 8):
        x, residual, weight = rows_of(torch.bfloat16, count)
        shape = FusedShape("bfloat16", "bfloat16", HIDDEN)
        norm.run(Operands(shape, x, residual, weight, EPS))
    assert backend.prepared == 1  # at the first call, though it may not be the one to serve it
    expected_runs = 0 if problem else len(by_kernel)
    assert backend.runs == norm.calls[limits.FUSED_PUSH] == expected_runs
    assert norm.calls[limits.UNFUSED] == 5 - expected_runs


class Launches:
    """In place of compiled kernels: keeps what each launch was given, and finds room for 4 rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def prepare(self, shape: FusedShape, wanted: object) -> None:
        assert wanted == forms(shape, 2)

    def most_rows(self, shape: FusedShape, _: Form) -> int:
        return 4 if shape.hidden == HIDDEN else 0

    def run(self, _: Form, given: Operands, outputs: fused.Outputs | None = None) -> fused.Outputs:
        x = given.x
        assert given.next_weight is None or outputs is None
        assert 0 < len(x) <= 4
        assert all(
            each is None or (each.is_contiguous() and each.data_ptr() % 16 == 0)
            for each in (x, given.residual, given.weight)
        )
        self.rows.append(len(x))
        found = fused_op.steps(given._replace(x=x + x))
        if outputs is None:
            return found
        for mine, theirs in zip(outputs[:2], found[:2], strict=True):
            mine.copy_(theirs)
        if given.shape.epilogue in (ROW_FP8, GROUP_FP8):
            outputs.scales.copy_(found.scales)
        return outputs


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("residual", [False, True])
def test_what_finds_no_room_goes_in_parts(epilogue: str, residual: bool) -> None:
    launches = Launches()
    backend = PushFused(launches, 2)  # pyright: ignore[reportArgumentType]
    shape = FusedShape("bfloat16", "bfloat16", HIDDEN, residual, 0, *EPILOGUES[epilogue])
    backend.prepare(shape)
    scale = torch.tensor([0.05]) if epilogue == "fp8_static" else None
    for count, parts in ((4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])):
        x, other, weight = rows_of(torch.bfloat16, count)
        old = other if residual else None
        given = Operands(shape, x, old, weight, EPS, scale)
        want = fused_op.steps(given._replace(x=x + x))
        gaps = torch.cat([x, x], 1)[:, HIDDEN:]
        odd = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        for each in (x, gaps, odd):
            launches.rows.clear()
            assert backend.takes(shape, count)
            found = backend.run(given._replace(x=each))
            assert launches.rows == parts
            assert torch.equal(found.out.float(), want.out.float())
            assert torch.equal(found.residual, want.residual)
            if shape.epilogue in (ROW_FP8, GROUP_FP8):
                assert torch.equal(found.scales, want.scales)
    assert not backend.takes(FusedShape("bfloat16", "bfloat16", 2 * HIDDEN), 4)
    assert not backend.takes(shape, 0)
