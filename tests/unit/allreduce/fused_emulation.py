"""Ranks of the fused kernels on a CPU, and the same steps one after the other, bit by bit."""

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch

from tests.kit.host_kernels import compile_kernel, run_calls
from tests.kit.threads import together
from tests.unit.allreduce.push_emulation import TIMEOUT_NS
from vllm_commext.allreduce.fused import kernels as fused
from vllm_commext.allreduce.fused.kernels import Outputs
from vllm_commext.allreduce.fused.layout import (
    GROUP,
    GROUP_FP8,
    NORM,
    ONE_PHASE,
    ROW_FP8,
    STATIC_FP8,
    Form,
    FusedShape,
)
from vllm_commext.gpu.ipc import EMPTY
from vllm_commext.gpu.launch import Program, arguments_type

EPS = 1e-5
WARP = 32
MAX_FP8 = 448.0
PIECES = (50, 128, 192)  # of a matrix of so many rows and bytes a row, the last row's end left out
PREFETCHING = 2  # blocks


@functools.cache
def library(shape: FusedShape, form: Form, world_size: int) -> ctypes.CDLL:
    loaded = compile_kernel(Program(form.kernel), form.macros(shape, world_size, rank=0))
    assert loaded.args_bytes() == ctypes.sizeof(
        arguments_type(fused.ARGUMENTS, WORLD_SIZE=world_size)
    )
    return loaded


@dataclass(frozen=True)
class Call:
    """One call on all ranks; parts by rank, [rows, hidden]."""

    shape: FusedShape
    form: Form
    parts: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor


def make_call(
    shape: FusedShape, form: Form, world_size: int, rows: int, seed: int, spread: float = 1.0
) -> Call:
    generator = torch.Generator().manual_seed(seed)
    dtype, weight_dtype = getattr(torch, shape.dtype), getattr(torch, shape.weight_dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * spread

    return Call(
        *(shape, form, [normal(rows, shape.hidden).to(dtype) for _ in range(world_size)]),
        *(normal(rows, shape.hidden).to(dtype), normal(shape.hidden).to(weight_dtype)),
        torch.tensor([0.0371]),
    )


class Ranks:
    def __init__(self, world_size: int, half_packs: int) -> None:
        self.world_size, self.half_packs = world_size, half_packs
        self.memories = [np.full(2 * half_packs * 4, EMPTY, np.uint32) for _ in range(world_size)]
        self.states = [np.zeros(2, np.uint32) for _ in range(world_size)]
        self.next_weight = torch.zeros(50, 192, dtype=torch.uint8)

    def run(self, calls: list[Call], most_blocks: int, seed: int) -> list[list[Outputs]]:
        outputs = [
            [fused.make_outputs(call.shape, call.parts[rank], call.scale) for call in calls]
            for rank in range(self.world_size)
        ]
        for call in calls:
            library(call.shape, call.form, self.world_size)

        def run(rank: int) -> None:
            self._run_rank(rank, calls, outputs[rank], most_blocks, seed)

        together(run, self.world_size)
        assert all((memory == EMPTY).all() for memory in self.memories)
        return outputs

    def _run_rank(
        self, rank: int, calls: list[Call], outputs: list[Outputs], most_blocks: int, seed: int
    ) -> None:
        for index, (call, out) in enumerate(zip(calls, outputs, strict=True)):
            made = arguments_type(fused.ARGUMENTS, WORLD_SIZE=self.world_size)()
            made.input, made.residual = call.parts[rank].data_ptr(), call.residual.data_ptr()
            made.weight, made.state = call.weight.data_ptr(), self.states[rank].ctypes.data
            made.residual_out, made.output = out.residual.data_ptr(), out.out.data_ptr()
            made.scales, made.num_rows = out.scales.data_ptr(), len(call.residual)
            made.scale_rows = out.scales.stride(1) if call.shape.scale_alignment else 0
            made.half_packs, made.eps, made.timeout_ns = self.half_packs, EPS, TIMEOUT_NS
            made.next, made.prefetch_after = self.next_weight.data_ptr(), 1000
            made.num_pieces, made.piece_bytes, made.piece_stride = PIECES
            made.memory[:] = [memory.ctypes.data for memory in self.memories]
            rows = len(call.residual)
            most = call.form.most_rows(call.shape, self.half_packs, self.world_size)
            assert rows <= most, "the test's memory is too small"
            blocks = min(call.form.num_blocks(rows, self.world_size, 1000), most_blocks)
            made.row_blocks = blocks
            if call.form.kernel == ONE_PHASE:
                blocks += PREFETCHING
            kernel = library(call.shape, call.form, self.world_size)
            run_calls(kernel, ctypes.byref(made), [blocks], 2, seed + rank + 97 * index, rank)


def _fma_squares(packs: np.ndarray) -> np.ndarray:
    """The sum of squares over the last axis, one fused multiply-add after the other."""
    total = np.zeros(packs.shape[:-1], np.float32)
    for i in range(packs.shape[-1]):
        wide = packs[..., i].astype(np.float64) ** 2 + total.astype(np.float64)
        total = wide.astype(np.float32)
    return total


def _add_32(values: np.ndarray) -> np.ndarray:
    """The sum over the last axis, of 32, as lanes exchange them."""
    lanes = np.arange(WARP)
    for distance in (16, 8, 4, 2, 1):
        values = values + values[..., lanes ^ distance]
    return values[..., 0]


def _padded(values: np.ndarray) -> np.ndarray:
    rest = -values.shape[-1] % WARP
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, rest)])
    return padded.reshape(*values.shape[:-1], -1, WARP)


def sums_of_squares(z: torch.Tensor) -> np.ndarray:
    """Of each row, added as the kernels say that they add."""
    packs = z.float().numpy().reshape(len(z), -1, 16 // z.itemsize)
    warps = _padded(_add_32(_padded(_fma_squares(packs))))
    total = np.zeros((len(z), WARP), np.float32)
    for index in range(warps.shape[1]):
        total = total + warps[:, index]
    return _add_32(total)


def expected(call: Call) -> Outputs:
    total = call.parts[0].float()
    for part in call.parts[1:]:
        total = total + part.float()
    dtype, shape = call.parts[0].dtype, call.shape
    z = total.to(dtype)
    if shape.residual:
        z = (z.float() + call.residual.float()).to(dtype)
    mean = sums_of_squares(z) * np.float32(1.0 / shape.hidden) + np.float32(EPS)
    factor = torch.from_numpy((np.float32(1) / np.sqrt(mean)).astype(np.float32))
    weight = call.weight.float() + shape.weight_bias
    out = (z.float() * factor[:, None] * weight).to(dtype)
    return _quantised(shape, out, z, call.scale)


def _quantised(
    shape: FusedShape, out: torch.Tensor, z: torch.Tensor, given: torch.Tensor
) -> Outputs:
    if shape.epilogue == NORM:
        return Outputs(out, z, torch.empty(len(z), 0))
    wide = out.float()
    if shape.epilogue == STATIC_FP8:
        return Outputs(_fp8(wide * (1 / given)), z, given)
    if shape.epilogue == ROW_FP8:
        scales = (wide.abs().amax(1, keepdim=True) / MAX_FP8).clamp(min=1 / (MAX_FP8 * 512))
        return Outputs(_fp8(wide / scales), z, scales)
    assert shape.epilogue == GROUP_FP8
    groups = wide.view(len(z), -1, GROUP)
    scales = groups.abs().amax(2).clamp(min=1e-10) / MAX_FP8
    return Outputs(_fp8(groups / scales[:, :, None]).view(z.shape), z, scales)


def _fp8(wide: torch.Tensor) -> torch.Tensor:
    return wide.clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
