"""Ranks of the kernels that sum through host memory, on a CPU."""

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from tests.kit.host_kernels import compile_kernel, run_calls
from tests.unit.allreduce import push_emulation
from vllm_commext.allreduce.backends import host
from vllm_commext.allreduce.backends.host import HostLayout
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu.launch import ELEMENT_CODES, arguments_type
from vllm_commext.gpu.nvrtc import Program

LINE_BYTES = 64


@functools.cache
def library(layout: HostLayout, kernel: str, dtype: str) -> ctypes.CDLL:
    """The kernel of all ranks for this CPU."""
    macros = {**layout.macros(kernel, ELEMENT_CODES[dtype], rank=0), "NUM_TEAMS": 3}
    loaded = compile_kernel(Program(kernel), macros)
    assert loaded.args_bytes() == ctypes.sizeof(
        arguments_type(host.ARGUMENTS, WORLD_SIZE=layout.world_size)
    )
    return loaded


def aligned_words(num_bytes: int) -> np.ndarray:
    """Zeros at an address that parcels may begin at."""
    raw = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    first = -raw.ctypes.data % LINE_BYTES
    return raw[first : first + num_bytes].view(np.uint32)


class Ranks(push_emulation.Ranks):
    """The outboxes and counters of all ranks of a group, in this process."""

    layout: Any

    def __init__(self, world_size: int, max_bytes: int) -> None:
        self.layout = HostLayout(world_size, max_bytes)
        self.memories = [aligned_words(self.layout.num_bytes) for _ in range(world_size)]
        self.states = [np.zeros(2, np.uint32) for _ in range(world_size)]

    def kernel(self, num_packs: int) -> str:
        """That a message of so many packs takes."""
        return self.layout.kernel(num_packs)

    def _library(self, tensor: torch.Tensor) -> ctypes.CDLL:
        kernel = self.kernel(tensor.nbytes // PACK_BYTES)
        return library(self.layout, kernel, str(tensor.dtype).removeprefix("torch."))

    def _run_rank(
        self,
        rank: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        most_blocks: int,
        seed: int,
    ) -> None:
        kind = arguments_type(host.ARGUMENTS, WORLD_SIZE=self.layout.world_size)
        places = {name: getattr(self.layout, name) for name in host.PLACES}
        for index, (tensor, out) in enumerate(zip(inputs, outputs, strict=True)):
            call = self._call(kind(**places), rank, tensor, out)
            name = self.layout.kernel(call.num_packs)
            blocks = self.layout.num_blocks(name, call.num_packs, most_blocks)
            made = ctypes.byref(call)
            run_calls(self._library(tensor), made, [blocks], 2, seed + 31 * index, rank)
