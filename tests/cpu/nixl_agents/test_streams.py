"""Prompts that are read while they are computed, between real agents: every chunk, and faults at
each."""

from collections.abc import Callable
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
from tests.cpu.nixl_agents.peer_process import PeerProcess
from tests.cpu.nixl_agents.streams import BLOCKS, CHUNKS, Prompt
from tests.kit.crossed import crossed
from vllm_commext.nixl.transfer_thread import GiveUp

pytestmark = pytest.mark.timeout(300)
NUM_CHUNKS = len(CHUNKS)
AT_EACH = pytest.mark.parametrize("fault_at", range(NUM_CHUNKS))

Make = Callable[..., Any]


@pytest.fixture
def prompt(make_engine: Make) -> Prompt:
    return Prompt(make_engine)


def compute(prompt: Prompt, begin: int, end: int) -> None:
    """Compute chunks, each when the one before has been read."""
    for chunk in range(begin, end):
        prompt.compute(chunk)
        stop = 2 * (chunk + 1)
        wait_until(lambda stop=stop: prompt.has(0, stop), f"chunk {chunk}")


def begin_to_read(prompt: Prompt, num_chunks: int = 1) -> None:
    prompt.compute(0)
    prompt.load()
    compute(prompt, 1, num_chunks)


def test_each_chunk_is_read_when_it_is_computed(prompt: Prompt) -> None:
    begin_to_read(prompt)
    for stop in range(2, len(BLOCKS) + 1, 2):
        wait_until(lambda stop=stop: prompt.has(0, stop), f"{stop} blocks")
        assert prompt.is_untouched_but(stop)
        if stop < len(BLOCKS):
            assert "d" not in prompt.decode.collect().received
            prompt.compute(stop // 2)
    assert prompt.wait() == ""
    recorded = prompt.decode.recorded
    # All but the last chunk, whose block is filled by half and read whole.
    assert recorded["hidden_bytes"] * len(BLOCKS) == recorded["bytes"] * (len(BLOCKS) - 2)
    prompt.finish()
    prompt.wait_freed()


def test_between_chunks_every_turn_looks_for_the_next_one(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that only holds blocks looks at all else ten times a second; this one does not."""
    begin_to_read(prompt)
    wait_until(lambda: prompt.has(0, 2), "the first chunk")
    thread = prompt.decode.thread
    turns: list[float] = []
    take_turn = thread._turn
    monkeypatch.setattr(thread, "_turn", lambda: (take_turn(), turns.append(thread._next_turn)))
    wait_until(lambda: len(turns) > 10, "some turns")
    assert set(turns) == {0.0}
    prompt.compute_all(1)
    assert prompt.wait() == ""


def test_a_prompt_that_is_computed_already_is_read_at_once(prompt: Prompt) -> None:
    prompt.compute_all()
    prompt.finish()
    prompt.load()
    assert prompt.wait() == ""
    assert prompt.decode.recorded["hidden_bytes"] == 0 < prompt.decode.recorded["bytes"]
    assert prompt.has(0, len(BLOCKS))
    prompt.wait_freed()


@pytest.mark.parametrize("first", [1, 3, 7])
def test_what_is_here_is_not_read(prompt: Prompt, first: int) -> None:
    prompt.compute(0)
    prompt.load(first=first)
    prompt.compute_all(1)
    assert prompt.wait() == ""
    assert prompt.has(first, len(BLOCKS))
    assert not prompt.has(0, first)


@AT_EACH
def test_a_preempted_prompt_is_read_anew(prompt: Prompt, fault_at: int) -> None:
    begin_to_read(prompt, fault_at)
    for _ in range(2):
        prompt.preempt()
        prompt.compute(0)
    compute(prompt, 1, NUM_CHUNKS)
    assert prompt.wait() == ""
    assert prompt.has(0, len(BLOCKS))


def test_a_prompt_that_is_preempted_again_and_again_fails(prompt: Prompt) -> None:
    begin_to_read(prompt)
    for _ in range(3):
        wait_until(lambda: prompt.has(0, 2), "the first chunk")
        prompt.preempt()
        prompt.decode.memory[0][:] = 0
        prompt.compute(0)
    assert prompt.wait() == "expired"


@AT_EACH
def test_an_aborted_prefill_fails_the_load_and_frees_its_blocks(
    prompt: Prompt, fault_at: int
) -> None:
    begin_to_read(prompt, fault_at)
    prompt.finish(lease_seconds=0.0)
    prompt.wait_freed()
    assert prompt.wait() == "expired"
    (num_read,) = prompt.decode.recorded["num_read"].values()
    # Chunks whose fence has not come any more do not count.
    assert num_read in [2 * BLOCK_SIZE * one for one in range(max(fault_at, 1) + 1)]
    prompt.begin(2)
    prompt.compute_all()
    prompt.load("d2")
    assert prompt.wait("d2") == ""
    assert prompt.has(0, len(BLOCKS))


@AT_EACH
def test_a_prefill_that_goes_no_further_fails_the_load(make_engine: Make, fault_at: int) -> None:
    prompt = Prompt(make_engine, transfer_timeout=1.0)
    prompt.compute(0)
    prompt.load()
    for chunk in range(1, fault_at):
        prompt.compute(chunk)
    assert prompt.wait() == "timeout"
    assert prompt.decode.recorded["num_read"] == {"d": 2 * BLOCK_SIZE * max(fault_at, 1)}
    assert prompt.decode.outcomes.late == set()


def test_a_chunk_that_does_not_arrive_is_given_up_and_settles(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(make_engine, transfer_timeout=1.0)
    prompt.compute(0)
    decode, agent = prompt.decode, prompt.decode.agent
    make_read = agent.make_read
    slow: list[SlowReads] = []

    def make(local: Any, own: Any, remote: Any, theirs: Any) -> Any:
        links = decode.thread._loader._peers._links._all
        if not slow and any(remote is link.reader._remote_list for link in links):
            slow.append(SlowReads(agent, monkeypatch))
        return make_read(local, own, remote, theirs)

    monkeypatch.setattr(agent, "make_read", make)
    prompt.load()
    decode.wait(lambda: decode.collect().late == {"d"})
    assert decode.outcomes.received == set()
    decode.thread.submit(GiveUp("d"))
    assert prompt.wait() == "timeout"
    assert decode.recorded["num_read"] == {"d": 0}
    assert decode.outcomes.settled == set()
    slow[0].end()
    decode.wait(lambda: decode.collect().settled == {"d"})


def test_a_decode_engine_that_streams_nothing_says_so(make_engine: Make) -> None:
    prompt = Prompt(make_engine, stream_chunks=False)
    begin_to_read(prompt)
    assert prompt.wait() == "request"
    assert prompt.is_untouched_but(0)


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
