"""Prompts that are read while they are computed, between real agents: every chunk, and faults at
each."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import (
    BLOCK_SIZE,
    STREAM,
    SlowReads,
    assert_works,
    expected_after,
    load_of,
    same,
    wait_until,
)
from tests.cpu.nixl_agents.ranks import PeerProcess
from tests.cpu.nixl_agents.simulation import Cluster
from tests.cpu.nixl_agents.streams import BLOCKS, CHUNKS, Decode, Prefill, check_chunk_by_chunk
from tests.kit.crossed import crossed
from tests.unit.nixl.cluster_cases import Case, Model, Span, case_of
from tests.unit.nixl.reference_cache import Attention, Engine, Group, State
from vllm_commext.nixl.reasons import Handover
from vllm_commext.nixl.transfer_thread import GiveUp

pytestmark = pytest.mark.timeout(300)
NUM_CHUNKS = len(CHUNKS)
AT_EACH = pytest.mark.parametrize("fault_at", range(NUM_CHUNKS))

Make = Callable[..., Any]


@pytest.fixture(name="prefill")
def _prefill(make_engine: Make) -> Prefill:
    return Prefill(make_engine)


@pytest.fixture(name="make_decode")
def _make_decode(make_engine: Make, prefill: Prefill) -> Iterator[Callable[..., Decode]]:
    made: list[Decode] = []

    def make(**settings: Any) -> Decode:
        made.append(Decode(make_engine, prefill.engine.port, **settings))
        return made[-1]

    yield make
    for decode in made:
        decode.close()


@pytest.fixture(name="decode")
def _decode(make_decode: Callable[..., Decode]) -> Decode:
    return make_decode()


def compute(prefill: Prefill, decode: Decode, begin: int, end: int) -> None:
    """Compute chunks, each when the one before has been read."""
    for number in range(begin, end):
        prefill.compute("r", number)
        stop = 2 * (number + 1)
        wait_until(lambda stop=stop: decode.has(prefill.right, 0, stop), f"chunk {number}")


def test_each_chunk_is_read_when_it_is_computed(prefill: Prefill, decode: Decode) -> None:
    check_chunk_by_chunk(prefill, decode)
    recorded = decode.engine.recorded
    # All but the last chunk, whose block is filled by half and read whole.
    assert recorded["hidden_bytes"] * len(BLOCKS) == recorded["bytes"] * (len(BLOCKS) - 2)
    prefill.finish("r")
    prefill.wait_freed("r")
    assert prefill.add("again", 1) == Handover.REPEATED_KEY


def test_between_chunks_every_turn_looks_for_the_next_one(
    prefill: Prefill, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that only holds blocks looks at all else ten times a second; this one does not."""
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1)
    wait_until(lambda: decode.has(prefill.right, 0, 2), "the first chunk")
    thread = decode.engine.thread
    turns: list[float] = []
    take_turn = thread._turn

    def noted_turn() -> None:
        take_turn()
        turns.append(thread._next_turn)

    monkeypatch.setattr(thread, "_turn", noted_turn)
    wait_until(lambda: len(turns) > 10, "some turns")
    assert set(turns) == {0.0}
    for number in range(1, NUM_CHUNKS):
        prefill.compute("r", number)
    assert decode.wait("d") == ""


def test_a_prompt_that_is_computed_already_is_read_at_once(
    prefill: Prefill, decode: Decode
) -> None:
    prefill.add("r", 1)
    for number in range(NUM_CHUNKS):
        prefill.compute("r", number)
    prefill.finish("r")
    decode.load("d", 1)
    assert decode.wait("d") == ""
    assert decode.engine.recorded["hidden_bytes"] == 0 < decode.engine.recorded["bytes"]
    assert decode.has(prefill.right, 0, len(BLOCKS))
    prefill.wait_freed("r")


@pytest.mark.parametrize("first", [1, 3, 7])
def test_what_is_here_is_not_read(prefill: Prefill, decode: Decode, first: int) -> None:
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1, first)
    for number in range(1, NUM_CHUNKS):
        prefill.compute("r", number)
    assert decode.wait("d") == ""
    assert decode.has(prefill.right, first, len(BLOCKS))
    assert not decode.has(prefill.right, 0, first)


@AT_EACH
def test_a_preempted_prompt_is_read_anew(prefill: Prefill, decode: Decode, fault_at: int) -> None:
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1)
    compute(prefill, decode, 1, fault_at)
    for _ in range(2):
        prefill.preempt("r")
        prefill.compute("r", 0, begins=True)
    compute(prefill, decode, 1, NUM_CHUNKS)
    assert decode.wait("d") == ""
    assert decode.has(prefill.right, 0, len(BLOCKS))


def test_a_prompt_that_is_preempted_again_and_again_fails(prefill: Prefill, decode: Decode) -> None:
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1)
    for _ in range(3):
        wait_until(lambda: decode.has(prefill.right, 0, 2), "the first chunk")
        prefill.preempt("r")
        decode.engine.memory[0][:] = 0
        prefill.compute("r", 0, begins=True)
    assert decode.wait("d") == "expired"


@AT_EACH
def test_an_aborted_prefill_fails_the_load_and_frees_its_blocks(
    prefill: Prefill, decode: Decode, fault_at: int
) -> None:
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1)
    compute(prefill, decode, 1, fault_at)
    prefill.finish("r", lease_seconds=0.0)
    prefill.wait_freed("r")
    assert decode.wait("d") == "expired"
    (num_read,) = decode.engine.recorded["num_read"].values()
    # Chunks whose fence has not come any more do not count.
    assert num_read in [2 * BLOCK_SIZE * one for one in range(max(fault_at, 1) + 1)]
    prefill.add("next", 2)
    prefill.run_all("next")
    decode.load("d2", 2)
    decode.engine.wait(lambda: "d2" in decode.engine.collect().received)
    assert "d2" not in decode.engine.outcomes.failed
    assert decode.has(prefill.right, 0, len(BLOCKS))


@AT_EACH
def test_a_prefill_that_goes_no_further_fails_the_load(
    prefill: Prefill, make_decode: Callable[..., Decode], fault_at: int
) -> None:
    decode = make_decode(transfer_timeout=1.0)
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1)
    for number in range(1, fault_at):
        prefill.compute("r", number)
    assert decode.wait("d") == "timeout"
    assert decode.engine.recorded["num_read"] == {"d": 2 * BLOCK_SIZE * max(fault_at, 1)}
    assert decode.engine.outcomes.late == set()


def test_a_chunk_that_does_not_arrive_is_given_up_and_settles(
    prefill: Prefill, make_decode: Callable[..., Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = make_decode(transfer_timeout=1.0)
    prefill.add("r", 1)
    prefill.compute("r", 0)
    agent = decode.engine.agent
    make_read = agent.make_read
    slow: list[SlowReads] = []

    def make(local: Any, own: Any, remote: Any, theirs: Any) -> Any:
        links = decode.engine.thread._loader._peers._links._all
        if not slow and any(remote is link.reader._remote_list for link in links):
            slow.append(SlowReads(agent, monkeypatch))
        return make_read(local, own, remote, theirs)

    monkeypatch.setattr(agent, "make_read", make)
    decode.load("d", 1)
    decode.engine.wait(lambda: decode.engine.collect().late == {"d"})
    assert decode.engine.outcomes.received == set()
    decode.engine.thread.submit(GiveUp("d"))
    assert decode.wait("d") == "timeout"
    assert decode.engine.recorded["num_read"] == {"d": 0}
    assert decode.engine.outcomes.settled == set()
    slow[0].end()
    decode.engine.wait(lambda: decode.engine.collect().settled == {"d"})


def test_a_decode_engine_that_streams_nothing_says_so(
    prefill: Prefill, make_decode: Callable[..., Decode]
) -> None:
    decode = make_decode(stream_chunks=False)
    prefill.add("r", 1)
    prefill.compute("r", 0)
    decode.load("d", 1)
    assert decode.wait("d") == "request"
    assert decode.is_untouched_but(0)


@pytest.mark.parametrize(("fault", "num_computed"), crossed(["kill", "stop"], [2, 6]))
def test_a_prefill_process_that_ends_or_stops_in_mid_prompt(
    make_engine: Make, fault: str, num_computed: int
) -> None:
    decode = make_engine("d", seed=2, stream_chunks=True, transfer_timeout=3.0)
    with PeerProcess("p", seed=1, num_computed=num_computed) as peer:
        remote = peer.remote("x", [], num_tokens=8 * BLOCK_SIZE, **STREAM)
        right = expected_after(
            decode.memory, peer.memory, [(10 + one, 1 + one) for one in range(num_computed)]
        )
        decode.thread.submit(load_of("r", remote, range(10, 18)))
        wait_until(lambda: same(decode.memory, right), "the chunks that are computed")
        peer.kill() if fault == "kill" else peer.stop()
        # Where the last chunk's fence was still under way, it is late and has to be given up.
        decode.wait(lambda: "r" in decode.collect().received | decode.outcomes.late)
        if "r" not in decode.outcomes.received:
            decode.thread.submit(GiveUp("r"))
        decode.wait(lambda: "r" in decode.outcomes.received or "r" in decode.collect().received)
        assert decode.outcomes.failed == {"r"}
        assert set(decode.recorded["failures"]) <= {"timeout", "transfer"}
        assert decode.recorded["num_read"]["r"] in (0, BLOCK_SIZE * num_computed)
        assert same(decode.memory, right)
        assert_works(decode, make_engine("p2", seed=3, serve=True), "other")


DENSE: Model = (Group("full", (Attention(8, 2),) * 2 + (Attention(2, 3, num_planes=2),)),)
MIXED: Model = (
    Group("window", (Attention(1, 4, num_planes=2),) * 2),
    Group("full", (Attention(8, 2),) * 2 + (Attention(2, 3, num_planes=2),) * 2),
    Group("full", (Attention(1, 5, latent=True), Attention(16, 2, packed=True))),
)
HYBRID: Model = (
    Group("full", (Attention(4, 3),) * 2),
    Group("state", (State("mamba2", 8, 2, 1, 3),) * 2),
    Group("state", (State("mamba1", 16, state_size=3), State("short_conv", 24))),
)
LATENT: Model = (Group("full", (Attention(1, 5, latent=True),) * 3),)
SIZES = ((1, 1), (1, 2), (2, 1), (4, 2), (2, 4))


OTHERS: dict[str, Any] = {"order": "LBNHC", "padding": 1}
# Of each kind the model, whether groups share memory, blocks here and their rows, and the prompts.
CASES: dict[str, tuple[Model, bool, Any, Any, dict[str, Any], list[Span]]] = {
    # Blocks of 4 tokens there and of 6 here, the second prompt's first two blocks here already.
    "dense": (
        DENSE,
        False,
        (6,),
        (3,),
        OTHERS,
        [Span(41, 41, (0,), (0,)), Span(37, 37, (2,), (0,))],
    ),
    # Of the first group only what the window still needs is left at the end.
    "windows and MLA": (
        *(MIXED, False, (4, 6, 8), (2, 3, 2), {"order": "LHBNC", "padding": 3}),
        [
            Span(41, 41, (9, 0, 0), (8, 0, 0)),
            Span(37, 37, (9, 4, 3), (9, 0, 0)),
            Span(24, 24, (6, 0, 0), (6, 0, 0)),
        ],
    ),
    # States, which are there at the end alone; of the last prompt only they are missing.
    "hybrid": (
        *(HYBRID, True, (6, 3, 5), (3, 1, 1), OTHERS),
        [Span(41, 41, (0, 0, 0), (0, 0, 0)), Span(36, 36, (6, 0, 0), (0, 0, 0))],
    ),
    # Every rank holds the whole of it.
    "MLA": (LATENT, False, (8,), (2,), {}, [Span(41, 41, (0,), (0,))]),
}


def case_between(kind: str, sizes: tuple[int, int]) -> Case:
    model, shared, blocks, rows, layout, spans = CASES[kind]
    prefill = Engine(sizes[0], 0, (4,) * len(model), (1,) * len(model), shared=shared)
    decode = Engine(sizes[1], 0, blocks, rows, shared=shared, **layout)
    return case_of(model, prefill, decode, spans, random.Random(f"{kind} {sizes}"))


@pytest.mark.parametrize(("kind", "sizes"), crossed(list(CASES), SIZES), ids=str)
def test_chunks_between_different_tensor_parallel_sizes(kind: str, sizes: tuple[int, int]) -> None:
    with Cluster(case_between(kind, sizes), streams=True) as cluster:
        cluster.stream(random.Random(f"steps {sizes}"))
        assert cluster.decode.wait_received(cluster.requests) == [set()] * sizes[1]
        cluster.prefill.wait_released(cluster.requests)
        assert cluster.decode.faults(cluster.requests) == []
        assert cluster.prefill.is_untouched()


def test_states_are_read_when_their_prompt_has_ended_and_not_before() -> None:
    with Cluster(case_between("hybrid", (1, 1)), streams=True) as cluster:
        request = cluster.requests[0]
        cluster.prefill.begin(request)
        cluster.decode.submit(request, cluster.prefill.stream(request))
        cluster.prefill.compute(request, 0, 41)
        (worker,) = cluster.decode.workers
        wait_until(
            lambda: worker.collect() is not None and worker.recorded["bytes"] > 0,
            "the blocks of attention",
        )
        time.sleep(0.1)
        assert worker.collect().received == set()
        cluster.prefill.hold(request, is_streamed=True)
        assert cluster.decode.wait_received([request]) == [set()]
        assert cluster.decode.faults([request]) == []


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


@pytest.mark.parametrize("fault_at", range(NUM_STEPS))
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["1:1", "2:1"])
def test_blocks_that_are_zeroed_before_the_fence_is_replaced_are_read_anew(
    sizes: tuple[int, int], fault_at: int
) -> None:
    """Zeroing of the blocks of a preempted prompt may come before its fence is replaced: what is
    read in between passes the fence, and must not count."""
    with Cluster(case_between("hybrid", sizes), streams=True) as cluster:
        request = cluster.requests[0]
        cluster.prefill.begin(request)
        cluster.decode.submit(request, cluster.prefill.stream(request))
        compute_steps(cluster, request, 0, fault_at)
        right = [worker.memory.copy() for worker in cluster.prefill.workers]
        for worker in cluster.prefill.workers:
            worker.memory[:] = 0
        compute_steps(cluster, request, fault_at, fault_at + 1)
        cluster.prefill.preempt(request)
        for worker, memory in zip(cluster.prefill.workers, right, strict=True):
            worker.memory[:] = memory
        compute_steps(cluster, request, 0, NUM_STEPS)
        cluster.prefill.hold(request, is_streamed=True)
        assert cluster.decode.wait_received([request]) == [set()]
        wrong = cluster.decode.faults([request])
        assert [one for one in wrong if "bytes wrong" in one] == []
        cluster.prefill.wait_released([request])


@pytest.mark.parametrize("fault_at", range(NUM_STEPS + 1))
def test_a_prompt_that_is_aborted_before_its_states_are_there_fails_the_load(fault_at: int) -> None:
    with Cluster(case_between("hybrid", (1, 1)), streams=True) as cluster:
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
