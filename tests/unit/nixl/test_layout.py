"""Descriptions of caches: what they say of themselves, and which ones are refused."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.nixl.case_strategies import cases
from tests.unit.nixl.cluster_cases import Case
from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, State, Table
from tests.unit.nixl.reference_layout import describe
from tests.unit.nixl.reference_meaning import held
from tests.unit.nixl.test_wire_description import described
from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.layout import (
    MAX_COUNT,
    MAX_PARTS,
    MAX_STAGES,
    AttentionGeometry,
    CacheLayout,
    StateGeometry,
    StatePart,
    block_bytes,
    check_layout,
)
from vllm_commext.nixl.geometry.topology import Rank, Split
from vllm_commext.nixl.wire.description import open_description

MODEL = (
    Group("full", (Attention(4, 2),) * 2),
    Group("window", (Attention(2, 2, num_planes=2),)),
    Group("state", (State("mamba2", 8, 2, 1, 3),)),
)
UNIT = StatePart("x", "uint8", 0, 1, False, 1)
ENGINE = Engine(2, 6, (8, 8, 3), (2, 1, 1))


def layout_of(rank: int = 1) -> CacheLayout:
    return describe(Cache(MODEL, ENGINE), rank)


def test_a_layout_knows_its_rank_regions_and_splits() -> None:
    layout = layout_of()
    assert layout.rank == Rank(2, 1)
    assert layout.num_regions == 4
    assert layout.splits() == {Split(4), Split(2), Split(8), Split(1)}


@given(cases())
@settings(max_examples=30)
def test_block_bytes_are_those_that_have_a_meaning(case: Case) -> None:
    for cache in (case.prefill, case.decode):
        rank = cache.engine.tp_size - 1
        tables = [Table(0, (1,))] * len(cache.model)
        meant = held(cache, rank, 1, tables, max(cache.engine.block_sizes)).offsets
        layout = describe(cache, rank)
        counted = sum(block_bytes(layout, one) * len(one.names) for one in layout.families)
        assert counted == len(meant)


@given(cases())
@settings(max_examples=30)
def test_whatever_an_engine_has_is_accepted_and_survives_the_network(case: Case) -> None:
    for cache in (case.prefill, case.decode):
        layout = describe(cache, 0)
        check_layout(layout)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout) == layout


Change = Callable[[CacheLayout], CacheLayout]


def top(**changes: object) -> Change:
    return lambda layout: msgspec.structs.replace(layout, **changes)


def group(**changes: object) -> Change:
    return lambda layout: msgspec.structs.replace(
        layout, groups=[msgspec.structs.replace(layout.groups[0], **changes), *layout.groups[1:]]
    )


def family(number: int, **changes: object) -> Change:
    def altered(layout: CacheLayout) -> CacheLayout:
        families = list(layout.families)
        families[number] = msgspec.structs.replace(families[number], **changes)
        return msgspec.structs.replace(layout, families=families)

    return altered


def geometry(number: int, **changes: object) -> Change:
    def altered(layout: CacheLayout) -> CacheLayout:
        changed = msgspec.structs.replace(layout.families[number].geometry, **changes)
        return family(number, geometry=changed)(layout)

    return altered


def part(**changes: object) -> Change:
    """The second part of the state altered."""

    def altered(layout: CacheLayout) -> CacheLayout:
        state = layout.families[2].geometry
        assert isinstance(state, StateGeometry)
        parts = list(state.parts)
        parts[1] = msgspec.structs.replace(parts[1], **changes)
        return geometry(2, parts=tuple(parts))(layout)

    return altered


GARBAGE: dict[str, tuple[Change, str]] = {
    "rank beyond size": (top(tp_rank=2), "tp_rank"),
    "negative rank": (top(tp_rank=-1), "tp_rank"),
    "no ranks": (top(tp_size=0), "tp_rank"),
    "countless ranks": (top(tp_size=1 << 40), "tp_size"),
    "no blocks": (top(num_blocks=0), "num_blocks"),
    "countless blocks": (top(num_blocks=1 << 31), "num_blocks"),
    "other number of blocks": (top(num_blocks=5), "rows for all blocks"),
    "no groups": (top(groups=[]), "groups"),
    "no families": (top(families=[]), "families"),
    "unknown kind": (group(kind="strange"), "kind"),
    "empty blocks": (group(block_size=0), "block_size"),
    "endless blocks": (group(block_size=1 << 31), "block_size"),
    "blocks of other sizes": (group(block_size=4), "4 tokens in a block's rows"),
    "unknown group": (family(0, group=3), "family.group"),
    "negative group": (family(0, group=-1), "family.group"),
    "tokens in a group of states": (family(0, group=2), "states in groups"),
    "a state in a group of tokens": (family(2, group=0), "states in groups"),
    "no names": (family(0, names=[], base_addresses=[]), "a base address a layer"),
    "an address too few": (family(0, base_addresses=[4096]), "a base address a layer"),
    "address 0": (family(0, base_addresses=[0, 4096]), "base_addresses"),
    "negative address": (family(0, base_addresses=[4096, -8]), "base_addresses"),
    "huge address": (family(0, base_addresses=[4096, 1 << 63]), "base_addresses"),
    "rows": (geometry(0, num_rows=6), "rows for all blocks"),
    "rows of a state": (geometry(2, num_rows=7), "a row a block"),
    "no parts": (geometry(2, parts=()), "parts"),
    "countless parts": (geometry(2, parts=(UNIT,) * (MAX_PARTS + 1)), "parts"),
    "negative offset": (part(offset=-1), "offset"),
    "huge offset": (part(offset=1 << 40), "offset"),
    "negative run stride": (part(run_stride=-1), "run_stride"),
    "negative stage": (top(pp_rank=-1), "pp_rank"),
    "a rank too many": (top(tp_size=(1 << 16) + 1), "tp_size"),
    "a stage too many": (lambda layout: staged(layout, MAX_STAGES + 1), "stages"),
    "units just too many": (part(num_units=MAX_COUNT + 1), "num_units"),
}
SIZES = [(0, "row_tokens"), (1, "head_stride"), (0, "row_stride"), (1, "token_stride")]
COUNTS = [(0, "rows_per_block"), (0, "num_heads"), (1, "num_planes")]
GARBAGE |= {
    f"{name} {value}": (geometry(number, **{name: value}), name)
    for value in (0, -1, 1 << 40)
    for number, name in (*SIZES, *COUNTS, (0, "token_bytes"), (2, "row_stride"))
}
GARBAGE |= {
    f"{name} of a part {value}": (part(**{name: value}), name)
    for value in (0, -1, 1 << 40)
    for name in ("num_units", "num_runs", "unit_bytes")
}


def staged(layout: CacheLayout, count: int) -> CacheLayout:
    """As of the first of so many pipeline stages."""
    others = [[f"elsewhere {number}"] for number in range(1, count)]
    return msgspec.structs.replace(layout, stages=[list(layout.own_names()), *others])


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_with_what_was_expected(name: str) -> None:
    change, expected = GARBAGE[name]
    with pytest.raises(ProtocolError, match=f"[Ee]xpected .*{expected}"):
        open_description(described(layout=change(layout_of())))


@pytest.mark.parametrize(
    "change",
    [
        top(tp_size=1 << 16),
        part(num_units=MAX_COUNT),
        geometry(2, parts=(UNIT,) * MAX_PARTS),
        lambda layout: staged(layout, MAX_STAGES),
    ],
)
def test_the_most_that_may_be_is_accepted(change: Change) -> None:
    open_description(described(layout=change(layout_of())))


def test_a_cache_of_one_block_is_accepted() -> None:
    check_layout(describe(Cache(MODEL, Engine(2, 1, (8, 8, 3), (2, 1, 1))), 1))


def test_the_altered_families_are_those_that_the_table_means() -> None:
    kinds = [type(family.geometry) for family in layout_of().families]
    assert kinds == [AttentionGeometry, AttentionGeometry, StateGeometry]
    assert np.array_equal([family.group for family in layout_of().families], [0, 1, 2])
