"""How few descriptors a plan takes, and what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.nixl.cluster_cases import Model
from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, State
from tests.unit.nixl.reference_layout import describe
from vllm_commext.errors import ProtocolError, UnsupportedError
from vllm_commext.nixl.geometry.plan import MAX_DESCRIPTORS, Blocks, ReadPlan, plan_read

Ids = Sequence[Sequence[int]]
ONE = Engine(1, 5, (8,), (1,))
FOUR_HEADS: Model = (Group("full", (Attention(4, 2),) * 3),)


def plan_of(
    model: Model, prefill: Engine, decode: Engine, ranks: tuple[int, int] = (0, 0)
) -> ReadPlan:
    local, remote = (
        describe(Cache(model, engine), rank)
        for engine, rank in zip((decode, prefill), ranks, strict=True)
    )
    return plan_read(local, remote, local_device=0, remote_device=0)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_lanes", "cell_tokens", "num_bytes"),
    [
        pytest.param({}, {}, 3, 8, 64, id="alike"),
        pytest.param({"rows": 2}, {"rows": 2}, 3, 8, 64, id="blocks of several rows"),
        pytest.param({"rows": 2}, {"rows": 4}, 12, 2, 4, id="rows of two sizes"),
        pytest.param({"order": "LBNHC"}, {}, 12, 1, 2, id="tokens outermost on one side"),
        pytest.param({"tp_size": 2}, {}, 3, 8, 32, id="two to one"),
        pytest.param(
            {"tp_size": 2, "order": "LBNHC"}, {"order": "LBNHC"}, 3, 1, 4, id="tokens, two to one"
        ),
        pytest.param({"padding": 8}, {"padding": 8}, 3, 8, 64, id="padded"),
        pytest.param({"rows": 2, "padding": 8}, {"rows": 2}, 3, 4, 32, id="rows padded"),
    ],
)
def test_lanes_are_as_long_as_both_sides_allow(
    prefill: dict[str, Any],
    decode: dict[str, Any],
    num_lanes: int,
    cell_tokens: int,
    num_bytes: int,
) -> None:
    def engine(tp_size: int = 1, rows: int = 1, order: str = "LBHNC", padding: int = 0) -> Engine:
        return Engine(tp_size, 5, (8,), (rows,), order=order, padding=padding)

    plan = plan_of(FOUR_HEADS, engine(**prefill), engine(**decode))
    (section,) = plan.sections
    assert (section.num_lanes, section.cell_tokens) == (num_lanes, cell_tokens)
    for rows in (plan.local_rows, plan.remote_rows):
        assert set(rows[:, 1].tolist()) == {num_bytes}
    assert section.cell_bytes == num_lanes * num_bytes


def test_neighbouring_layers_are_one_descriptor_whatever_the_order_of_names() -> None:
    model: Model = (Group("full", (Attention(4, 2),) * 12),)
    engine = replace(ONE, order="BLHNC")
    plan = plan_of(model, engine, engine)
    assert plan.local.families[0].names[:3] == ["layers.0", "layers.1", "layers.10"]
    assert (plan.sections[0].num_lanes, plan.sections[0].cell_bytes) == (1, 12 * 64)


def test_a_whole_state_is_one_descriptor_and_a_slice_is_one_a_part() -> None:
    model = (Group("state", (State("mamba2", 8, 2, 4, 3),) * 2),)
    whole = plan_of(model, Engine(2, 5, (8,), (1,)), Engine(2, 5, (8,), (1,)))
    assert whole.sections[0].num_lanes == 2
    sliced = plan_of(model, Engine(2, 5, (8,), (1,)), Engine(1, 5, (8,), (1,)))
    assert sliced.sections[0].num_lanes == 2 * 4
    by_position = plan_of(
        model, Engine(2, 5, (8,), (1,), dim_first=False), Engine(1, 5, (8,), (1,), dim_first=False)
    )
    assert by_position.sections[0].num_lanes == 2 * (3 * 3 + 1)


def test_pairs_come_in_the_order_of_the_remote_blocks() -> None:
    plan = plan_of(FOUR_HEADS, Engine(1, 9, (2,), (1,)), Engine(1, 9, (2,), (1,)))
    pairs = plan.pairs([Blocks(0, [5, 6, 7])], [[8, 1, 3]], num_tokens=6, num_remote_tokens=6)
    assert (pairs.local.dtype, pairs.remote.dtype) == (np.int32, np.int32)
    assert pairs.remote.tolist() == [lane * 9 + block for lane in range(3) for block in (1, 3, 8)]
    assert pairs.local.tolist() == [lane * 9 + block for lane in range(3) for block in (6, 7, 5)]
    assert pairs.num_bytes == 3 * 3 * 16


def test_devices_stand_in_the_descriptors() -> None:
    layout = describe(Cache(FOUR_HEADS, Engine(1, 5, (8,), (1,))), 0)
    plan = plan_read(layout, layout, local_device=3, remote_device=5)
    assert set(plan.local_rows[:, 2].tolist()) == {3}
    assert set(plan.remote_rows[:, 2].tolist()) == {5}


# What a request may not ask for.

NUM_LOCAL, NUM_REMOTE = 20, 30
TWO_KINDS: Model = (Group("full", (Attention(2, 2),)), Group("state", (State("mamba1", 4),)))


def pairs(
    remote: Ids,
    *,
    local: Sequence[int] = (1, 2, 3),
    first: int = 0,
    states: Sequence[int] = (9,),
    num_tokens: int = 11,
    num_remote_tokens: int = 11,
) -> None:
    """Three blocks of four tokens and a state."""
    prefill, decode = (Engine(1, num, (4, 4), (1, 1)) for num in (NUM_REMOTE, NUM_LOCAL))
    plan_of(TWO_KINDS, prefill, decode).pairs(
        [Blocks(first, local), Blocks(2, states)],
        remote,
        num_tokens=num_tokens,
        num_remote_tokens=num_remote_tokens,
    )


def test_what_fits_is_accepted() -> None:
    pairs([[4, 5, 6], [7]])
    pairs([[4, 5, 6], [7]], local=[2, 3], first=1)
    pairs([[5, 6], [7]], local=[2, 3], first=1)
    pairs([[4, 5, 6, 7], [7]], num_remote_tokens=13)
    pairs([[], [7]], local=[], first=3)
    pairs([[4, 5, 6, 8], [7]], local=[], first=3)  # of which nothing is read
    pairs([[NUM_REMOTE - 1, 0, 5], [7]], local=[NUM_LOCAL - 1, 0, 5])


@pytest.mark.parametrize(
    ("remote", "changes", "message"),
    [
        ([[4, 5, 6]], {}, "have 1 groups of blocks, expected 2"),
        ([[4, 5, 6], [7], []], {}, "have 3 groups of blocks, expected 2"),
        ([[5, 6], [7]], {}, "prefill engine offers 2 blocks of 4 tokens, from token 4 on"),
        ([[], [7]], {}, "offers 0 blocks .*; expected those of the tokens from 0 to 10"),
        ([[4, 5, 6, 8], [7]], {}, "the prefill engine offers 4 blocks of 4 tokens, from token -4"),
        ([[4, 5], [7]], {"num_remote_tokens": 8}, "offers 2 blocks of 4 tokens, from token 0 on"),
        ([[4, 5, 6], [7]], {"num_remote_tokens": 1 << 70}, "the prefill engine offers"),
        ([[4, 5, 6], [7]], {"num_remote_tokens": -40}, "the prefill engine offers"),
        ([[4, 5, 6], [7]], {"local": (1, 2)}, "the decode engine offers 2 blocks .* token 0 on"),
        ([[4, 5, 6], []], {}, "offers 0 states, the decode engine needs 1"),
        ([[4, 5, 6], [7, 8]], {}, "offers 2 states, the decode engine needs 1"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    remote: Ids, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        pairs(remote, **changes)


@pytest.mark.parametrize("block", [-1, NUM_REMOTE, 1 << 40, 1 << 63, 1 << 64, -(1 << 70)])
def test_remote_ids_outside_the_cache_are_refused(block: int) -> None:
    for remote in ([[4, block, 6], [7]], [[4, 5, 6], [block]]):
        with pytest.raises(ProtocolError, match="remote block ids run from .* expected 0 to 29"):
            pairs(remote)


@pytest.mark.parametrize("block", [-1, NUM_LOCAL, 1 << 40, 1 << 64])
def test_local_ids_outside_the_cache_are_refused(block: int) -> None:
    with pytest.raises(ProtocolError, match="local block ids run from .* expected 0 to 19"):
        pairs([[4, 5, 6], [7]], local=[block, 2, 3])
    with pytest.raises(ProtocolError, match="local block ids"):
        pairs([[4, 5, 6], [7]], states=[block])


# Engines that do not fit each other.


def test_other_kinds_of_groups_are_refused() -> None:
    window: Model = (replace(FOUR_HEADS[0], kind="window"),)
    local, remote = (describe(Cache(model, ONE), 0) for model in (FOUR_HEADS, window))
    with pytest.raises(UnsupportedError, match="'full' in the decode engine, 'window' in"):
        plan_read(local, remote, local_device=0, remote_device=0)


def test_windows_need_the_same_block_size() -> None:
    window: Model = (replace(FOUR_HEADS[0], kind="window"),)
    with pytest.raises(UnsupportedError, match="got 4 in the decode engine and 8 in the prefill"):
        plan_of(window, ONE, replace(ONE, block_sizes=(4,)))
    assert len(plan_of(window, ONE, replace(ONE, rows_per_block=(4,))).sections) == 1


def test_as_many_descriptors_as_an_index_can_count_are_accepted_and_no_more() -> None:
    one, two = (Group("full", (Attention(4, 2),) * count) for count in (1, 2))
    most = replace(ONE, num_blocks=(1 << 31) - 1)
    assert plan_of((one,), most, most).local_rows[:, 4].tolist() == [MAX_DESCRIPTORS]
    half = replace(ONE, num_blocks=1 << 30)
    with pytest.raises(UnsupportedError, match="2147483648 descriptors .* at most 2147483647"):
        plan_of((two,), half, half)


def test_a_row_of_countless_cells_is_refused_before_anything_is_made_of_it() -> None:
    local = describe(Cache(FOUR_HEADS, ONE), 0)
    tokens = 1 << 39
    geometry = msgspec.structs.replace(
        local.families[0].geometry, row_tokens=tokens, head_stride=2 * tokens
    )
    families = [msgspec.structs.replace(local.families[0], geometry=geometry)]
    groups = [msgspec.structs.replace(local.groups[0], block_size=tokens)]
    remote = msgspec.structs.replace(local, families=families, groups=groups)
    with pytest.raises(UnsupportedError, match="descriptors are needed"):
        plan_read(local, remote, local_device=0, remote_device=0)
