"""Prefill workers that are killed, restarted or stopped while a decode worker knows them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import (
    assert_works,
    expected_after,
    load_of,
    num_sockets,
    same,
    wait_for_back_off,
    wait_until,
)
from tests.cpu.nixl_agents.peer_process import PeerProcess
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.transfer_thread import GiveUp
from vllm_commext.nixl.wire.connection import CONNECT_SECONDS

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]


def test_a_peer_that_stalled_is_asked_anew_while_its_late_read_goes_on(
    make_engine: MakeEngine,
) -> None:
    decode = make_engine("d", seed=2, transfer_timeout=1.0)
    with PeerProcess("p", seed=1) as peer:
        assert_works(decode, peer)
        peer.stop()
        decode.thread.submit(load_of("late", peer.remote("x", [9]), [7]))
        decode.wait(lambda: decode.collect().late == {"late"})
        decode.thread.submit(GiveUp("late"))
        expected = expected_after(decode.memory, peer.memory, [(7, 9), (8, 5)])
        decode.thread.submit(load_of("second", peer.remote("y", [5]), [8]))
        decode.wait(
            lambda: bool(decode.collect()) and len(decode.recorded["handshake_seconds"]) > 1
        )
        peer.go_on()
        decode.wait(lambda: decode.collect().settled == {"late"})
        decode.wait(lambda: "second" in decode.collect().received)
        assert decode.outcomes.failed == {"late"}
        assert same(decode.memory, expected)
        assert_works(decode, peer, "third")
        assert decode.recorded["failures"] == {"timeout": 1}


@pytest.mark.parametrize(
    "handshake_timeout", [1.0, pytest.param(CONNECT_SECONDS + 1.0, marks=pytest.mark.long)]
)
def test_a_peer_that_stalls_again_and_again_keeps_one_connection(
    make_engine: MakeEngine, handshake_timeout: float
) -> None:
    """Whether no answer comes, or no connection."""
    settings = {
        "transfer_timeout": 1.0,
        "handshake_timeout": handshake_timeout,
        "backend_params": {"num_threads": "2"},
    }
    decode = make_engine("d", seed=2, **settings)
    with PeerProcess("p", seed=1, whole=True) as peer:
        assert_works(decode, peer)
        before = num_sockets()
        for stall in range(3):
            late, lost = f"late{stall}", f"lost{stall}"
            peer.stop()
            decode.thread.submit(load_of(late, peer.remote(late, [9]), [7]))
            decode.wait(lambda late=late: late in decode.collect().late)
            decode.thread.submit(GiveUp(late))
            decode.load(load_of(lost, peer.remote(lost, [5]), [8]))
            peer.go_on()
            decode.wait(lambda late=late: late in decode.collect().settled)
            wait_for_back_off(decode)
            assert_works(decode, peer, f"after{stall}")
        wait_until(lambda: num_sockets() <= before, f"{num_sockets()} sockets to be {before}")
        assert decode.recorded["failures"] == {"timeout": 3, "handshake": 3}


def test_stop_is_bounded_while_a_read_is_under_way(make_engine: MakeEngine) -> None:
    decode = make_engine("d", seed=2)
    with PeerProcess("p", seed=1) as peer:
        assert_works(decode, peer)
        peer.stop()
        decode.thread.submit(load_of("r", peer.remote("x", [9]), [7]))
        decode.thread.submit(Hold("h", 600.0))
        stopping = threading.Thread(target=decode.close)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive()
        names = [thread.name for thread in threading.enumerate()]
        assert "commext-transfer" not in names
        peer.go_on()
