"""The operation in plain PyTorch: for CPUs, where peers cannot be mapped, and for tests."""

from collections.abc import Callable

import torch

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def local_sums(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Sums of squares of each part's rows: float32, [tokens, number of parts]."""
    return torch.stack([part.float().square().sum(dim=-1) for part in parts], dim=-1)


def apply(
    part: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, count: int, eps: float
) -> torch.Tensor:
    """``part * rsqrt(total / count + eps) * weight`` in float32, returned in the part's type.

    Args:
        part: [tokens, size], a rank's shard of the rows.
        weight: [size], the same shard of the weights.
        total: [tokens], float32, sums of squares over all ranks.
        count: elements of a whole row, all ranks together.
        eps: added to the mean square.
    """
    factor = torch.rsqrt(total / count + eps).unsqueeze(-1)
    return (part.float() * factor * weight.float()).to(part.dtype)


def normalize(
    parts: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    world_size: int,
    eps: float,
    sum_over_ranks: SumOverRanks,
) -> tuple[torch.Tensor, ...]:
    """RMSNorm of each part over the elements that it has on all ranks together.

    Args:
        parts: each [tokens, size of the part], with the same number of tokens.
        weights: each [size of the part].
        world_size: ranks, all with parts of the same sizes. Heads that several ranks replicate
            count as often as they stand there, which leaves the mean as it is.
        eps: added to the mean square.
        sum_over_ranks: adds a float32 tensor [tokens, parts] over all ranks.

    Returns:
        New contiguous tensors of the parts' shapes and type.
    """
    totals = sum_over_ranks(local_sums(parts))
    return tuple(
        apply(part, weight, totals[:, i], weight.numel() * world_size, eps).contiguous()
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True))
    )
