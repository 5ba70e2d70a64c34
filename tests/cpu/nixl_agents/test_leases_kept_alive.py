"""Heartbeats between real agents: what is waited for or read is kept, as long as its reader says so
and is believed."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import SlowReads, expected_after, load_of, same, wait_until
from vllm_commext.nixl.requests import Hold, Wait
from vllm_commext.nixl.transfer_thread import DUTY_WAIT_SECONDS, IDLE_WAIT_SECONDS

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
# A busy machine may leave heartbeats waiting for long: a lease is much longer than that.
LEASE_SECONDS = 8.0
WAIT_SECONDS = 4.0


@pytest.mark.parametrize("beats", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_read_slower_than_the_lease(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    prefill = make_engine("p", serve=True, kv_lease_duration=LEASE_SECONDS)
    decode = make_engine("d", seed=2)
    if not beats:
        monkeypatch.setattr("vllm_commext.nixl.decode.uses.KeepAlive.send_due", lambda self: None)
    slow = SlowReads(decode.agent, monkeypatch)
    expected = expected_after(decode.memory, prefill.memory, [(7, 9)])
    remote = prefill.remote("x", [9], fence_slot=3)
    decode.thread.submit(load_of("r", remote, [7]))
    prefill.thread.submit(Hold("x", LEASE_SECONDS if beats else 1.0, 3, 0))
    wait_until(lambda: slow.has_arrived, "the data")
    if beats:
        time.sleep(1.2 * LEASE_SECONDS)
        assert prefill.collect().sent == set()
    else:
        prefill.wait(lambda: prefill.collect().sent == {"x"})
    slow.end()
    decode.wait(lambda: decode.collect().received == {"r"})
    assert decode.outcomes.failed == (set() if beats else {"r"})
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    if beats:
        assert same(decode.memory, expected)
        assert prefill.recorded["heartbeats"] > 0
        assert prefill.recorded["expired_requests"] == 0
    else:
        assert decode.recorded["failures"] == {"expired": 1}


def test_a_request_that_waits_is_kept_and_no_longer_than_it_may_be(make_engine: MakeEngine) -> None:
    prefill = make_engine(
        "p", serve=True, kv_lease_duration=0.6, kv_lease_max_duration=1.5 * WAIT_SECONDS
    )
    decode = make_engine("d", seed=2)
    begun = time.monotonic()
    remote = prefill.remote("x", [9], fence_slot=3)
    decode.thread.submit(Wait("r", remote))
    wait_until(lambda: decode.recorder.take() is not None, "the handshake")
    prefill.thread.submit(Hold("x", WAIT_SECONDS, 3, 0))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    assert time.monotonic() - begun >= 1.5 * WAIT_SECONDS
    assert prefill.recorded["heartbeats"] > 1
    decode.load(load_of("r", remote, [7]))
    assert decode.outcomes.failed == {"r"}


def test_who_has_no_duties_looks_once_a_second(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    remote = prefill.remote("x", [9])
    decode.thread.submit(Wait("r", remote))
    wait_until(lambda: decode.thread._wait_seconds == DUTY_WAIT_SECONDS, "the handshake's end")
    decode.load(load_of("r", remote, [7]))
    wait_until(lambda: decode.thread._wait_seconds == IDLE_WAIT_SECONDS, "the load's end")
    looks: list[int] = []
    monkeypatch.setattr(decode.agent, "notifications", lambda: looks.append(1) or [])
    begun = time.monotonic()
    wait_until(lambda: len(looks) >= 6, "six looks")
    # A tenth of that where it looks as often as for its duties; a busy machine only adds to it.
    assert time.monotonic() - begun >= 3 * IDLE_WAIT_SECONDS
