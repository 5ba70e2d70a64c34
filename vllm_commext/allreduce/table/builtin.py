"""The built-in tables: what was measured on H200s and H100s without multicast.

Microseconds a call in CUDA graphs of 32 chained calls, the slowest rank: runs of
``benchmarks/allreduce.py`` on torch 2.11, vLLM 0.32 and FlashInfer 0.7 (2026-11-22), the backends
that come first or second somewhere, and NCCL, in bfloat16; and with residual and norm, of
``benchmarks/fused_norm.py`` (2026-11-23).
"""

from collections.abc import Callable

import msgspec

from vllm_commext.allreduce import names
from vllm_commext.allreduce.table.table import Row, Table, build_rows, build_table

KIB, MIB = 1 << 10, 1 << 20
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
DTYPE = "bfloat16"
ORIGIN = "built in"
IN_ENGINES = frozenset({(H100, 2)})
"""GPUs and how many, on which an engine with our kernels was faster in all that was measured.  With
two H200s it was not at one request."""

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
# With residual and norm, in the order of `names.FUSED`: our kernel, FlashInfer's, which takes no
# float32, and `push` with vLLM's norm after it.
_FUSED_H200: dict[str, _Figures] = {
    "bfloat16": {
        16 * KIB: (3.8, 5.2, 5.2),
        32 * KIB: (4.0, 5.3, 5.3),
        64 * KIB: (4.1, 5.5, 5.5),
        128 * KIB: (4.3, 5.7, 5.9),
        256 * KIB: (4.6, 6.1, 6.3),
        512 * KIB: (5.4, 6.8, 7.1),
        1 * MIB: (6.7, 8.5, 8.5),
        2 * MIB: (9.7, 11.2, 12.1),
        4 * MIB: (16.7, 18.4, 19.3),
        8 * MIB: (28.8, 38.3, 33.4),
        16 * MIB: (53.5, 78.5, 66.0),
        32 * MIB: (101.1, 153.4, 131.8),
        64 * MIB: (194.9, 315.0, 258.0),
        128 * MIB: (381.6, 0, 512.4),
    },
    "float16": {
        16 * KIB: (3.8, 4.7, 5.1),
        32 * KIB: (4.0, 5.1, 5.3),
        64 * KIB: (4.1, 5.3, 5.5),
        128 * KIB: (4.3, 5.5, 5.8),
        256 * KIB: (4.6, 5.9, 6.2),
        512 * KIB: (5.3, 6.6, 7.0),
        1 * MIB: (6.7, 8.2, 8.5),
        2 * MIB: (9.7, 11.0, 12.1),
        4 * MIB: (16.7, 18.1, 19.3),
        8 * MIB: (28.7, 38.0, 33.4),
        16 * MIB: (53.4, 78.1, 66.0),
        32 * MIB: (100.8, 152.4, 131.7),
        64 * MIB: (194.6, 314.7, 257.8),
        128 * MIB: (381.0, 0, 512.0),
    },
    "float32": {
        16 * KIB: (5.8, 0, 6.9),
        32 * KIB: (5.9, 0, 6.9),
        64 * KIB: (6.1, 0, 7.2),
        128 * KIB: (6.3, 0, 7.6),
        256 * KIB: (6.5, 0, 8.1),
        512 * KIB: (7.1, 0, 8.9),
        1 * MIB: (8.6, 0, 10.3),
        2 * MIB: (11.5, 0, 13.7),
        4 * MIB: (17.3, 0, 20.0),
        8 * MIB: (30.7, 0, 34.2),
        16 * MIB: (56.0, 0, 70.3),
        32 * MIB: (103.3, 0, 143.2),
        64 * MIB: (196.6, 0, 280.8),
        128 * MIB: (382.4, 0, 554.7),
    },
}
# Two H100s in place, from `vllm-commext tune allreduce` (2026-11-24): each has the norm in it.
_IN_PLACE_H100: _Figures = {
    2 * KIB: (5.0, 4.7, 6.7, 8.4, 3.1, 3.7),
    4 * KIB: (5.1, 4.9, 6.8, 8.5, 3.3, 5.0),
    8 * KIB: (5.7, 5.6, 7.4, 10.3, 3.8, 5.6),
    16 * KIB: (7.3, 6.5, 8.7, 12.2, 4.4, 6.8),
    32 * KIB: (7.5, 6.7, 9.1, 12.4, 4.8, 7.2),
    64 * KIB: (7.9, 6.9, 9.4, 12.6, 5.0, 7.6),
    128 * KIB: (8.3, 7.2, 9.8, 13.0, 5.3, 7.9),
    256 * KIB: (9.0, 7.7, 10.3, 14.3, 5.7, 8.9),
    512 * KIB: (10.6, 8.7, 11.7, 16.1, 6.4, 10.1),
    1 * MIB: (13.7, 10.8, 14.1, 20.4, 8.4, 13.2),
    2 * MIB: (20.2, 15.9, 19.7, 39.2, 12.5, 18.7),
    4 * MIB: (30.4, 25.7, 30.5, 47.7, 21.6, 27.3),
    8 * MIB: (46.5, 38.8, 0, 62.5, 31.6, 45.4),
    16 * MIB: (0, 71.9, 0, 101.7, 53.6, 0),
    32 * MIB: (0, 144.3, 0, 184.0, 100.1, 0),
    64 * MIB: (0, 279.3, 0, 337.3, 190.3, 0),
}


def _without_gaps(figures: _Figures, columns: tuple[str, ...]) -> dict[int, dict[str, float]]:
    return {
        size: {name: time for name, time in zip(columns, times, strict=True) if time}
        for size, times in figures.items()
    }


def builtin_table(gpu: str, world_size: int) -> Table | None:
    """The table of that many GPUs of that name, or None where none was measured."""
    made = _MADE.get((gpu, world_size))
    return made() if made is not None else None


def _h200(world_size: int) -> Table:
    times = _without_gaps(_MEASURED[world_size], _COLUMNS)
    table = build_table({DTYPE: times}, world_size, f"{ORIGIN}, {world_size} x {H200}")
    fused = _FUSED_H200 if world_size == 2 else {}
    return msgspec.structs.replace(table, fused=_fused_rows(fused))


def _h100() -> Table:
    columns = (*_COLUMNS, names.FUSED_PUSH, names.FUSED_FLASHINFER)
    times = _without_gaps(_IN_PLACE_H100, columns)
    return build_table({DTYPE: times}, 2, f"{ORIGIN}, 2 x {H100}")


def _fused_rows(figures: dict[str, _Figures]) -> dict[str, tuple[Row, ...]]:
    return {dtype: build_rows(_without_gaps(of, names.FUSED)) for dtype, of in figures.items()}


_MADE: dict[tuple[str, int], Callable[[], Table]] = {
    (H200, 2): lambda: _h200(2),
    (H200, 4): lambda: _h200(4),
    (H100, 2): _h100,
}
