"""Which prefill ranks hold the KV heads that a decode rank needs, by head intervals.

With K heads over N tensor-parallel ranks, rank r holds the heads ``[r*K//N, (r+1)*K//N)``; where N
exceeds K, vLLM replicates each head over N/K ranks, so that rank r holds the one head ``r*K//N``.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_commext.errors import UnsupportedError


@dataclass(frozen=True)
class RankShape:
    """One rank's place in its engine.

    Attributes:
        tp_size: tensor-parallel ranks of the engine.
        tp_rank: this rank, from 0.
        num_kv_heads: KV heads of the whole model, before the split.
        replicated: every rank holds the same cache (multi-head latent attention).
    """

    tp_size: int
    tp_rank: int
    num_kv_heads: int
    replicated: bool = False


def head_interval(shape: RankShape) -> tuple[int, int]:
    """The KV heads ``[first, end)`` that the rank holds."""
    if shape.replicated:
        return 0, shape.num_kv_heads
    first = shape.tp_rank * shape.num_kv_heads // shape.tp_size
    end = (shape.tp_rank + 1) * shape.num_kv_heads // shape.tp_size
    return first, max(end, first + 1)


def source_rank(local: RankShape, remote_tp_size: int) -> int:
    """The remote rank whose whole blocks the local rank reads.

    Raises:
        UnsupportedError: the two engines split the heads differently.
    """
    if remote_tp_size != local.tp_size:
        raise UnsupportedError(
            f"the prefill engine has tensor-parallel size {remote_tp_size} and the decode engine "
            f"{local.tp_size}: start both with the same --tensor-parallel-size"
        )
    return local.tp_rank
