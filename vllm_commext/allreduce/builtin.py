"""The built-in table: what was measured on H200s without multicast, bfloat16 only.

Microseconds a call in CUDA graphs of 32 chained calls, the slowest rank. Two ranks: a run of
``benchmarks/allreduce.py`` on torch 2.11, vLLM 0.32 and FlashInfer 0.7 (2026-11-22), the backends
that come first or second somewhere. Four ranks: an earlier measurement by hand on vLLM 0.26 without
FlashInfer; its symmetric two-shot times are of the form in place, on a buffer that held the message
already, and the copy into it is added here.
"""

from vllm_commext.allreduce import names
from vllm_commext.allreduce.table import Table
from vllm_commext.allreduce.tuning import build_table

KIB, MIB = 1 << 10, 1 << 20
GPU = "NVIDIA H200"
COPY_MICROSECONDS_PER_BYTE = 2.0 / (4 * MIB)
DTYPE = "bfloat16"
ORIGIN = "built in"

_Figures = dict[int, tuple[float, ...]]
# size: FlashInfer one-shot, our own kernel, vLLM's custom all-reduce, NCCL; 0: above its bound
_TWO: _Figures = {
    2 * KIB: (2.2, 3.9, 4.3, 5.9),
    16 * KIB: (2.4, 5.4, 4.5, 6.7),
    64 * KIB: (2.5, 5.4, 4.7, 7.0),
    256 * KIB: (3.2, 6.0, 5.3, 8.3),
    512 * KIB: (4.0, 6.8, 6.4, 9.8),
    1 * MIB: (5.6, 8.4, 8.5, 13.6),
    2 * MIB: (9.8, 11.4, 12.6, 26.7),
    4 * MIB: (17.1, 17.9, 19.9, 31.9),
    8 * MIB: (33.4, 29.9, 0, 46.0),
    16 * MIB: (0, 54.2, 0, 76.5),
    32 * MIB: (0, 101.7, 0, 136.1),
    64 * MIB: (0, 196.0, 0, 244.8),
}
_TWO_NAMES = (names.FLASHINFER_ONE_SHOT, names.PUSH, names.CUSTOM, names.NCCL)
# size: NCCL, vLLM's custom all-reduce (0: above its bound), symmetric one-shot, two-shot
_FOUR: _Figures = {
    16 * KIB: (18.7, 6.4, 9.0, 9.0),
    64 * KIB: (14.8, 5.7, 9.3, 10.5),
    256 * KIB: (12.7, 8.5, 12.0, 10.6),
    512 * KIB: (16.1, 10.9, 13.8, 10.5),
    1 * MIB: (19.0, 13.2, 19.2, 14.4),
    2 * MIB: (35.3, 19.1, 29.7, 18.9),
    4 * MIB: (45.6, 35.7, 50.8, 29.2),
    8 * MIB: (71.2, 0, 95.0, 56.3),
    16 * MIB: (98.5, 0, 175.1, 97.9),
    64 * MIB: (331.3, 0, 0, 338.8),
}
_FOUR_NAMES = (names.NCCL, names.CUSTOM, names.SYMM_ONE_SHOT, names.SYMM_TWO_SHOT)


_MEASURED = {2: (_TWO_NAMES, _TWO), 4: (_FOUR_NAMES, _FOUR)}


def _times(size: int, columns: tuple[str, ...], figures: tuple[float, ...]) -> dict[str, float]:
    copy = size * COPY_MICROSECONDS_PER_BYTE
    return {
        name: time + (copy if name in names.SYMMETRIC else 0)
        for name, time in zip(columns, figures, strict=True)
        if time
    }


def builtin_table(gpu: str, world_size: int) -> Table | None:
    """The table of that many GPUs of that name, or None where none was measured."""
    if gpu != GPU or world_size not in _MEASURED:
        return None
    columns, measured = _MEASURED[world_size]
    times = {size: _times(size, columns, figures) for size, figures in measured.items()}
    return build_table({DTYPE: times}, world_size, f"{ORIGIN}, {world_size} x {GPU}")
