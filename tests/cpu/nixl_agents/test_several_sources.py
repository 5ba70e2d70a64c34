"""One load from several prefill ranks, and several decode ranks on one: the load ends once, when
every part of it has; a prefill rank is released when each of its readers has released it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import FACTS, load_of, same, wait_for_back_off
from tests.cpu.nixl_agents.ranks import MODEL_HEADS, Ranks, expected_heads, untouched_but
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.transfer_thread import GiveUp

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
MakeRanks = Callable[..., Ranks]
Lines = pytest.LogCaptureFixture

# What is loaded: (local, remote) blocks.
PAIRS = [(7, 9), (3, 0), (12, 23)]
LOCAL, REMOTE = [local for local, _ in PAIRS], [remote for _, remote in PAIRS]
SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    """Makes prefill engines of several ranks and ends them."""
    made: list[Ranks] = []

    def make(*args: Any, **settings: Any) -> Ranks:
        made.append(Ranks(*args, **settings))
        return made[-1]

    yield make
    for ranks in reversed(made):
        ranks.__exit__(None, None, None)


@pytest.fixture
def decode(make_engine: MakeEngine) -> Any:
    return make_engine("d", seed=2, num_heads=MODEL_HEADS, transfer_timeout=1.0)


def assert_works(decode: Any, prefill: Ranks, request_id: str) -> None:
    expected = expected_heads(decode, prefill, [(1, 4)])
    decode.load(load_of(request_id, prefill.remote(f"p-{request_id}", [4]), [1]))
    assert request_id not in decode.outcomes.failed
    assert same(decode.memory, expected)


def assert_failed_once(decode: Any, before: Any, reason: str, lines: Lines) -> None:
    """The load "r" failed for one reason, told in one line, and nothing else was written."""
    assert decode.collect().failed == {"r"}
    assert decode.recorded["failures"] == {reason: 1}
    assert len([line for line in lines.messages if "KV cache not loaded" in line]) == 1
    assert untouched_but(decode, before, LOCAL)


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("not served", "handshake"), ("other facts", "configuration"), ("freed", "expired")],
)
def test_a_load_fails_by_one_rank_when_the_others_have_ended(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines, fault: str, reason: str, which: str
) -> None:
    wrong = 0 if which == "first" else 3
    right = set(range(4)) - {wrong}
    facts = {wrong: {**FACTS, "model": "n"}} if fault == "other facts" else {}
    prefill = make_ranks("p", 4, facts_of=facts, serve=False)
    prefill.serve(right if fault == "not served" else range(4))
    for index, worker in enumerate(prefill.workers):
        is_freed = fault == "freed" and index == wrong
        worker.thread.submit(Hold("x", 0.01 if is_freed else 600.0, 5, 0))
    if fault == "freed":
        prefill.wait_sent("x", [wrong])
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("x", REMOTE, fence_slot=5), LOCAL))
    assert_failed_once(decode, before, reason, log_lines)
    prefill.wait_sent("x", right)
    if fault == "not served":
        prefill.server.close()
        prefill.serve(range(4))
        wait_for_back_off(decode)
    other = make_ranks("q", 4, seed=7) if fault == "other facts" else prefill
    assert_works(decode, other, "next")


@SIZES
def test_a_killed_rank_fails_the_load_and_the_others_go_on(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines, size: int
) -> None:
    prefill = make_ranks("p", size, apart=[size - 1])
    assert_works(decode, prefill, "before")
    prefill.hold("x")
    prefill.workers[-1].kill()
    before = [row.copy() for row in decode.memory]
    log_lines.clear()
    decode.load(load_of("r", prefill.remote("x", REMOTE), LOCAL))
    (reason,) = decode.recorded["failures"]
    assert reason in ("handshake", "transfer")  # as it is noticed while posting, or afterwards
    assert_failed_once(decode, before, reason, log_lines)
    prefill.wait_sent("x", range(size - 1))
    assert_works(decode, make_ranks("q", size, seed=7), "next")


@SIZES
def test_a_load_with_a_stopped_rank_is_late_then_given_up_then_settled(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines, size: int
) -> None:
    prefill = make_ranks("p", size, apart=[0])
    assert_works(decode, prefill, "before")
    prefill.hold("x")
    prefill.workers[0].stop()
    before = [row.copy() for row in decode.memory]
    expected = expected_heads(decode, prefill, PAIRS)
    decode.thread.submit(load_of("r", prefill.remote("x", REMOTE), LOCAL))
    prefill.wait_sent("x", range(1, size))
    decode.wait(lambda: "r" in decode.collect().late)
    assert decode.outcomes.received == {"before"}, "reported while a part was under way"
    decode.thread.submit(GiveUp("r"))
    decode.wait(lambda: "r" in decode.collect().received)
    assert_failed_once(decode, before, "timeout", log_lines)
    assert decode.outcomes.settled == set()
    prefill.workers[0].go_on()
    decode.wait(lambda: decode.collect().settled == {"r"})
    assert_failed_once(decode, before, "timeout", log_lines)
    assert same(decode.memory, expected)
    assert_works(decode, prefill, "next")


def test_a_failure_waits_for_a_part_that_is_still_under_way(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines
) -> None:
    prefill = make_ranks("p", 4, apart=[2])
    assert_works(decode, prefill, "before")
    prefill.workers[1].thread.submit(Hold("x", 0.01, 5, 0))
    prefill.wait_sent("x", [1])
    prefill.workers[2].stop()
    before = [row.copy() for row in decode.memory]
    log_lines.clear()
    decode.thread.submit(load_of("r", prefill.remote("x", REMOTE, fence_slot=5), LOCAL))
    decode.wait(lambda: "r" in decode.collect().late)
    assert decode.outcomes.received == {"before"}
    prefill.workers[2].go_on()
    decode.wait(lambda: "r" in decode.collect().received)
    assert_failed_once(decode, before, "expired", log_lines)
    decode.thread.submit(GiveUp("r"))  # the scheduler's word and the end may cross
    decode.wait(lambda: decode.collect().settled == {"r"})
    assert_works(decode, prefill, "next")


def test_a_rank_that_dies_while_it_is_read_ends_the_load(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines
) -> None:
    prefill = make_ranks("p", 2, apart=[1])
    assert_works(decode, prefill, "before")
    prefill.workers[1].stop()
    before = [row.copy() for row in decode.memory]
    decode.thread.submit(load_of("r", prefill.remote("x", REMOTE), LOCAL))
    decode.wait(lambda: "r" in decode.collect().late)
    decode.thread.submit(GiveUp("r"))
    prefill.workers[1].kill()
    decode.wait(lambda: decode.collect().settled == {"r"})
    assert_failed_once(decode, before, "timeout", log_lines)
