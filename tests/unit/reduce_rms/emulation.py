"""Ranks of the kernel on a CPU: the kernel's own source, compiled for the host."""

import ctypes
import functools

import numpy as np
import torch

from tests.kit.host_kernels import compile_kernel, run_calls
from tests.kit.threads import together
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.kernel import PROGRAM, Failure, Shape, Tiling, make_arguments

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
        q_size, k_size = q_weight.numel(), k_weight.numel()
        tokens = rows.shape[0]
        self.rows, self.q_weight, self.k_weight = rows, q_weight, k_weight
        self.q = torch.full((tokens, q_size), 777.0, dtype=rows.dtype)
        self.k = torch.full((tokens, k_size), 777.0, dtype=rows.dtype)
        self.arguments = make_arguments(
            q=rows.data_ptr(),
            k=rows.data_ptr() + q_size * rows.element_size(),
            q_weight=q_weight.data_ptr(),
            k_weight=k_weight.data_ptr(),
            q_out=self.q.data_ptr(),
            k_out=self.k.data_ptr(),
            workspace=ranks.words[rank].ctypes.data,
            states=ranks.states[rank].ctypes.data,
            rank=rank,
            q_stride=rows.stride(0),
            k_stride=rows.stride(0),
            timeout_ns=ranks.timeout_ns,
            num_tokens=tokens,
            q_scale=1.0 / (q_size * ranks.world_size),
            k_scale=1.0 / (max(k_size, 1) * ranks.world_size),
            eps=EPS,
        )


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
