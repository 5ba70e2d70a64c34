"""Strategies of hypothesis: any two engines of any model that they can serve."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tests.unit.nixl.cluster_cases import PAIRS, Case, case_of, random_span
from tests.unit.nixl.reference_cache import Attention, Engine, Group, State

TP_SIZES = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
ROW_TOKENS = (1, 2, 3, 4, 6)
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SHARED_ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
Shapes = tuple[tuple[int, int], tuple[int, int]]
"""(tokens of a kernel block, kernel blocks of a block) of the prefill and the decode engine."""


def fits(num_units: int, tp_size: int) -> bool:
    return num_units % tp_size == 0 or tp_size % num_units == 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(
        st.sampled_from(PAIRS) | st.tuples(st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES))
    )
    model = tuple(draw(st.lists(groups(sizes), min_size=1, max_size=3)))
    shared = draw(st.booleans()), draw(st.booleans())
    tokens = [draw(block_shapes(group)) for group in model]
    prefill, decode = (
        Engine(
            tp_size=sizes[side],
            num_blocks=0,
            block_sizes=tuple(shapes[side][0] * shapes[side][1] for shapes in tokens),
            rows_per_block=tuple(shapes[side][1] for shapes in tokens),
            order=draw(st.sampled_from(_orders(model, shared[side], tokens, side))),
            padding=draw(st.sampled_from((0, 0, 1, 3))),
            shared=shared[side],
        )
        for side in (0, 1)
    )
    dim_first = draw(st.booleans())
    prefill, decode = (replace(one, dim_first=dim_first) for one in (prefill, decode))
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    spans = [random_span(model, prefill, decode, dice) for _ in range(draw(st.integers(1, 2)))]
    return case_of(model, prefill, decode, spans, dice)


def _orders(model: Sequence[Group], shared: bool, tokens: Sequence[Shapes], side: int) -> list[str]:
    """Kernel blocks of groups that lie over one another need a layer's blocks side by side, and a
    head's row must be one run where its tokens are not apart."""
    orders = ORDERS
    if shared:
        orders = SHARED_ORDERS[: 2 if any(one[side][1] > 1 for one in tokens) else 4]
    packed = any(_is_packed(group) for group in model)
    return [order for order in orders if not (packed and order.endswith("NHC"))]


def _is_packed(group: Group) -> bool:
    return any(isinstance(one, Attention) and one.packed for one in group.layers)


@st.composite
def block_shapes(draw: st.DrawFn, group: Group) -> tuple[tuple[int, int], tuple[int, int]]:
    """(tokens of a kernel block, kernel blocks of a block) of both engines."""
    if group.kind == "state":
        size = st.tuples(st.integers(1, 8), st.just(1))
        return draw(size), draw(size)
    row_tokens, rows = draw(st.sampled_from(ROW_TOKENS)), draw(st.integers(1, 3))
    if _is_packed(group):
        other = rows if group.kind == "window" else draw(st.integers(1, 3))
        return (row_tokens, rows), (row_tokens, other)
    if group.kind == "window":
        size = row_tokens * rows
        other = draw(st.sampled_from([one for one in range(1, 4) if size % one == 0]))
        return (row_tokens, rows), (size // other, other)
    other_tokens = row_tokens if draw(st.booleans()) else draw(st.sampled_from(ROW_TOKENS))
    return (row_tokens, rows), (other_tokens, draw(st.integers(1, 3)))


@st.composite
def groups(draw: st.DrawFn, sizes: tuple[int, int]) -> Group:
    """Any group that engines of these sizes can serve."""
    kind = draw(st.sampled_from(("full", "full", "window", "state", "state")))
    if kind == "state":
        return Group(kind, (draw(states(sizes)),) * draw(st.integers(1, 3)))
    heads = [num for num in HEADS if all(fits(num, size) for size in sizes)]
    packed = draw(st.sampled_from((False, False, True)))
    kinds = [draw(attention(heads, packed)) for _ in range(draw(st.integers(1, 2)))]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    return Group(kind, tuple(layers))


@st.composite
def attention(draw: st.DrawFn, heads: Sequence[int], packed: bool) -> Attention:
    """A layer with one of these numbers of heads, or a latent one."""
    latent = draw(st.sampled_from((False, False, False, True)))
    return Attention(
        num_heads=1 if latent else draw(st.sampled_from(heads)),
        token_bytes=draw(st.integers(1, 3)),
        num_planes=1 if latent else draw(st.integers(1, 2)),
        latent=latent,
        packed=packed,
    )


@st.composite
def states(draw: st.DrawFn, sizes: tuple[int, int]) -> State:
    """Any state that engines of these sizes can serve; heads are always dealt out."""
    share = math.lcm(*sizes)
    kind = draw(st.sampled_from(("mamba1", "mamba2", "mamba2", "gdn", "short_conv")))
    num_heads = share * draw(st.integers(1, 2))
    num_groups = 1
    if kind == "mamba2":
        num_groups = draw(
            st.sampled_from([n for n in (1, 2, 4, 8) if all(fits(n, size) for size in sizes)])
        )
    elif kind == "gdn":
        num_groups, num_heads = share, num_heads
    channels = kind in ("mamba1", "short_conv")
    return State(
        kind,
        num_heads,
        head_dim=1 if channels else draw(st.integers(1, 3)),
        num_groups=num_groups,
        state_size=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 4)),
        conv_item=draw(st.sampled_from((1, 2))),
        ssm_item=draw(st.sampled_from((1, 2, 4))),
        replicated=draw(st.sampled_from((False, False, False, True))),
    )
