"""One load from several prefill ranks, and several decode ranks on one: the load ends once, when
every part of it has; a prefill rank is released when each of its readers has released it."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import FACTS, load_of, same, wait_for_back_off
from tests.cpu.nixl_agents.ranks import MODEL_HEADS, Ranks, expected_heads, untouched_but
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.transfer_thread import GiveUp

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
MakeRanks = Callable[..., Ranks]
Lines = pytest.LogCaptureFixture

# What is loaded: (local, remote) blocks.
PAIRS = [(7, 9), (3, 0), (12, 23)]
LOCAL, REMOTE = [local for local, _ in PAIRS], [remote for _, remote in PAIRS]
SIZES = pytest.mark.parametrize("size", [2, 4])


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


def decode_ranks(make_engine: MakeEngine, size: int) -> list[Any]:
    return [
        make_engine("d", seed=50 + n, num_heads=MODEL_HEADS, rank=Rank(size, n))
        for n in range(size)
    ]


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


@SIZES
def test_every_head_comes_from_the_rank_that_holds_it(
    make_ranks: MakeRanks, decode: Any, size: int
) -> None:
    prefill = make_ranks("p", size)
    prefill.hold("x")
    expected = expected_heads(decode, prefill, PAIRS)
    decode.load(load_of("r", prefill.remote("x", REMOTE), LOCAL))
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)
    prefill.wait_sent("x", range(size))
    assert len(decode.recorded["handshake_seconds"]) == size
    assert len(decode.recorded["transfer_seconds"]) == size
    assert decode.recorded["bytes"] == 3 * len(PAIRS) * MODEL_HEADS * 48


@SIZES
@pytest.mark.parametrize("awaited", [True, False])
def test_where_nothing_is_missing_every_rank_is_released(
    make_ranks: MakeRanks, decode: Any, size: int, awaited: bool
) -> None:
    prefill = make_ranks("p", size)
    prefill.hold("x")
    before = [row.copy() for row in decode.memory]
    decode.thread.submit(load_of("r", prefill.remote("x", [1]), [], 1, awaited=awaited))
    prefill.wait_sent("x", range(size))
    assert decode.collect().failed == set()
    assert same(decode.memory, before)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (1, 4), (2, 4), (4, 2), (2, 2)])
def test_a_rank_is_released_by_the_last_of_its_readers(
    make_ranks: MakeRanks, make_engine: MakeEngine, prefill_size: int, decode_size: int
) -> None:
    prefill = make_ranks("p", prefill_size)
    decodes = decode_ranks(make_engine, decode_size)
    prefill.hold("x")
    for number, one in enumerate(decodes):
        expected = expected_heads(one, prefill, PAIRS)
        for repeat in ("r", "again"):  # the same reader counts once
            one.load(load_of(repeat, prefill.remote("x", REMOTE), LOCAL))
        assert one.outcomes.failed == set()
        assert same(one.memory, expected)
        done = (number + 1) * prefill_size // decode_size
        prefill.wait_sent("x", range(done))
        # What a rank hears after the releases above, it reports after them.
        prefill.hold(f"probe{number}", seconds=0.01)
        prefill.wait_sent(f"probe{number}", range(prefill_size))
        sent = [index for index, one in enumerate(prefill.workers) if "x" in one.outcomes.sent]
        assert sent == list(range(done))


def test_a_reader_that_never_comes_is_waited_for_until_the_lease_ends(
    make_ranks: MakeRanks, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, (first, second) = make_ranks("p", 1), decode_ranks(make_engine, 2)
    prefill.hold("x", seconds=600.0, slot=5)
    remote = prefill.remote("x", REMOTE, fence_slot=5)
    first.load(load_of("r", remote, LOCAL))
    assert first.outcomes.failed == set()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 600)
    monkeypatch.setattr("vllm_commext.nixl.prefill.lease_manager.time", later)
    prefill.wait_sent("x", [0])
    second.load(load_of("r", remote, LOCAL))
    assert second.outcomes.failed == {"r"}
    assert second.recorded["failures"] == {"expired": 1}


@SIZES
def test_a_rank_that_is_not_served_fails_the_load_when_the_others_have_ended(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines, size: int
) -> None:
    prefill = make_ranks("p", size, serve=False)
    prefill.serve(range(size - 1))
    prefill.hold("x")
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("x", REMOTE), LOCAL))
    assert_failed_once(decode, before, "handshake", log_lines)
    prefill.wait_sent("x", range(size - 1))
    prefill.server.close()
    prefill.serve(range(size))
    wait_for_back_off(decode)
    assert_works(decode, prefill, "next")


@SIZES
def test_a_rank_that_is_configured_otherwise_fails_the_load(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines, size: int
) -> None:
    prefill = make_ranks("p", size, facts_of={size - 1: {**FACTS, "model": "n"}})
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("x", REMOTE), LOCAL))
    assert_failed_once(decode, before, "configuration", log_lines)
    assert_works(decode, make_ranks("q", size, seed=7), "next")


@SIZES
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_rank_that_has_freed_its_blocks_fails_the_load(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines, size: int, which: str
) -> None:
    freed = 0 if which == "first" else size - 1
    prefill = make_ranks("p", size)
    for index, worker in enumerate(prefill.workers):
        worker.thread.submit(Hold("x", 0.01 if index == freed else 600.0, 5, 0))
    prefill.wait_sent("x", [freed])
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("x", REMOTE, fence_slot=5), LOCAL))
    assert_failed_once(decode, before, "expired", log_lines)
    prefill.wait_sent("x", set(range(size)) - {freed})
    assert_works(decode, prefill, "next")


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


def test_another_number_of_ranks_than_the_parameters_say_is_refused(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines
) -> None:
    """Else a router that drops ``tp_size`` would have half of the heads left out."""
    prefill = make_ranks("p", 2)
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("x", REMOTE, tp_size=1), LOCAL))
    assert_failed_once(decode, before, "request", log_lines)
    assert any("tp_size is 1" in line for line in log_lines.messages)
    assert_works(decode, prefill, "next")


def test_ranks_that_cannot_share_the_heads_are_refused(
    make_ranks: MakeRanks, decode: Any, log_lines: Lines
) -> None:
    prefill = make_ranks("p", 2)
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("x", REMOTE, tp_size=3), LOCAL))
    assert_failed_once(decode, before, "configuration", log_lines)
    (line,) = [line for line in log_lines.messages if "not loaded" in line]
    assert "4 cannot be dealt out evenly to 3" in line
    assert_works(decode, prefill, "next")
