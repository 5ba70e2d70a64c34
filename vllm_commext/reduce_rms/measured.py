"""Where the op was measured faster than what vLLM does without it, at every number of tokens, in
CUDA graphs: ``benchmarks/reduce_rms.py``, results of 2026-11-22, and
``benchmarks/spread_norms.py``, of 2026-11-24. `GATED` was faster up to 256 tokens and slower from
1024 on, and so is nowhere.
"""

# What vLLM does without the op.
FUSED = "vLLM's fused op"  # MiniMax-M2: Q and K in one launch of vLLM's own
GATHERED = "gathered Q and K"  # whole rows on every rank, normalised and thrown away but for a part
GATED = "a gated norm"  # Mamba2 with one group: a sum of squares, an all-reduce, the rest
KINDS = (FUSED, GATHERED, GATED)

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
_FASTER: dict[tuple[str, str], tuple[int, ...]] = {(FUSED, H200): (2, 4), (GATHERED, H100): (2,)}
_DTYPES = ("bfloat16",)


def is_faster(kind: str, gpu: str, world_size: int, dtype: str) -> bool:
    """Return whether the op was measured faster there than `kind`, one of `KINDS`."""
    return dtype in _DTYPES and world_size in _FASTER.get((kind, gpu), ())
