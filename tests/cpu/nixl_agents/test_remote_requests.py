"""One remote request in all that can happen to it: several loads of it, loads that fail before a
byte moves, links that break while others wait for them, and more bytes than the link takes."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import (
    BLOCK_BYTES,
    BOUND_SECONDS,
    SlowReads,
    assert_works,
    expected_after,
    load_of,
    same,
    wait_for_back_off,
    wait_until,
)
from vllm_commext.nixl import transfer_thread
from vllm_commext.nixl.decode import peers, transfers
from vllm_commext.nixl.requests import Hold, Wait
from vllm_commext.nixl.transport import posting
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
NUM_LAYERS = 3


def hold(prefill: Any, name: str, slot: int) -> Any:
    """A finished prefill of block 9 whose fence's nonce is 0."""
    prefill.thread.submit(Hold(name, 600.0, slot, 0))
    return prefill.remote(name, [9], fence_slot=slot)


def nothing_left(decode: Any) -> bool:
    loader = decode.thread._loader
    return not loader.uses and not loader.uses._uses and not loader._reads


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["together", "apart"])
def test_several_loads_of_one_remote_request(make_engine: MakeEngine, seconds: float) -> None:
    """The samples of a request with ``n`` > 1, as a router that knows nothing of it passes them
    on."""
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    assert_works(make_engine("other", seed=3), prefill)
    for turn in range(5):
        remote = hold(prefill, f"x{turn}", turn)
        names = [f"r{turn}-{number}" for number in range(3)]
        for block, name in enumerate(names):
            decode.thread.submit(load_of(name, remote, [block]))
            time.sleep(seconds)
        decode.wait(lambda names=names: set(names) <= decode.collect().received)
        prefill.wait(lambda turn=turn: f"x{turn}" in prefill.collect().sent)
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected_after(decode.memory, prefill.memory, [(0, 9), (2, 9)]))
    wait_until(lambda: nothing_left(decode), "the end of all transfers")


def test_a_remote_request_is_kept_for_one_that_waits(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "RELEASE_DELAY_SECONDS", 0.0)
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    remote = hold(prefill, "x", 3)
    decode.thread.submit(Wait("later", remote))
    decode.load(load_of("r", remote, [1]))
    prefill.thread.submit(Hold("probe", 0.3))
    prefill.wait(lambda: "probe" in prefill.collect().sent)
    assert prefill.outcomes.sent == {"probe"}
    decode.load(load_of("later", remote, [2]))
    prefill.wait(lambda: "x" in prefill.collect().sent)
    assert decode.outcomes.failed == set()


@pytest.mark.parametrize("change", [{"block_ids": ((99,),)}, {"fence_slot": 1 << 20}])
def test_a_load_that_fails_releases_at_once(
    make_engine: MakeEngine, change: dict[str, Any]
) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 600.0))
    decode.load(load_of("r", replace(prefill.remote("x", [1]), **change), [1]))
    prefill.wait(lambda: "x" in prefill.collect().sent)
    assert decode.recorded["failures"] == {"request": 1}
    wait_until(lambda: nothing_left(decode), "the end of all transfers")


def raise_once(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a function raise at its next call and only then."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        patch.setattr(owner, name, original)
        raise RuntimeError(f"broken {name}")

    patch.setattr(owner, name, call)


@pytest.mark.parametrize("where", ["make_connection", "prep_xfer_dlist", "log_ready"])
def test_a_connection_that_fails_half_way_leaves_nothing_behind(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The agent is loaded, or its lists are prepared, and then something raises."""
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    nixl = decode.agent._agent
    made: list[Any] = []
    given_back: list[Any] = []
    for make, give in (
        ("add_remote_agent", "remove_remote_agent"),
        ("prep_xfer_dlist", "release_dlist_handle"),
    ):
        add, remove = getattr(nixl, make), getattr(nixl, give)
        monkeypatch.setattr(nixl, make, lambda *args, add=add: made.append(add(*args)) or made[-1])
        monkeypatch.setattr(
            nixl, give, lambda one, remove=remove: (given_back.append(one), remove(one))
        )
    raise_once(monkeypatch, peers if where == "log_ready" else nixl, where)
    decode.load(load_of("r", prefill.remote("x", [1]), [1]))
    assert decode.outcomes.failed == {"r"}
    assert len(made) >= 1
    wait_until(lambda: made == given_back[::-1], f"{given_back} to be all of {made}")
    wait_for_back_off(decode)
    assert_works(decode, prefill)


def test_a_first_read_that_cannot_be_posted_leaves_the_lists_to_the_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parts wait for one handshake, and the first of them finds the link broken."""
    prefill = make_engine("p", serve=False)
    decode = make_engine("d", seed=2)
    released: list[Any] = []
    used: list[Any] = []
    release, make_read, post = (
        decode.agent.release_list,
        decode.agent.make_read,
        decode.agent.post,
    )
    failures = [1]

    def make(local: Any, *rest: Any) -> Any:
        used.extend(one for one in (local, rest[1]) if one in released)
        return make_read(local, *rest)

    def fail_once(read: Any) -> str:
        if failures:
            raise RuntimeError(f"broken {failures.pop()}")
        return post(read)

    monkeypatch.setattr(
        decode.agent, "release_list", lambda one: (released.append(one), release(one))
    )
    monkeypatch.setattr(decode.agent, "make_read", make)
    monkeypatch.setattr(decode.agent, "post", fail_once)
    expected = expected_after(decode.memory, prefill.memory, [(n, n) for n in range(5)])
    prefill.serve(prefill.description)
    for number in range(5):
        decode.thread.submit(
            load_of(f"r{number}", prefill.remote(f"x{number}", [number]), [number])
        )
    decode.wait(lambda: len(decode.collect().received) == 5)
    assert not failures
    assert used == []
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)


class ThrottledLink:
    """NIXL behind a link of so many bytes a second that it serves its reads in turn: they are real,
    and their ends are told when the link would have moved their bytes."""

    def __init__(self, agent: Any, patch: Any, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._free_at = 0.0
        self._ends: dict[int, float] = {}
        self._sizes: dict[int, int] = {}
        self._make, self._post, self._state = agent.make_read, agent.post, agent.state
        patch.setattr(agent, "make_read", self._note)
        patch.setattr(agent, "post", self._begin)
        patch.setattr(agent, "state", self._look)

    def _note(self, local: Any, indices: Any, *rest: Any) -> Any:
        read = self._make(local, indices, *rest)
        self._sizes[id(read)] = len(indices) * BLOCK_BYTES
        return read

    def _begin(self, read: Any) -> str:
        seconds = self._sizes.pop(id(read), 0) * self._seconds_per_byte
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        self._ends[id(read)] = self._free_at
        return self._post(read)

    def _look(self, read: Any) -> str:
        state = self._state(read)
        if state == DONE and time.perf_counter() < self._ends.get(id(read), 0.0):
            return IN_PROGRESS
        return state


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_burst_of_many_times_what_the_link_moves_in_a_timeout(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    num_loads, num_blocks, timeout = 6 * times, 20, 2.0
    load_bytes = num_blocks * NUM_LAYERS * BLOCK_BYTES
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, transfer_timeout=timeout, max_bytes_in_flight=2 * load_bytes)
    assert_works(decode, prefill)
    ThrottledLink(decode.agent, monkeypatch, num_loads * load_bytes / (times * timeout))
    expected = expected_after(decode.memory, prefill.memory, [(n, n) for n in range(num_blocks)])
    blocks = list(range(num_blocks))
    begun = time.monotonic()
    decode.load(
        *(load_of(f"r{n}", prefill.remote(f"x{n}", blocks), blocks) for n in range(num_loads))
    )
    assert time.monotonic() - begun >= (times - 1) * timeout
    assert decode.outcomes.late == set()
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)


def test_a_read_that_moves_on_is_not_late(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One load that takes twice the limit, of which a piece arrives each eighth of that time."""
    num_blocks, timeout = 16, 2.0
    num_descriptors = num_blocks * NUM_LAYERS
    monkeypatch.setattr(posting, "MAX_DESCRIPTORS", num_descriptors // 8)
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, transfer_timeout=timeout)
    assert_works(decode, prefill)
    ThrottledLink(decode.agent, monkeypatch, num_descriptors * BLOCK_BYTES / (2 * timeout))
    blocks = list(range(num_blocks))
    begun = time.monotonic()
    decode.load(load_of("r", prefill.remote("x", blocks), blocks))
    assert time.monotonic() - begun > 1.5 * timeout
    assert decode.outcomes.late == decode.outcomes.failed == set()
    expected = expected_after(decode.memory, prefill.memory, [(n, n) for n in blocks])
    assert same(decode.memory, expected)


def test_a_load_is_read_as_soon_as_the_ones_before_it_have_made_room(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for room needs nothing else to happen in the thread, which is at rest for as long
    as it likes when nothing is under way."""
    for name in ("LEASED_WAIT_SECONDS", "DUTY_WAIT_SECONDS", "IDLE_WAIT_SECONDS"):
        monkeypatch.setattr(transfer_thread, name, 10 * BOUND_SECONDS)
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, max_bytes_in_flight=1)
    assert_works(decode, prefill)
    expected = expected_after(decode.memory, prefill.memory, [(n, 1) for n in range(4)])
    decode.load(*(load_of(f"r{n}", prefill.remote(f"x{n}", [1]), [n]) for n in range(4)))
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)


def test_loads_behind_a_link_that_stands_still_fail_together(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is under way and is late; the others, whose turn has not come, have nothing to settle."""
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, transfer_timeout=1.0, max_bytes_in_flight=1)
    assert_works(decode, prefill)
    slow = SlowReads(decode.agent, monkeypatch)
    for number in range(4):
        decode.thread.submit(load_of(f"r{number}", prefill.remote(f"x{number}", [1]), [number]))
    decode.wait(lambda: decode.collect().failed == {"r1", "r2", "r3"})
    assert "r0" in decode.outcomes.late
    assert not decode.outcomes.late & decode.outcomes.failed
    assert decode.recorded["failures"] == {"timeout": 3}
    slow.end()
    decode.wait(lambda: "r0" in decode.collect().received)
    assert_works(decode, prefill, "after")


def test_a_thread_that_cannot_be_set_up_fails_each_load_with_the_reason(
    make_engine: MakeEngine, log_lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = make_engine("p", serve=True)
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    decode = make_engine("d", seed=2)
    monkeypatch.undo()

    def fail() -> None:
        raise RuntimeError("no such device")

    decode.thread._on_start = fail
    decode.thread.start()
    prefill.thread.submit(Hold("x", 600.0))
    decode.load(load_of("r", prefill.remote("x", [1]), [1]))
    assert decode.outcomes.failed == {"r"}
    assert decode.recorded["failures"] == {"internal": 1}
    assert any("no such device" in line for line in log_lines.messages if "not loaded" in line)
    prefill.wait(lambda: "x" in prefill.collect().sent)
