"""The built-in tables: what was measured on H200s without multicast.

Microseconds a call in CUDA graphs of 32 chained calls, the slowest rank: runs of
``benchmarks/allreduce.py`` on torch 2.11, vLLM 0.32 and FlashInfer 0.7 (2026-11-22), the backends
that come first or second somewhere, and NCCL, in bfloat16; and with residual and norm, of
``benchmarks/fused_norm.py`` (2026-11-23).
"""

import msgspec

from vllm_commext.allreduce import names
from vllm_commext.allreduce.table.table import Row, Table
from vllm_commext.allreduce.table.tuning import build_rows, build_table

KIB, MIB = 1 << 10, 1 << 20
GPU = "NVIDIA H200"
DTYPE = "bfloat16"
ORIGIN = "built in"

_Figures = dict[int, tuple[float, ...]]
_COLUMNS = (names.FLASHINFER_ONE_SHOT, names.PUSH, names.CUSTOM, names.NCCL)
# size: of each column; 0 where it is above the backend's bound
_TWO: _Figures = {
    2 * KIB: (2.2, 2.7, 4.4, 5.8),
    16 * KIB: (2.4, 2.9, 4.5, 6.6),
    64 * KIB: (2.6, 3.1, 4.7, 7.0),
    128 * KIB: (2.8, 3.2, 4.9, 7.1),
    256 * KIB: (3.1, 3.6, 5.3, 8.3),
    512 * KIB: (4.0, 4.3, 6.4, 9.8),
    1 * MIB: (5.6, 5.8, 8.5, 13.7),
    2 * MIB: (9.8, 9.3, 12.8, 26.8),
    4 * MIB: (16.8, 15.1, 20.2, 32.0),
    8 * MIB: (33.3, 26.5, 0, 46.3),
    16 * MIB: (0, 50.5, 0, 76.3),
    32 * MIB: (0, 97.2, 0, 136.7),
    64 * MIB: (0, 190.2, 0, 245.9),
}
_FOUR: _Figures = {
    2 * KIB: (2.7, 4.1, 4.5, 8.9),
    16 * KIB: (2.9, 4.3, 4.7, 10.2),
    64 * KIB: (3.3, 4.5, 5.3, 10.6),
    128 * KIB: (3.9, 4.7, 5.8, 10.8),
    256 * KIB: (5.1, 5.1, 7.1, 11.0),
    512 * KIB: (7.5, 6.2, 10.6, 14.0),
    1 * MIB: (12.4, 7.9, 12.4, 17.6),
    2 * MIB: (23.1, 13.5, 18.0, 26.3),
    4 * MIB: (44.9, 22.2, 29.7, 39.6),
    8 * MIB: (86.5, 40.6, 0, 59.1),
    16 * MIB: (0, 78.4, 0, 97.0),
    32 * MIB: (0, 152.2, 0, 171.8),
    64 * MIB: (0, 299.1, 0, 319.6),
}
_MEASURED = {2: _TWO, 4: _FOUR}
# With residual and norm, of two GPUs: size, and for bfloat16, float16 and float32 our kernel, and
# `push` with vLLM's norm after it.
_FUSED_TWO: dict[int, tuple[tuple[float, float], ...]] = {
    16 * KIB: ((3.8, 5.2), (3.8, 5.1), (5.8, 6.9)),
    32 * KIB: ((4.0, 5.3), (4.0, 5.3), (5.9, 6.9)),
    64 * KIB: ((4.1, 5.5), (4.1, 5.5), (6.1, 7.2)),
    128 * KIB: ((4.3, 5.9), (4.3, 5.8), (6.3, 7.6)),
    256 * KIB: ((4.6, 6.3), (4.6, 6.2), (6.5, 8.1)),
    512 * KIB: ((5.4, 7.1), (5.3, 7.0), (7.1, 8.9)),
    1 * MIB: ((6.7, 8.5), (6.7, 8.5), (8.6, 10.3)),
    2 * MIB: ((9.7, 12.1), (9.7, 12.1), (11.5, 13.7)),
    4 * MIB: ((16.7, 19.3), (16.7, 19.3), (17.3, 20.0)),
    8 * MIB: ((28.8, 33.4), (28.7, 33.4), (30.7, 34.2)),
    16 * MIB: ((53.5, 66.0), (53.4, 66.0), (56.0, 70.3)),
    32 * MIB: ((101.1, 131.8), (100.8, 131.7), (103.3, 143.2)),
    64 * MIB: ((194.9, 258.0), (194.6, 257.8), (196.6, 280.8)),
    128 * MIB: ((381.6, 512.4), (381.0, 512.0), (382.4, 554.7)),
}
_FUSED_DTYPES = ("bfloat16", "float16", "float32")
_FUSED = {2: _FUSED_TWO}


def _fused_rows(world_size: int) -> dict[str, tuple[Row, ...]]:
    figures = _FUSED.get(world_size, {})
    return {
        dtype: build_rows(
            {size: dict(zip(names.FUSED, of[index], strict=True)) for size, of in figures.items()}
        )
        for index, dtype in enumerate(_FUSED_DTYPES)
        if figures
    }


def builtin_table(gpu: str, world_size: int) -> Table | None:
    """The table of that many GPUs of that name, or None where none was measured."""
    if gpu != GPU or world_size not in _MEASURED:
        return None
    times = {
        size: {name: time for name, time in zip(_COLUMNS, figures, strict=True) if time}
        for size, figures in _MEASURED[world_size].items()
    }
    table = build_table({DTYPE: times}, world_size, f"{ORIGIN}, {world_size} x {GPU}")
    return msgspec.structs.replace(table, fused=_fused_rows(world_size))
