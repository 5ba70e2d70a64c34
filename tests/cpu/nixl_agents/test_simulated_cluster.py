"""Engines of different tensor-parallel sizes, with real NIXL agents, against the meaning of every
byte."""

import random
from dataclasses import replace
from itertools import product

import pytest

from tests.cpu.nixl_agents.simulation import Cluster
from tests.kit.crossed import crossed
from tests.unit.nixl.cluster_cases import PAIRS, Case, Model, case_of, random_span
from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, State
from tests.unit.nixl.reference_meaning import held

pytestmark = pytest.mark.timeout(300)

ATTENTION: Model = (
    Group("full", (Attention(8, 2),) * 2 + (Attention(2, 3, num_planes=2),) * 2),
    Group("window", (Attention(1, 4, num_planes=2),) * 2),
    Group("full", (Attention(1, 5, latent=True), Attention(16, 2, packed=True))),
)
HYBRID: Model = (
    Group("full", (Attention(4, 3),) * 2),
    Group("state", (State("mamba2", 8, 2, 1, 3),) * 2),
    Group("state", (State("mamba2", 16, 2, 8, 2), State("gdn", 16, 2, 8, 3))),
    Group("state", (State("mamba1", 16, state_size=3), State("short_conv", 24))),
)


def cluster_case(model: Model, sizes: tuple[int, int], num_requests: int = 3) -> Case:
    """Engines that keep their caches differently."""
    dice = random.Random(f"{len(model)} {sizes}")
    shared = model is HYBRID
    prefill = Engine(sizes[0], 0, (4,) * len(model), (1,) * len(model), shared=shared)
    if shared:
        blocks = (6, 3, 5, 2), (3, 1, 1, 1)
        decode = Engine(sizes[1], 0, *blocks, order="LBNHC", shared=True, padding=1)
    else:
        blocks = (6, 4, 8), (3, 2, 2)
        decode = Engine(sizes[1], 0, *blocks, order="LHBNC", padding=3)
    spans = [random_span(model, prefill, decode, dice) for _ in range(num_requests)]
    return case_of(model, prefill, decode, spans, dice)


MODELS = {"attention": ATTENTION, "hybrid": HYBRID}
FORMS = ("strided", "expanded")
"""Both forms of NIXL's descriptor lists; older NIXL takes the second only."""


@pytest.mark.parametrize(
    ("caches", "sizes"),
    crossed(list(product(FORMS, MODELS)), PAIRS),
    ids=lambda pair: "{}:{}".format(*pair),
)
def test_every_byte_arrives_and_every_rank_is_released(
    monkeypatch: pytest.MonkeyPatch, caches: tuple[str, str], sizes: tuple[int, int]
) -> None:
    form, kind = caches
    strided = form == "strided"
    monkeypatch.setattr("vllm_commext.nixl.transport.agent.takes_strided_lists", lambda: strided)
    with Cluster(cluster_case(MODELS[kind], sizes)) as cluster:
        cluster.run()
        assert cluster.decode.faults(cluster.requests) == []
        assert cluster.prefill.is_untouched()


LAYERED: Model = (Group("full", (Attention(4, 2),) * 3), Group("window", (Attention(4, 2),) * 2))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)], ids=["1:1", "2:1", "1:2"])
@pytest.mark.parametrize(
    "orders",
    [("BLHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("LBNHC", "BLHNC"), ("BHLNC", "BLHNC")],
    ids="-".join,
)
def test_layers_side_by_side_are_read_into_any_layout(
    orders: tuple[str, str], sizes: tuple[int, int]
) -> None:
    prefill, decode = (
        Engine(size, 0, (4, 4), (1, 1), order=order)
        for size, order in zip(sizes, orders, strict=True)
    )
    dice = random.Random(f"{orders} {sizes}")
    spans = [random_span(LAYERED, prefill, decode, dice) for _ in range(3)]
    with Cluster(case_of(LAYERED, prefill, decode, spans, dice)) as cluster:
        cluster.run()
        assert cluster.decode.faults(cluster.requests) == []
        assert cluster.prefill.is_untouched()


def test_the_comparison_notices_one_altered_byte() -> None:
    case = cluster_case(HYBRID, (2, 1), 1)
    with Cluster(case) as cluster:
        (request,) = case.requests
        held_there = held(case.prefill, 1, 1, request.remote, request.num_remote_tokens)
        cluster.prefill.workers[1].memory[held_there.offsets[-1]] ^= 1
        cluster.run()
        faults = cluster.decode.faults(cluster.requests)
        assert len(faults) == 1
        assert faults[0].startswith("decode worker 0: 1 bytes wrong")
        assert len(cluster.decode.faults([])) == 2


def test_engines_of_several_sizes_prefill_for_one() -> None:
    case = cluster_case(HYBRID, (2, 2), 4)
    others = [
        replace(case, prefill=Cache(HYBRID, replace(case.prefill.engine, tp_size=size)))
        for size in (1, 4)
    ]
    with Cluster(case, *others) as cluster:
        cluster.run()
        assert cluster.decode.faults(cluster.requests) == []


@pytest.mark.parametrize("sizes", [(4, 1), (2, 4)], ids=["4:1", "2:4"])
def test_a_full_hit_releases_every_prefill_rank_and_reads_nothing(sizes: tuple[int, int]) -> None:
    with Cluster(cluster_case(ATTENTION, sizes)) as cluster:
        for request in cluster.requests:
            cluster.prefill.hold(request)
            remote = cluster.prefill.remote(request)
            cluster.decode.submit(request, remote, nothing_missing=True)
        assert cluster.decode.wait_received(cluster.requests) == [set()] * sizes[1]
        cluster.prefill.wait_released(cluster.requests)
        assert cluster.decode.faults([]) == []


def test_engines_that_do_not_fit_each_other_are_refused_on_every_rank() -> None:
    case = cluster_case(HYBRID, (2, 4), 1)
    engine = replace(case.prefill.engine, dim_first=False)
    with Cluster(replace(case, prefill=Cache(HYBRID, engine))) as cluster:
        (request,) = case.requests
        cluster.decode.submit(request, cluster.prefill.remote(request))
        assert cluster.decode.wait_received(case.requests) == [{"d1"}] * 4
        for worker in cluster.decode.workers:
            assert worker.recorded["failures"] == {"configuration": 1}
        assert cluster.decode.faults([]) == []
