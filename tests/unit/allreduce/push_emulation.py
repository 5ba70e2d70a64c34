"""Ranks of the push kernels on a CPU: the kernels' own source, compiled for the host."""

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from tests.kit.host_kernels import compile_kernel, run_calls
from tests.kit.threads import together
from vllm_commext.allreduce import push
from vllm_commext.allreduce.limits import PACK_BYTES
from vllm_commext.allreduce.push import PushLayout
from vllm_commext.gpu.ipc import EMPTY
from vllm_commext.gpu.launch import ELEMENT_CODES, Program, arguments_type

TIMEOUT_NS = 60_000_000_000


@functools.cache
def library(layout: PushLayout, dtype: str) -> ctypes.CDLL:
    loaded = compile_kernel(Program(layout.kernel), layout.macros(ELEMENT_CODES[dtype], rank=0))
    assert loaded.args_bytes() == ctypes.sizeof(
        arguments_type(push.ARGUMENTS, WORLD_SIZE=layout.world_size)
    )
    return loaded


def in_order_of_ranks(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, one rank after the other, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def random_calls(
    world_size: int, dtype: torch.dtype, sizes: list[int], seed: int
) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    elements = [size * PACK_BYTES // dtype.itemsize for size in sizes]
    return [
        [torch.randn(count, generator=generator).to(dtype) for count in elements]
        for _ in range(world_size)
    ]


class Ranks:
    def __init__(self, world_size: int, max_bytes: int) -> None:
        self.layout = PushLayout(world_size, max_bytes)
        self.memories = [
            np.full(self.layout.num_bytes // 4, EMPTY, np.uint32) for _ in range(world_size)
        ]
        self.states = [np.zeros(2, np.uint32) for _ in range(world_size)]

    def all_reduce(
        self, inputs: list[list[torch.Tensor]], most_blocks: int, seed: int
    ) -> list[list[torch.Tensor]]:
        """Each rank's outputs, for its inputs one after the other; all ranks at the same time."""
        outputs = [[torch.full_like(tensor, 777.0) for tensor in of] for of in inputs]
        for tensor in inputs[0]:
            self._library(tensor)  # a rank that cannot compile it would leave the others waiting

        def run(rank: int) -> None:
            self._run_rank(rank, inputs[rank], outputs[rank], most_blocks, seed)

        together(run, self.layout.world_size)
        return outputs

    def _library(self, tensor: torch.Tensor) -> ctypes.CDLL:
        return library(self.layout, str(tensor.dtype).removeprefix("torch."))

    def _call(self, call: Any, rank: int, tensor: torch.Tensor, out: torch.Tensor) -> Any:
        call.input, call.output = tensor.data_ptr(), out.data_ptr()
        call.state = self.states[rank].ctypes.data
        call.num_packs = tensor.nbytes // PACK_BYTES
        call.timeout_ns = TIMEOUT_NS
        call.memory[:] = [memory.ctypes.data for memory in self.memories]
        return call

    def _run_rank(
        self,
        rank: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        most_blocks: int,
        seed: int,
    ) -> None:
        kind = arguments_type(push.ARGUMENTS, WORLD_SIZE=self.layout.world_size)
        calls = (kind * len(inputs))()
        for call, tensor, out in zip(calls, inputs, outputs, strict=True):
            self._call(call, rank, tensor, out).max_packs = self.layout.max_packs
        blocks = [self.layout.num_blocks(call.num_packs, most_blocks) for call in calls]
        run_calls(self._library(inputs[0]), calls, blocks, 2, seed + rank, rank)
