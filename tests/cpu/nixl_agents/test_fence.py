"""Fenced reads between real agents: what was freed before or while it was read is never used."""

from collections.abc import Callable
from typing import Any

import pytest
from nixl_agents_harness import expected_after, load_of, same

from vllm_commext.nixl.fence import NUM_SLOTS
from vllm_commext.nixl.requests import Hold

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]


def test_a_held_request_is_read_and_then_released(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 600.0, 3, 0))
    expected = expected_after(decode.memory, prefill.memory, [(7, 9)])
    decode.load(load_of("r", prefill.remote("x", [9], fence_slot=3, fence_ticket=0), [7]))
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    assert prefill.agent.board.epochs[3] == 1


def test_parameters_used_twice_fail_the_second_time(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 600.0, 3, 0))
    remote = prefill.remote("x", [9], fence_slot=3, fence_ticket=0)
    decode.load(load_of("first", remote, [7]))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    decode.load(load_of("second", remote, [8]))
    assert decode.outcomes.failed == {"second"}
    assert decode.recorded["failures"] == {"expired": 1}


def test_a_lease_that_ran_out_is_noticed(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 0.05, 3, 4))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    decode.load(load_of("r", prefill.remote("x", [9], fence_slot=3, fence_ticket=4), [7]))
    assert decode.outcomes.failed == {"r"}
    assert decode.recorded["failures"] == {"expired": 1}


def test_a_slot_is_used_again(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    for ticket in range(3):
        prefill.thread.submit(Hold(f"x{ticket}", 600.0, 0, ticket))
        remote = prefill.remote(f"x{ticket}", [9], fence_slot=0, fence_ticket=ticket)
        decode.load(load_of(f"r{ticket}", remote, [7]))
        sent = {f"x{number}" for number in range(ticket + 1)}
        prefill.wait(lambda sent=sent: prefill.collect().sent == sent)
    assert decode.outcomes.failed == set()


def test_a_read_before_the_worker_hears_of_the_hold_is_right(make_engine: MakeEngine) -> None:
    """The scheduler frees nothing that its worker has not reported, so the read is safe."""
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    decode.load(load_of("r", prefill.remote("x", [9], fence_slot=5, fence_ticket=0), [7]))
    assert decode.outcomes.failed == set()
    prefill.thread.submit(Hold("x", 600.0, 5, 0))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    assert prefill.agent.board.epochs[5] == 1


def test_a_slot_that_the_peer_does_not_have(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", serve=True), make_engine("d", seed=2)
    decode.load(load_of("r", prefill.remote("x", [9], fence_slot=NUM_SLOTS), [7]))
    assert decode.outcomes.failed == {"r"}
    assert decode.recorded["failures"] == {"request": 1}


def test_a_fence_holds_until_the_release_and_not_after_it(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    for ticket in range(3):
        name = f"x{ticket}"
        prefill.thread.submit(Hold(name, 600.0, 7, ticket))
        expected = expected_after(decode.memory, prefill.memory, [(4, 9)])
        remote = prefill.remote(name, [9], fence_slot=7, fence_ticket=ticket)
        decode.load(load_of(f"first{ticket}", remote, [4]))
        assert f"first{ticket}" not in decode.outcomes.failed
        assert same(decode.memory, expected)
        prefill.wait(lambda name=name: name in prefill.collect().sent)
        decode.load(load_of(f"replay{ticket}", remote, [4]))
        assert f"replay{ticket}" in decode.outcomes.failed
    assert decode.recorded["failures"] == {"expired": 3}


def test_more_fences_than_cells(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    loads = [
        load_of(f"r{n}", prefill.remote(f"x{n}", [n % 24], fence_slot=n, fence_ticket=0), [n % 24])
        for n in range(1500)
    ]
    decode.load(*loads)
    assert decode.outcomes.failed == set()
