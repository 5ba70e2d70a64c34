"""Planned reads between engines whose layers are dealt out to pipeline stages, evenly or not,
against the meaning of the bytes: a stage's worker holds its own layers and nothing else."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.crossed import crossed
from tests.kit.examples import examples
from tests.unit.nixl.case_strategies import cases
from tests.unit.nixl.cluster_cases import MODELS, PAIRS, Case, named_case
from tests.unit.nixl.planned_read import (
    LOCAL_ADDRESS,
    REMOTE_ADDRESS,
    faults_of_rank,
    nothing_read,
    sources_of,
)
from tests.unit.nixl.reference_cache import Cache
from tests.unit.nixl.reference_layout import describe
from tests.unit.nixl.reference_stages import Stages, cut, described, names_of, stage_of
from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.layout import check_layout
from vllm_commext.nixl.geometry.plan import plan_read

MAX_STAGES = 4


@st.composite
def stages(draw: st.DrawFn, cache: Cache) -> Stages:
    """Any way to deal out an engine's layers; each stage has at least one."""
    names = names_of(cache)
    if len(names) == 1:
        return [names]
    ends = st.lists(st.integers(1, len(names) - 1), max_size=MAX_STAGES - 1)
    return cut(names, draw(ends))


def faults(case: Case, theirs: Stages, ours: Stages) -> list[str]:
    """What is wrong after every decode worker has read from every prefill stage."""
    return [
        f"stage {stage}, rank {rank}: {fault}"
        for stage in range(len(ours))
        for rank in range(case.decode.engine.tp_size)
        for fault in faults_of_worker(case, theirs, ours, stage, rank)
    ]


def faults_of_worker(case: Case, theirs: Stages, ours: Stages, stage: int, rank: int) -> list[str]:
    own = replace(case, decode=stage_of(case.decode, ours[stage]))
    arrived = nothing_read(own, rank)
    local = described(case.decode, ours, stage, rank, LOCAL_ADDRESS)
    for number, names in enumerate(theirs):
        there = replace(own, prefill=stage_of(case.prefill, names))
        for source in sources_of(case, rank).read:
            remote = described(case.prefill, theirs, number, source, REMOTE_ADDRESS)
            arrived.read(case.requests, local, remote, there.prefill_memory(source))
    return faults_of_rank(own, rank, arrived)


@given(st.data(), cases())
@examples(20)
def test_any_stages_and_ranks_read_from_any_others(data: st.DataObject, case: Case) -> None:
    theirs, ours = data.draw(stages(case.prefill)), data.draw(stages(case.decode))
    assert faults(case, theirs, ours) == []


@pytest.mark.parametrize(
    ("name", "sizes"), crossed([name for name in MODELS if name != "one head"], PAIRS)
)
def test_uneven_stages_of_models_of_every_kind(name: str, sizes: tuple[int, int]) -> None:
    case = named_case(name, sizes, alike=False)
    names = names_of(case.prefill)
    for theirs, ours in (([1], []), ([], [2]), ([1], [2]), ([1, 2], [1])):
        assert faults(case, cut(names, theirs), cut(names, ours)) == []


def test_engines_of_different_layers_are_refused() -> None:
    """Each stage alone has what it should; together, one engine has a layer less."""
    case = named_case("eight heads", (1, 1), alike=True)
    names = names_of(case.prefill)
    local = described(case.decode, [names[:1], names[1:]], 0, 0, LOCAL_ADDRESS)
    remote = described(case.prefill, [names[:1], names[1:2]], 0, 0, REMOTE_ADDRESS)
    with pytest.raises(ProtocolError, match=r"layers differ: only in decode \['layers.2'\]"):
        plan_read(local, remote, local_device=0, remote_device=0)
    with pytest.raises(ProtocolError, match=r"only in prefill \['layers.2'\]: serve the same"):
        plan_read(remote, local, local_device=0, remote_device=0)
    # A worker that names no stages claims to have all layers.
    alone = describe(stage_of(case.prefill, names[:1]), 0, REMOTE_ADDRESS)
    with pytest.raises(ProtocolError, match="layers differ"):
        plan_read(local, alone, local_device=0, remote_device=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pp_rank": 2}, "pp_rank below the number of stages"),
        ({"pp_rank": 1}, "the layers of its stage"),
        ({"stages": [["layers.9"]]}, "the layers of its stage"),
        ({"stages": [["layers.0"], ["layers.0", "layers.1"]]}, "each layer in one stage"),
        ({"stages": [["layers.0"], ["layers.1", "layers.1"]]}, "each layer in one stage"),
    ],
)
def test_inconsistent_stages_are_refused(changes: dict[str, object], expected: str) -> None:
    case = named_case("eight heads", (1, 1), alike=True)
    dealt = cut(names_of(case.prefill), [1])
    good = described(case.prefill, dealt, 0, 0, REMOTE_ADDRESS)
    with pytest.raises(ProtocolError, match=expected):
        check_layout(msgspec.structs.replace(good, **changes))
