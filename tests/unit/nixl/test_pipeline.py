"""What the workers of an engine's pipeline stages tell one another, over groups of Gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed

from tests.unit.nixl.cluster_cases import named_case
from tests.unit.nixl.reference_layout import describe
from tests.unit.nixl.reference_stages import cut, names_of, stage_of
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.geometry.layout import CacheLayout, check_layout, describe_place
from vllm_commext.nixl.geometry.topology import Split
from vllm_commext.nixl.vllm_cache import ONE_STAGE, Pipeline, gather_bytes

BOUND = timedelta(seconds=60)
HYBRID = "mamba2 with eight groups"
T = TypeVar("T")


def on_each(size: int, work: Callable[[int, torch.distributed.ProcessGroup], T]) -> list[T]:
    """What each process of a group does, as threads of this one."""
    store = torch.distributed.HashStore()

    def run(rank: int) -> T:
        group = torch.distributed.ProcessGroupGloo(store, rank, size, BOUND)
        return work(rank, group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size), timeout=2 * BOUND.total_seconds()))


def test_every_process_gets_what_each_has_said() -> None:
    said = [b"", b"one", bytes(range(256)) * 40]
    assert on_each(3, lambda rank, group: gather_bytes(said[rank], group)) == [said] * 3
    assert on_each(1, lambda rank, group: gather_bytes(b"alone", group)) == [[b"alone"]]


def placed(ends: list[int], name: str = HYBRID) -> list[tuple[CacheLayout, frozenset[Split]]]:
    """Layout and splits of the workers of rank 0 of each stage, as they find them out."""
    cache = named_case(name, (1, 1), alike=True).decode
    dealt = cut(names_of(cache), ends)

    def place(
        stage: int, group: torch.distributed.ProcessGroup
    ) -> tuple[CacheLayout, frozenset[Split]]:
        pipeline = Pipeline(len(dealt), stage, lambda own: gather_bytes(own, group))
        return pipeline.place(describe(stage_of(cache, dealt[stage]), 0))

    return on_each(len(dealt), place)


def test_stages_learn_of_one_anothers_layers_and_splits() -> None:
    whole = describe(named_case(HYBRID, (1, 1), alike=True).decode, 0)
    found = placed([1, 3])
    assert [layout.pp_rank for layout, _ in found] == [0, 1, 2]
    own = [layout.splits() for layout, _ in found]
    assert len(set(own)) > 1  # else the stages had nothing to tell
    for layout, splits in found:
        check_layout(layout)
        assert splits == whole.splits() == frozenset().union(*own)
        assert layout.engine_names() == whole.own_names()
        assert (layout.pp_size, layout.worker) == (3, layout.pp_rank)
        assert describe_place(layout) == f"rank 0 of 1, stage {layout.pp_rank} of 3"


def test_the_only_stage_asks_nobody_and_says_what_it_has_always_said() -> None:
    layout = describe(named_case(HYBRID, (1, 1), alike=True).decode, 0)
    placed_layout, splits = ONE_STAGE.place(layout)
    assert (placed_layout, splits) == (layout, layout.splits())
    assert (layout.stages, layout.pp_size, layout.worker) == ([], 1, 0)
    assert describe_place(layout) == "rank 0 of 1"


def test_workers_of_all_stages_agree_on_who_reads_from_whom() -> None:
    """From its own layers alone a stage would leave out ranks that another stage reads from."""
    found = placed([1, 3])
    workers = [LocalWorker("d", {}, one, other_splits=splits) for one, splits in found]
    alone = [LocalWorker("d", {}, one) for one, _ in found]
    for tp_size in (1, 2, 4):
        assert len({one.sources(tp_size, 2).read for one in workers}) == 1
        counts = workers[0].sources(tp_size, 2).num_consumers
        assert sorted(counts) == list(range(2 * tp_size))
        assert set(counts.values()) == {3}
    assert len({one.sources(4, 2).read for one in alone}) > 1


def test_a_stage_without_caches_is_refused() -> None:
    Pipeline(3, 1).check_caches(1)
    with pytest.raises(
        UnsupportedError, match=r"each of 3 pipeline stages, got none in stage 1: .*"
    ):
        Pipeline(3, 1).check_caches(0)
