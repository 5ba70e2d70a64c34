"""Engines of different tensor-parallel sizes and pipeline stages, with real NIXL agents, against
the meaning of every byte."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import wait_until
from tests.cpu.nixl_agents.simulation import Cluster
from tests.kit.crossed import crossed
from tests.unit.nixl.cluster_cases import PAIRS, Case, Model, Span, case_of, random_span
from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, State
from tests.unit.nixl.reference_meaning import held
from tests.unit.nixl.reference_stages import Stages, cut, names_of

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
# How a decode engine keeps each model, and prompts of several chunks: of the window only what it
# still needs is left at the end, and states are there at the end alone.
KINDS: dict[str, tuple[Model, tuple[int, ...], tuple[int, ...], dict[str, Any], list[Span]]] = {
    "attention": (
        *(ATTENTION, (6, 4, 8), (3, 2, 2), {"order": "LHBNC", "padding": 3}),
        [
            Span(41, 41, (0, 9, 0), (0, 8, 0)),
            Span(37, 37, (4, 9, 3), (0, 9, 0)),
            Span(24, 24, (0, 6, 0), (0, 6, 0)),
        ],
    ),
    "hybrid": (
        *(HYBRID, (6, 3, 5, 2), (3, 1, 1, 1), {"order": "LBNHC", "padding": 1}),
        [Span(41, 41, (0,) * 4, (0,) * 4), Span(36, 36, (6, 0, 0, 0), (0,) * 4)],
    ),
}
MIXED = ["attention", "hybrid"]
Size = tuple[int, list[int]]
"""An engine's tensor-parallel size, and the layers behind which a stage ends."""
STAGED: list[tuple[Size, Size]] = [
    ((1, [2]), (1, [])),
    ((1, []), (1, [2])),
    ((1, [1]), (2, [])),
    ((2, []), (1, [1, 2])),
    ((2, [1]), (1, [2])),
    ((1, [1, 2]), (2, [2])),
    ((4, [2]), (2, [1])),
]
WHOLE: list[tuple[Size, Size]] = [
    ((theirs, []), (ours, [])) for theirs, ours in ((1, 1), (1, 2), (2, 1), (4, 2), (2, 4))
]


def case_between(
    kind: str, theirs: int, ours: int, num_requests: int = 3, spans: Sequence[Span] = ()
) -> Case:
    """Engines that keep their caches differently."""
    model, blocks, rows, layout, _ = KINDS[kind]
    dice = random.Random(f"{kind} {theirs} {ours}")
    shared = model is HYBRID
    prefill = Engine(theirs, 0, (4,) * len(model), (1,) * len(model), shared=shared)
    decode = Engine(ours, 0, blocks, rows, shared=shared, **layout)
    drawn = [random_span(model, prefill, decode, dice) for _ in range(num_requests)]
    return case_of(model, prefill, decode, spans or drawn, dice)


def staged(case: Case, theirs: Size, ours: Size, *, streams: bool = False) -> Cluster:
    stages: list[Stages] = [
        cut(names_of(cache), size[1])
        for cache, size in ((case.prefill, theirs), (case.decode, ours))
    ]
    return Cluster(case, theirs=stages[0], ours=stages[1], streams=streams)


def assert_all_is_right(cluster: Cluster) -> None:
    assert cluster.decode.faults(cluster.requests) == []
    assert cluster.prefill.is_untouched()
    assert sum(worker.recorded["bytes"] for worker in cluster.decode.workers) > 0


@pytest.mark.parametrize(("kind", "sizes"), crossed(MIXED, PAIRS, most=8), ids=str)
def test_every_byte_arrives_and_every_rank_is_released(kind: str, sizes: tuple[int, int]) -> None:
    with Cluster(case_between(kind, *sizes)) as cluster:
        cluster.run()
        assert_all_is_right(cluster)


@pytest.mark.parametrize(("kind", "pair"), crossed(MIXED, STAGED, most=4), ids=str)
def test_every_byte_arrives_between_stages(kind: str, pair: tuple[Size, Size]) -> None:
    with staged(case_between(kind, pair[0][0], pair[1][0], 2), *pair) as cluster:
        cluster.run()
        assert_all_is_right(cluster)


@pytest.mark.parametrize(("kind", "pair"), crossed(MIXED, [*WHOLE, *STAGED], most=6), ids=str)
def test_every_byte_arrives_while_prompts_are_computed(kind: str, pair: tuple[Size, Size]) -> None:
    case = case_between(kind, pair[0][0], pair[1][0], spans=KINDS[kind][-1])
    with staged(case, *pair, streams=True) as cluster:
        cluster.stream(random.Random(f"steps {pair}"))
        failed = cluster.decode.wait_received(cluster.requests)
        reasons = [worker.recorded["failures"] for worker in cluster.decode.workers]
        assert failed == [set()] * len(failed), reasons
        cluster.prefill.wait_released(cluster.requests)
        assert_all_is_right(cluster)


@pytest.mark.parametrize("pair", [((2, []), (1, [])), ((1, [2]), (1, [3]))], ids=str)
def test_the_comparison_notices_one_altered_byte(pair: tuple[Size, Size]) -> None:
    with staged(case_between("hybrid", pair[0][0], pair[1][0], 1), *pair) as cluster:
        (request,) = cluster.requests
        rank, stage = (1, 0) if pair[0][0] > 1 else (0, 1)
        there = cluster.prefill.case_of(stage).prefill
        tags = held(there, rank, request.number, request.remote, request.num_remote_tokens)
        cluster.prefill.workers[1].memory[0][tags.offsets[-1]] ^= 1
        cluster.run()
        (fault,) = cluster.decode.faults(cluster.requests)
        assert fault.startswith(f"decode worker {stage}: 1 bytes wrong")
        assert len(cluster.decode.faults([])) == 2 * len(cluster.decode.workers)


def test_engines_of_several_sizes_prefill_for_one() -> None:
    case = case_between("hybrid", 2, 2, 4)
    others = [
        replace(case, prefill=Cache(HYBRID, replace(case.prefill.engine, tp_size=size)))
        for size in (1, 4)
    ]
    with Cluster(case, *others) as cluster:
        cluster.run()
        assert_all_is_right(cluster)


def test_a_wrong_number_of_stages_is_refused() -> None:
    with staged(case_between("hybrid", 1, 1, 1), (1, [2]), (1, [])) as cluster:
        (request,) = cluster.requests
        cluster.decode.submit(request, cluster.prefill.remote(request, pp_size=1))
        assert cluster.decode.wait_received(cluster.requests) == [{f"d{request.number}"}]
        assert cluster.decode.workers[0].recorded["failures"] == {"request": 1}
        assert cluster.decode.faults([]) == []


def streamed(theirs: int, ours: int) -> Case:
    return case_between("hybrid", theirs, ours, spans=KINDS["hybrid"][-1])


CHUNK = 12
"""Tokens, of the prompts of the hybrid."""
NUM_STEPS = 4


def compute_steps(cluster: Cluster, request: Any, begin: int, end: int) -> None:
    """Steps ``[begin, end)`` of a prompt, each when the one before has been read."""
    workers = cluster.decode.workers
    for step in range(begin, end):
        before = [worker.collect() and worker.recorded["bytes"] for worker in workers]
        stop = min((step + 1) * CHUNK, request.num_tokens)
        cluster.prefill.compute(request, step * CHUNK, stop)
        wait_until(
            lambda before=before: all(
                worker.collect() and worker.recorded["bytes"] > known
                for worker, known in zip(workers, before, strict=True)
            ),
            f"step {step}",
        )


@pytest.mark.parametrize(
    ("sizes", "fault_at"), crossed([(1, 1), (2, 1)], range(NUM_STEPS)), ids=str
)
def test_blocks_that_are_zeroed_before_the_fence_is_replaced_are_read_anew(
    sizes: tuple[int, int], fault_at: int
) -> None:
    """Zeroing of the blocks of a preempted prompt may come before its fence is replaced: what is
    read in between passes the fence, and must not count."""
    with Cluster(streamed(*sizes), streams=True) as cluster:
        request = cluster.requests[0]
        cluster.prefill.begin(request)
        cluster.decode.submit(request, cluster.prefill.stream(request))
        compute_steps(cluster, request, 0, fault_at)
        right = [worker.memory[0].copy() for worker in cluster.prefill.workers]
        for worker in cluster.prefill.workers:
            worker.memory[0][:] = 0
        compute_steps(cluster, request, fault_at, fault_at + 1)
        cluster.prefill.preempt(request)
        for worker, memory in zip(cluster.prefill.workers, right, strict=True):
            worker.memory[0][:] = memory
        compute_steps(cluster, request, 0, NUM_STEPS)
        cluster.prefill.hold(request, is_streamed=True)
        assert cluster.decode.wait_received([request]) == [set()]
        wrong = cluster.decode.faults([request])
        assert [one for one in wrong if "bytes wrong" in one] == []
        cluster.prefill.wait_released([request])


@pytest.mark.parametrize("fault_at", range(NUM_STEPS + 1))
def test_a_prompt_that_is_aborted_before_its_states_are_there_fails_the_load(fault_at: int) -> None:
    with Cluster(streamed(1, 1), streams=True) as cluster:
        request, other = cluster.requests
        cluster.prefill.begin(request)
        cluster.decode.submit(request, cluster.prefill.stream(request))
        compute_steps(cluster, request, 0, fault_at)
        cluster.prefill.abort(request)
        assert cluster.decode.wait_received([request]) == [{f"d{request.number}"}]
        (worker,) = cluster.decode.workers
        assert worker.recorded["failures"] == {"expired": 1}
        assert worker.recorded["num_read"] == {f"d{request.number}": 0}
        cluster.prefill.begin(other)
        cluster.decode.submit(other, cluster.prefill.stream(other))
        cluster.prefill.compute(other, 0, other.num_tokens)
        cluster.prefill.hold(other, is_streamed=True)
        assert cluster.decode.wait_received(cluster.requests) == [{f"d{request.number}"}]
