"""Engines of different pipeline stages and tensor-parallel sizes, with real NIXL agents, against
the meaning of every byte."""

import random
from collections.abc import Sequence

import pytest

from tests.cpu.nixl_agents.harness import wait_until
from tests.cpu.nixl_agents.simulation import Cluster, Prefill
from tests.kit.crossed import crossed
from tests.unit.nixl.cluster_cases import Case, Model, Span, case_of, random_span
from tests.unit.nixl.reference_cache import Attention, Engine, Group, State
from tests.unit.nixl.reference_meaning import held
from tests.unit.nixl.reference_stages import Stages, cut, names_of

pytestmark = pytest.mark.timeout(300)

DENSE: Model = (Group("full", (Attention(4, 2),) * 4),)
LATENT: Model = (Group("full", (Attention(1, 6, latent=True),) * 3),)
WINDOWS: Model = (Group("full", (Attention(4, 2),) * 2), Group("window", (Attention(4, 2),) * 2))
HYBRID: Model = (
    Group("full", (Attention(4, 3),) * 2),
    Group("state", (State("mamba2", 8, 2, 1, 3),) * 2),
    Group("state", (State("mamba2", 16, 2, 8, 2), State("gdn", 16, 2, 8, 3))),
)
MODELS = {"dense": DENSE, "latent": LATENT, "windows": WINDOWS, "hybrid": HYBRID}
# Tensor-parallel sizes and the layers behind which a stage ends, of prefill and of decode.
PAIRS = [
    ((1, [2]), (1, [])),
    ((1, []), (1, [2])),
    ((1, [1]), (2, [])),
    ((2, []), (1, [1, 2])),
    ((2, [1]), (1, [2])),
    ((1, [1, 2]), (2, [2])),
    ((4, [2]), (2, [1])),
]


def case_and_stages(
    model: Model,
    theirs: tuple[int, list[int]],
    ours: tuple[int, list[int]],
    num_requests: int = 2,
    spans: Sequence[Span] = (),
) -> tuple[Case, Stages, Stages]:
    """Engines that keep their caches differently, and what stages each has."""
    dice = random.Random(f"{len(model)} {theirs} {ours}")
    shared = any(group.kind == "state" for group in model)
    count, own = len(model), {"order": "LBNHC", "padding": 1, "shared": shared}
    prefill = Engine(theirs[0], 0, (4,) * count, (1,) * count, shared=shared)
    decode = Engine(
        ours[0], 0, (4,) * count if "window" in str(model) else (6,) * count, (1,) * count, **own
    )
    drawn = [random_span(model, prefill, decode, dice) for _ in range(num_requests)]
    case = case_of(model, prefill, decode, spans or drawn, dice)
    return case, cut(names_of(case.prefill), theirs[1]), cut(names_of(case.decode), ours[1])


def cluster_of(case: Case, theirs: Stages, ours: Stages, *, streams: bool = False) -> Cluster:
    return Cluster(case, theirs=theirs, ours=ours, streams=streams)


every = pytest.mark.parametrize(
    ("kind", "pair"),
    crossed(list(MODELS), PAIRS),
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(f"pp{len(ends) + 1}tp{size}" for size, ends in value)
    ),
)


@every
def test_every_byte_arrives_and_every_worker_is_released(
    kind: str, pair: tuple[tuple[int, list[int]], tuple[int, list[int]]]
) -> None:
    case, theirs, ours = case_and_stages(MODELS[kind], *pair)
    with cluster_of(case, theirs, ours) as cluster:
        cluster.run()
        assert cluster.decode.faults(cluster.requests) == []
        assert cluster.prefill.is_untouched()
        assert sum(worker.recorded["bytes"] for worker in cluster.decode.workers) > 0


@every
def test_every_byte_arrives_while_the_stages_compute(
    kind: str, pair: tuple[tuple[int, list[int]], tuple[int, list[int]]]
) -> None:
    nothing = (0,) * len(MODELS[kind])
    spans = [Span(count, count, nothing, nothing) for count in (41, 24)]
    case, theirs, ours = case_and_stages(MODELS[kind], *pair, spans=spans)
    with cluster_of(case, theirs, ours, streams=True) as cluster:
        cluster.stream(random.Random(f"steps {pair}"))
        failed = cluster.decode.wait_received(cluster.requests)
        reasons = [worker.recorded["failures"] for worker in cluster.decode.workers]
        assert failed == [set()] * len(failed), reasons
        cluster.prefill.wait_released(cluster.requests)
        assert cluster.decode.faults(cluster.requests) == []
        assert cluster.prefill.is_untouched()


def test_the_comparison_notices_one_altered_byte_of_the_second_stage() -> None:
    case, theirs, ours = case_and_stages(HYBRID, (1, [2]), (1, [3]), 1)
    with cluster_of(case, theirs, ours) as cluster:
        (request,) = case.requests
        worker = cluster.prefill.workers[1]
        there = cluster.prefill._case_of(1).prefill
        tags = held(there, 0, request.number, request.remote, request.num_remote_tokens)
        worker.memory[tags.offsets[-1]] ^= 1
        cluster.run()
        (fault,) = cluster.decode.faults(cluster.requests)
        assert fault.startswith("decode worker 1: 1 bytes wrong")


def consumers_of(prefill: Prefill, name: str) -> list[int]:
    """How many decode workers have released a request, for each prefill worker."""
    ledgers = [worker.thread._lease_manager._leases._leases for worker in prefill.workers]
    return [len(ledger[name].released_by) if name in ledger else -1 for ledger in ledgers]


def test_nothing_is_free_before_the_workers_of_all_decode_stages_are_done() -> None:
    case, theirs, ours = case_and_stages(DENSE, (1, [2]), (2, [2]), 1)
    with cluster_of(case, theirs, ours) as cluster:
        (request,) = case.requests
        name, remote = f"p{request.number}", cluster.prefill.remote(request)
        cluster.prefill.hold(request)
        cluster.decode.submit(request, remote, workers=[0, 1, 2])
        wait_until(
            lambda: consumers_of(cluster.prefill, name) == [3, 3], "the releases of three workers"
        )
        for worker in cluster.prefill.workers:
            assert worker.collect().sent == set()
        cluster.decode.submit(request, remote, workers=[3])
        cluster.decode.wait_received(case.requests)
        cluster.prefill.wait_released(case.requests)
        assert cluster.decode.faults(case.requests) == []


def test_stages_with_no_layer_in_common_are_only_released() -> None:
    case, theirs, ours = case_and_stages(DENSE, (1, [2]), (1, [2]), 1)
    with cluster_of(case, theirs, ours) as cluster:
        cluster.run()
        assert cluster.decode.faults(cluster.requests) == []
        for number, worker in enumerate(cluster.decode.workers):
            peers = worker.thread._loader._peers._peers
            plans = {key[3]: peer.link.plan.sections for key, peer in peers.items() if peer.link}
            assert {there: bool(sections) for there, sections in plans.items()} == {
                there: there == number for there in range(2)
            }


def test_a_wrong_number_of_stages_is_refused_and_nothing_is_kept_in_vain() -> None:
    case, theirs, ours = case_and_stages(DENSE, (1, [2]), (1, []), 1)
    with cluster_of(case, theirs, ours) as cluster:
        (request,) = case.requests
        cluster.prefill.hold(request)
        cluster.decode.submit(request, cluster.prefill.remote(request, pp_size=1))
        assert cluster.decode.wait_received(case.requests) == [{f"d{request.number}"}]
        assert cluster.decode.workers[0].recorded["failures"] == {"request": 1}
        cluster.prefill.wait_released(case.requests)
        assert cluster.decode.faults([]) == []
