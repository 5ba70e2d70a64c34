"""Ranks of the fused kernels on a CPU, with the arguments of a real launch, and the same steps one
after the other, bit by bit."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.kit.host_kernels import compile_kernel, run_calls
from tests.kit.threads import together
from vllm_commext.allreduce.fused import kernels as fused
from vllm_commext.allreduce.fused.kernels import FusedKernels, Operands, Outputs
from vllm_commext.allreduce.fused.layout import (
    GROUP,
    GROUP_FP8,
    NORM,
    ROW_FP8,
    STATIC_FP8,
    Form,
    FusedShape,
)
from vllm_commext.gpu.ipc import EMPTY
from vllm_commext.gpu.launch import Device, Program, arguments_type

EPS = 1e-5
WARP = 32
MAX_FP8 = 448.0
MULTIPROCESSORS = 40  # of which some prefetch


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


class Function:
    """Launches on this CPU, of one rank."""

    def __init__(self, call: Call, world_size: int, rank: int, seed: int) -> None:
        self._kernel, self._rank = library(call.shape, call.form, world_size), rank
        self._seed = seed + rank

    def launch(self, arguments: ctypes.Structure, blocks: int, _: int) -> None:
        run_calls(self._kernel, ctypes.byref(arguments), [blocks], 2, self._seed, self._rank)
        self._seed += 97


@contextlib.contextmanager
def _a_gpu_of(most_blocks: int) -> Iterator[None]:
    """Stands in for a GPU that takes so many blocks of rows."""
    blocks_of = Form.num_blocks

    def num_blocks(*given: Any) -> int:
        return min(blocks_of(*given), most_blocks)

    with (
        patch.object(fused.launch, "current_device", lambda: Device(0, 90, MULTIPROCESSORS)),
        patch.object(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)),
        patch.object(Form, "num_blocks", num_blocks),
    ):
        yield


class Ranks:
    def __init__(self, world_size: int, half_packs: int) -> None:
        self.world_size, self.half_packs = world_size, half_packs
        self.memories = [np.full(2 * half_packs * 4, EMPTY, np.uint32) for _ in range(world_size)]
        self.states = [np.zeros(2, np.uint32) for _ in range(world_size)]
        self.pieces: set[int] = set()  # of the next weight that launches prefetched

    def run(
        self,
        calls: list[Call],
        most_blocks: int,
        seed: int,
        next_weight: torch.Tensor | None = None,
    ) -> list[list[Outputs]]:
        for call in calls:
            library(call.shape, call.form, self.world_size)
        with _a_gpu_of(most_blocks):
            outputs = together(
                lambda rank: self._run_rank(rank, calls, seed, next_weight), self.world_size
            )
        assert all((memory == EMPTY).all() for memory in self.memories)
        return outputs

    def _run_rank(
        self, rank: int, calls: list[Call], seed: int, next_weight: torch.Tensor | None
    ) -> list[Outputs]:
        memory: Any = SimpleNamespace(
            state=self.states[rank].ctypes.data,
            half_packs=self.half_packs,
            addresses=[each.ctypes.data for each in self.memories],
        )
        collective: Any = SimpleNamespace(rank=rank, world_size=self.world_size)
        kernels: Any = FusedKernels(memory, collective)
        made: list[Outputs] = []
        for call in calls:
            function = Function(call, self.world_size, rank, seed)
            kernels._functions.setdefault((call.shape, call.form), function)
            assert len(call.residual) <= kernels.most_rows(call.shape, call.form)
            residual = call.residual if call.shape.residual else None
            given = Operands(
                *(call.shape, call.parts[rank], residual, call.weight, EPS, call.scale),
                next_weight=next_weight,
            )
            made.append(kernels.run(call.form, given))
            self.pieces.add(kernels._arguments.num_pieces)
        return made


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
