"""The built-in table: what was measured by hand on H200s without multicast, bfloat16 only.

Microseconds a call in CUDA graphs of 32 chained calls, the slowest rank, on torch 2.11 and vLLM
0.26. Those of the symmetric two-shot kernel are of its form in place, on a buffer that held the
message already; the copy into it is added here. The form that writes a fresh output was not timed.
"""

from vllm_commext.allreduce import names
from vllm_commext.allreduce.table import Table
from vllm_commext.allreduce.tuning import build_table

KIB, MIB = 1 << 10, 1 << 20
GPU = "NVIDIA H200"
COPY_MICROSECONDS_PER_BYTE = 2.0 / (4 * MIB)
DTYPE = "bfloat16"

# size: NCCL, vLLM's custom all-reduce (0: above its bound), symmetric one-shot, two-shot
_FIGURES: dict[int, dict[int, tuple[float, float, float, float]]] = {
    2: {
        16 * KIB: (7.0, 4.5, 6.8, 6.9),
        64 * KIB: (7.5, 4.6, 7.1, 7.6),
        256 * KIB: (8.8, 5.2, 8.5, 7.6),
        512 * KIB: (10.4, 6.4, 10.3, 8.0),
        1 * MIB: (14.0, 8.4, 13.5, 10.4),
        4 * MIB: (32.3, 20.0, 31.1, 20.3),
        16 * MIB: (76.4, 0, 101.3, 58.1),
        64 * MIB: (245.8, 0, 0, 212.9),
    },
    4: {
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
    },
}
_COLUMNS = (names.NCCL, names.CUSTOM, names.SYMM_ONE_SHOT, names.SYMM_TWO_SHOT)


def _times(size: int, figures: tuple[float, float, float, float]) -> dict[str, float]:
    copy = size * COPY_MICROSECONDS_PER_BYTE
    return {
        name: time + (copy if name in names.SYMMETRIC else 0)
        for name, time in zip(_COLUMNS, figures, strict=True)
        if time
    }


def builtin_table(gpu: str, world_size: int) -> Table | None:
    """The table of that many GPUs of that name, or None where none was measured."""
    if gpu != GPU or world_size not in _FIGURES:
        return None
    times = {size: _times(size, figures) for size, figures in _FIGURES[world_size].items()}
    return build_table({DTYPE: times}, world_size, f"built in, {world_size} x {GPU}")
