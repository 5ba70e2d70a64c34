"""Fenced reads between real agents: what was freed before or while it was read is never used."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import expected_after, load_of, same
from vllm_commext.nixl.prefill.fence import KEY_BYTES, FenceSlots
from vllm_commext.nixl.requests import Hold

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture
KEY, LATER_KEY = bytes(KEY_BYTES), b"\1" * KEY_BYTES


class Pair:
    """A prefill worker with the slots of its scheduler side, and a decode worker."""

    def __init__(self, make_engine: MakeEngine, key: bytes = KEY, num_slots: int = 4) -> None:
        self.prefill = make_engine("p", serve=True)
        self.decode = make_engine("d", seed=2)
        self.slots = FenceSlots(key, num_slots)
        self.taken: dict[str, int] = {}
        self.prefill.tables.fences.arm(key)

    def remote(self, name: str, lease_seconds: float = 600.0, **changes: Any) -> Any:
        """A finished prefill of block 9, which is held."""
        slot, nonce = self.slots.take() or (-1, 0)
        self.taken[name] = slot
        self.prefill.thread.submit(Hold(name, lease_seconds, slot, nonce))
        return self.prefill.remote(
            name, [9], **{"fence_slot": slot, "fence_nonce": nonce, **changes}
        )

    def wait_freed(self, name: str) -> None:
        """Until the worker has reported the request and the scheduler has heard of it."""
        self.prefill.wait(lambda: name in self.prefill.collect().sent)
        self.slots.give_back(self.taken.pop(name))


@pytest.fixture
def pair(make_engine: MakeEngine) -> Pair:
    return Pair(make_engine)


def assert_reads(pair: Pair, name: str, remote: Any) -> None:
    """The load is right, and the blocks are freed."""
    expected = expected_after(pair.decode.memory, pair.prefill.memory, [(7, 9)])
    pair.decode.load(load_of(f"of-{name}", remote, [7]))
    assert f"of-{name}" not in pair.decode.outcomes.failed
    assert same(pair.decode.memory, expected)
    pair.wait_freed(name)


def assert_refused(pair: Pair, name: str, remote: Any, lines: Lines, *words: str) -> None:
    """The load fails as expired, with one line; what was read is not used."""
    lines.clear()
    pair.decode.load(load_of(name, remote, [8]))
    assert name in pair.decode.outcomes.failed
    (line,) = [line for line in lines.messages if "KV cache not loaded" in line]
    for word in (name, "'p'", *words):
        assert word in line
    assert pair.decode.recorded["failures"] == {"expired": 1}
    pair.decode.recorded["failures"] = {}


def test_parameters_used_twice_fail_also_when_others_have_their_slot(
    make_engine: MakeEngine, log_lines: Lines
) -> None:
    pair = Pair(make_engine, num_slots=1)
    remotes = []
    for number in range(3):
        remotes.append(pair.remote(f"x{number}"))
        assert {remote.fence_slot for remote in remotes} == {0}
        for old, remote in enumerate(remotes[:-1]):
            assert_refused(pair, f"replay-{number}-{old}", remote, log_lines)
        assert_reads(pair, f"x{number}", remotes[-1])
    assert_refused(pair, "again", remotes[-1], log_lines, "its parameters were used twice")


def test_a_lease_that_ran_out_is_noticed(pair: Pair, log_lines: Lines) -> None:
    remote = pair.remote("x", lease_seconds=0.05)
    pair.wait_freed("x")
    assert pair.prefill.recorded["expired_requests"] == 1
    pair.prefill.wait(lambda: "request x: its blocks were kept for" in log_lines.text)
    assert_refused(pair, "r", remote, log_lines, "came later than kv_lease_duration")


@pytest.mark.parametrize("tells", [True, False])
def test_parameters_from_before_a_restart_of_the_same_engine(
    make_engine: MakeEngine, log_lines: Lines, tells: bool
) -> None:
    """Also where a router drops the incarnation: the nonces of two starts differ."""
    pair = Pair(make_engine)
    old = pair.remote("x") if tells else pair.remote("x", incarnation="")
    pair.prefill.close()
    later = make_engine("p", serve=True, port=pair.prefill.port)
    later.tables.fences.arm(LATER_KEY)
    pair.prefill, pair.slots = later, FenceSlots(LATER_KEY, 4)
    new = pair.remote("x")
    assert_refused(pair, "replay", old, log_lines, "restarted" if tells else "used twice")
    assert_reads(pair, "x", new)
