"""Fenced reads between real agents: what was freed before or while it was read is never used."""

from collections.abc import Callable
from typing import Any

import pytest
from nixl_agents_harness import expected_after, same

from vllm_commext.nixl.fence import NUM_SLOTS
from vllm_commext.nixl.requests import Hold, Load

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]


def test_a_held_request_is_read_and_then_released(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 600.0, 3, 0))
    expected = expected_after(decode.memory, prefill.memory, [(7, 9)])
    decode.load(Load("r", prefill.remote("x", [9], fence_slot=3, fence_ticket=0), [7]))
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    assert prefill.agent.board.epochs[3] == 1


def test_parameters_used_twice_fail_the_second_time(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 600.0, 3, 0))
    remote = prefill.remote("x", [9], fence_slot=3, fence_ticket=0)
    decode.load(Load("first", remote, [7]))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    decode.load(Load("second", remote, [8]))
    assert decode.outcomes.failed == {"second"}
    assert decode.recorded["failures"] == {"expired": 1}


def test_a_lease_that_ran_out_is_noticed(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 0.05, 3, 4))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    decode.load(Load("r", prefill.remote("x", [9], fence_slot=3, fence_ticket=4), [7]))
    assert decode.outcomes.failed == {"r"}
    assert decode.recorded["failures"] == {"expired": 1}


def test_a_slot_is_used_again(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    for ticket in range(3):
        prefill.thread.submit(Hold(f"x{ticket}", 600.0, 0, ticket))
        remote = prefill.remote(f"x{ticket}", [9], fence_slot=0, fence_ticket=ticket)
        decode.load(Load(f"r{ticket}", remote, [7]))
        sent = {f"x{number}" for number in range(ticket + 1)}
        prefill.wait(lambda sent=sent: prefill.collect().sent == sent)
    assert decode.outcomes.failed == set()


def test_a_read_before_the_worker_hears_of_the_hold_is_right(make_engine: MakeEngine) -> None:
    """The scheduler frees nothing that its worker has not reported, so the read is safe."""
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    decode.load(Load("r", prefill.remote("x", [9], fence_slot=5, fence_ticket=0), [7]))
    assert decode.outcomes.failed == set()
    prefill.thread.submit(Hold("x", 600.0, 5, 0))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    assert prefill.agent.board.epochs[5] == 1


def test_a_slot_that_the_peer_does_not_have(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    decode.load(Load("r", prefill.remote("x", [9], fence_slot=NUM_SLOTS), [7]))
    assert decode.outcomes.failed == {"r"}
    assert decode.recorded["failures"] == {"request": 1}
