"""Ranks of the kernel on a CPU: the kernel's own source, compiled for the host."""

import ctypes
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.kit.host_kernels import compile_kernel, run_calls
from tests.kit.threads import together
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.kernel import PROGRAM, Failure, Shape, Tiling, make_arguments
from vllm_commext.reduce_rms.ops import _arguments

EPS = 1e-6
EMPTY = kernel.SENTINEL_BITS << 32 | kernel.SENTINEL_BITS


@functools.cache
def library(shape: Shape, tiling: Tiling) -> ctypes.CDLL:
    macros = kernel.macros(shape, tiling)
    loaded = compile_kernel(
        PROGRAM, {**macros, "THREADS": "BLOCK_THREADS", "NUM_TEAMS": "BLOCK_TEAMS"}
    )
    assert loaded.args_bytes() == ctypes.sizeof(make_arguments())
    return loaded


class Ranks:
    def __init__(self, world_size: int, max_tokens: int, timeout_seconds: float = 30.0) -> None:
        self.world_size, self.timeout_ns = world_size, int(timeout_seconds * 1e9)
        words = max_tokens * world_size
        self.slots = [np.full(kernel.NUM_SLOTS * words, EMPTY, np.uint64) for _ in self.ranks]
        self.states = [np.zeros(max_tokens, np.uint32) for _ in self.ranks]
        self.failures = [np.zeros(2, np.uint64) for _ in self.ranks]
        addresses = [slots.ctypes.data for slots in self.slots]
        slot_bytes = words * kernel.WORD_BYTES
        self.words = [
            np.array(
                [*addresses, self.states[r].ctypes.data]
                + [self.failures[r].ctypes.data, self.failures[r][1:].ctypes.data, slot_bytes, r],
                np.uint64,
            )
            for r in self.ranks
        ]

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def failure(self, rank: int) -> Failure | None:
        return kernel.decode_failure(int(self.failures[rank][1]))

    def slot_words_in_use(self, rank: int) -> np.ndarray:
        return (self.slots[rank].reshape(kernel.NUM_SLOTS, -1) != EMPTY).sum(axis=1)


class Call:
    def __init__(
        self,
        rows: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        ranks: Ranks,
        rank: int,
    ) -> None:
        self.rows, self.q_weight, self.k_weight = rows, q_weight, k_weight
        weights = (q_weight, k_weight)
        self.q, self.k = (
            torch.full((len(rows), len(weight)), 777.0, dtype=rows.dtype) for weight in weights
        )
        workspace: Any = SimpleNamespace(
            world_size=ranks.world_size,
            rank=rank,
            words_ptr=ranks.words[rank].ctypes.data,
            states_ptr=ranks.states[rank].ctypes.data,
            timeout_ns=ranks.timeout_ns,
        )
        q, k, _ = rows.split([*map(len, weights), rows.shape[1] - sum(map(len, weights))], 1)
        self.arguments = _arguments(workspace, (q, k), weights, (self.q, self.k), EPS)


def run(
    shape: Shape, tiling: Tiling, streams: list[list[Call]], workers: int = 2, seed: int = 0
) -> None:
    loaded, kind = library(shape, tiling), type(streams[0][0].arguments)

    def stream(index: int) -> None:
        calls = [call.arguments for call in streams[index]]
        blocks = [-(-call.num_tokens // tiling.block_teams) for call in calls]
        run_calls(loaded, (kind * len(calls))(*calls), blocks, workers, seed + index)

    together(stream, len(streams))


def exact(parts: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """RMSNorm in float64 over the ranks' parts side by side, given back to the ranks."""
    whole = torch.cat(parts, dim=-1).double()
    factor = torch.rsqrt(whole.square().mean(dim=-1, keepdim=True) + EPS)
    return [
        part.double() * factor * weight.double()
        for part, weight in zip(parts, weights, strict=True)
    ]
