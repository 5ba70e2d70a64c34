"""Planned reads against the meaning of the bytes, for any two engines."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given

from tests.kit.crossed import crossed
from tests.kit.examples import examples
from tests.unit.nixl.case_strategies import cases
from tests.unit.nixl.cluster_cases import MODELS, PAIRS, Case, Model, Span, case_of, named_case
from tests.unit.nixl.planned_read import Describe, faults, release_faults, sources_of
from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group
from tests.unit.nixl.reference_layout import describe
from vllm_commext.nixl.geometry.layout import AttentionGeometry, CacheLayout, Family, StateGeometry
from vllm_commext.nixl.geometry.topology import Sources


@given(cases())
@examples(25)
def test_every_byte_arrives_once_and_nothing_else_is_touched(case: Case) -> None:
    assert faults(case) == []


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "different"])
@pytest.mark.parametrize(("name", "sizes"), crossed(list(MODELS), PAIRS))
def test_models_of_every_kind(name: str, sizes: tuple[int, int], alike: bool) -> None:
    assert faults(named_case(name, sizes, alike=alike, num_requests=2)) == []


@pytest.mark.parametrize("orders", [("LBHNC", "BLHNC"), ("BLHNC", "LBHNC")])
def test_layers_alike_in_one_engine_may_differ_in_the_other(orders: tuple[str, str]) -> None:
    """Where blocks are outermost, the layers of a run lie closer together than those of another."""
    one, two = Attention(4, 2), Attention(2, 3)
    model: Model = (Group("full", (one, one, two, one, one, one, two, one)),)
    dice = random.Random(f"{orders}")
    engines = [Engine(1, 0, (4,), (1,), order=order) for order in orders]
    case = case_of(model, engines[0], engines[1], [Span(9, 9, (0,), (0,))], dice)
    counts = [len(describe(cache, 0).families) for cache in (case.prefill, case.decode)]
    assert sorted(counts) == [2, 4]
    assert faults(case) == []


# The comparison has to notice plans that are wrong.


def altered(change: Callable[[Family], Family]) -> Describe:
    """Descriptions in which every family is changed."""

    def changed(cache: Cache, rank: int, address: int) -> CacheLayout:
        layout = describe(cache, rank, address)
        families = [change(family) for family in layout.families]
        return msgspec.structs.replace(layout, families=families)

    return changed


def deal_out_groups(family: Family) -> Family:
    """B and C as if they were dealt out, though all ranks share the one group."""
    if not isinstance(family.geometry, StateGeometry):
        return family
    parts = tuple(
        msgspec.structs.replace(part, num_units=2, unit_bytes=part.unit_bytes // 2)
        if part.name in ("B", "C")
        else part
        for part in family.geometry.parts
    )
    return geometry_changed(family, parts=parts)


def geometry_changed(family: Family, **changes: object) -> Family:
    geometry = msgspec.structs.replace(family.geometry, **changes)
    return msgspec.structs.replace(family, geometry=geometry)


def lengthen(family: Family) -> Family:
    """A byte more of everything, which is another one's."""
    if not isinstance(family.geometry, AttentionGeometry):
        return family
    return geometry_changed(family, token_bytes=family.geometry.token_bytes + 1)


def forget_state(family: Family) -> Family:
    """The convolution alone."""
    if not isinstance(family.geometry, StateGeometry):
        return family
    return geometry_changed(family, parts=family.geometry.parts[:-1])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["1:2", "2:1"])
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (deal_out_groups, "bytes are wrong"),
        (forget_state, "bytes are read"),
        (lengthen, "is written twice"),
    ],
)
def test_a_wrong_plan_is_noticed(
    change: Callable[[Family], Family], fault: str, sizes: tuple[int, int]
) -> None:
    case = named_case("mamba2 with one group", sizes, alike=True)
    assert any(fault in found for found in faults(case, altered(change)))
    assert faults(case) == []


def test_wrong_counts_of_releases_are_noticed() -> None:
    case = named_case("one head", (4, 2), alike=True)
    right = [sources_of(case, rank) for rank in range(2)]
    assert release_faults(right, 4) == []
    assert release_faults(right[:1], 4) != []
    assert release_faults([*right, right[0]], 4) != []
    one = right[0]
    counts = {source: count + 1 for source, count in one.num_consumers.items()}
    assert release_faults([Sources(one.read, counts), right[1]], 4) != []
    assert release_faults([Sources(one.read, {}), right[1]], 4) != []
