"""What a state-space layer keeps, as parts that tensor parallelism deals out separately.

The convolution's state holds the inputs of several projections side by side, each dealt out by
itself: x, B and C of Mamba2, the queries, keys and values of a gated delta net. A rank that reads
from an engine of another tensor-parallel size therefore needs a slice of each, and one of the
recurrent state, which is the fourth part. Where there are fewer groups than ranks, B and C are
replicated like KV heads: every rank that shares a group holds all of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import StatePart

MAMBA1, MAMBA2, GATED_DELTA_NET, SHORT_CONV = "mamba1", "mamba2", "gdn", "short_conv"


@dataclass(frozen=True)
class Projection:
    """Heads, groups or channels of one projection in a rank's convolution state."""

    name: str
    num_units: int
    unit_channels: int


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a rank's state, as vLLM describes it.

    The shape is without the block dimension; a convolution's is (channels, length) or, where
    ``dim_first`` is not set, (length, channels)."""

    shape: tuple[int, ...]
    item_bytes: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


def derive_mamba_conv_split(
    kind: str, num_channels: int, recurrent_shape: Sequence[int]
) -> tuple[Projection, ...]:
    """The projections in a rank's convolution state, in their order.

    Args:
        num_channels: channels of the rank's convolution state.
        recurrent_shape: the rank's recurrent state: (heads, head_dim, state_size) of Mamba2,
            (value heads, value head_dim, key head_dim) of a gated delta net, (channels, state_size)
            of Mamba1; empty for a short convolution.

    Raises:
        UnsupportedError: the sizes do not fit the kind.
    """
    if kind == SHORT_CONV:
        return (Projection("conv", num_channels, 1),)
    if kind == MAMBA1:
        _expect(kind, num_channels == recurrent_shape[0], num_channels, recurrent_shape)
        return (Projection("x", num_channels, 1),)
    num_heads, head_dim, unit = recurrent_shape
    rest, odd = divmod(num_channels - num_heads * head_dim, 2)
    _expect(kind, rest > 0 and not odd and rest % unit == 0, num_channels, recurrent_shape)
    heads = (num_heads, head_dim)
    pair = (rest // unit, unit)
    if kind == MAMBA2:
        return Projection("x", *heads), Projection("B", *pair), Projection("C", *pair)
    return Projection("q", *pair), Projection("k", *pair), Projection("v", *heads)


def state_parts(
    kind: str,
    tensors: Sequence[StateTensor],
    *,
    dim_first: bool,
    tp_size: int,
    num_groups: int | None = None,
    replicated: bool = False,
) -> tuple[StatePart, ...]:
    """The parts of a rank's state, whose tensors follow one another in the block.

    Args:
        tensors: convolution state, then the recurrent one where there is one.
        dim_first: the convolution's channels come first (vLLM's "DS" layout).
        tp_size: tensor-parallel ranks of the engine.
        num_groups: groups of B and C in the whole model, None where the model does not say; more
            ranks than groups then count as a group a rank.
        replicated: every rank holds the whole state.

    Raises:
        UnsupportedError: the sizes do not fit the kind or cannot be dealt out to the ranks.
    """
    conv, *recurrent = tensors
    num_shards = 1 if replicated else tp_size
    if len(recurrent) != (kind != SHORT_CONV) or len(conv.shape) != 2:
        shapes = [tensor.shape for tensor in tensors]
        raise UnsupportedError(f"a state of kind {kind!r} with tensors {shapes} is not known")
    num_channels, length = conv.shape if dim_first else conv.shape[::-1]
    shape = recurrent[0].shape if recurrent else ()
    parts: list[StatePart] = []
    channel = 0
    for one in derive_mamba_conv_split(kind, num_channels, shape):
        bytes_a_channel = conv.item_bytes * (length if dim_first else 1)
        parts.append(
            StatePart(
                name=one.name,
                dtype=conv.dtype,
                offset=channel * bytes_a_channel,
                num_units=_total(one, num_shards, num_groups),
                replicated=replicated,
                unit_bytes=one.unit_channels * bytes_a_channel,
                num_runs=1 if dim_first else length,
                run_stride=0 if dim_first else num_channels * conv.item_bytes,
            )
        )
        channel += one.num_units * one.unit_channels
    for tensor in recurrent:
        unit_bytes = tensor.num_bytes // tensor.shape[0]
        total = tensor.shape[0] * num_shards
        parts.append(StatePart("ssm", tensor.dtype, conv.num_bytes, total, replicated, unit_bytes))
    return tuple(parts)


def _total(one: Projection, num_shards: int, num_groups: int | None) -> int:
    if one.name not in ("B", "C") or num_groups is None:
        return one.num_units * num_shards
    held = max(1, num_groups // num_shards)
    if one.num_units != held:
        raise UnsupportedError(
            f"expected {held} groups of {one.name} on each of {num_shards} ranks, as the model has "
            f"{num_groups}, got {one.num_units}"
        )
    return num_groups


def compute_mamba_phys_ratio(state_bytes: int, row_bytes: int) -> int:
    """Kernel blocks of an attention layer that one state takes in a shared block."""
    return -(-state_bytes // row_bytes)


def _expect(kind: str, good: bool, num_channels: int, shape: Sequence[int]) -> None:
    if not good:
        raise UnsupportedError(
            f"a convolution state of {num_channels} channels beside a recurrent state of shape "
            f"{tuple(shape)} does not fit a layer of kind {kind!r}"
        )
