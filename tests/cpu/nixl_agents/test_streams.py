"""Prompts that are read while they are computed, between real agents: every chunk, and faults at
each."""

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
from tests.cpu.nixl_agents.streams import BLOCKS, CHUNKS, Decode, Prefill, check_chunk_by_chunk
from tests.kit.crossed import crossed
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
