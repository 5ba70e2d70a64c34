"""Whole prefill engines in processes of their own that are killed and come back, seen from a decode
worker that lives on."""

import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import (
    HOST,
    SlowReads,
    assert_fails,
    assert_works,
    load_of,
    num_sockets,
    states,
    wait_until,
)
from tests.cpu.nixl_agents.peer_process import PeerProcess
from tests.kit.servers import free_port
from vllm_commext.nixl.decode import links
from vllm_commext.nixl.decode.peers import PeerState
from vllm_commext.nixl.decode.reads import NUM_ROUNDS
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.transfer_thread import GiveUp

pytestmark = pytest.mark.timeout(600)

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture


def test_a_read_from_a_killed_peer_is_given_up_where_nixl_says_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = make_engine("d", seed=2)
    with PeerProcess("p", seed=1, whole=True) as peer:
        assert_works(decode, peer)
        slow = SlowReads(decode.agent, monkeypatch)
        decode.thread.submit(load_of("r", peer.remote("x", [9]), [7]))
        wait_until(lambda: slow.has_arrived, "the data")
        assert decode.collect().late == set()
        peer.kill()
        decode.wait(lambda: decode.collect().late == {"r"})
        decode.thread.submit(GiveUp("r"))
        decode.wait(lambda: "r" in decode.collect().received)
        assert decode.outcomes.failed == {"r"}
        assert decode.outcomes.settled == set()
        assert decode.recorded["failures"] == {"transfer": 1}
        assert states(decode) == {"lost": 1, "retired": 1}
        slow.end()
        decode.wait(lambda: decode.collect().settled == {"r"})
        wait_until(lambda: states(decode) == {"lost": 1}, "the end of the old connection")


def test_a_peer_that_was_killed_fails_requests_at_once_until_it_is_back(
    make_engine: MakeEngine, log_lines: Lines
) -> None:
    decode = make_engine("d", seed=2)
    with PeerProcess("p", seed=1, whole=True) as first:
        assert_works(decode, first)
        first.kill()
        wait_until(lambda: states(decode) == {"lost": 1}, "its port to refuse")
        assert not decode.thread._loader._peers._links._agents
        words = ("'p'", "connection refused by")
        assert_fails(
            decode, load_of("r1", first.remote("x", [1]), [1]), "handshake", log_lines, *words
        )
        again = load_of("r2", first.remote("x", [1]), [1])
        assert_fails(decode, again, "handshake", log_lines, *words)
        with PeerProcess("p", seed=5, port=first.port, whole=True) as second:
            assert_works(decode, second, "back")
            assert states(decode) == {"ready": 1}


def test_a_peer_that_drains_is_read_from_and_its_end_is_no_surprise(
    make_engine: MakeEngine, caplog: Lines
) -> None:
    drains = threading.Event()
    decode, peer = make_engine("d", seed=2), make_engine("p", seed=1)
    peer.serve(peer.description, drains.is_set)
    assert_works(decode, peer, "before")
    drains.set()
    wait_until(lambda: states(decode) == {"draining": 1}, "the word of it")
    assert_works(decode, peer, "while it drains")
    drains.clear()
    wait_until(lambda: states(decode) == {"ready": 1}, "the word that it is over")
    drains.set()
    wait_until(lambda: states(decode) == {"draining": 1}, "the word of the next one")
    with caplog.at_level(logging.INFO, logger="vllm.commext.nixl"):
        peer.server.close()
        said = "shut down after draining"
        wait_until(lambda: any(said in line for line in list(caplog.messages)), "the line of it")
    assert not any(" closed: " in line for line in caplog.messages)
    (known,) = decode.thread._loader._peers._peers.values()
    wait_until(lambda: known.state == PeerState.LOST, "its port to refuse")
    assert states(decode) == {"draining": 1}  # so that its end raises no alert


def test_peers_that_die_together_are_removed_and_swept_away(make_engine: MakeEngine) -> None:
    decode = make_engine("d", seed=2, backend_params={"num_threads": "2"})
    peers = decode.thread._loader._peers
    with (
        PeerProcess("p", seed=1, whole=True) as first,
        PeerProcess("q", seed=3, whole=True) as second,
    ):
        assert_works(decode, first, "first")
        assert_works(decode, second, "second")
        first.kill()
        second.kill()
        wait_until(lambda: states(decode) == {"lost": 2}, "their ports to refuse")
        wait_until(lambda: not peers._links._agents, "NIXL to forget both")
    assert not peers._links.live()
    assert_works(decode, make_engine("r", seed=4, serve=True), "third")
    wait_until(lambda: peers.sweeper._num_due <= NUM_ROUNDS - 3, "rounds of reads")
    assert_works(decode, make_engine("s", seed=5, serve=True), "fourth")


def test_a_peer_that_is_forgotten_and_needed_again_keeps_its_connection(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_commext.nixl.decode.peers.IDLE_SECONDS", 0.2)
    decode = make_engine("d", seed=2)
    peer = make_engine("p", seed=3, serve=True)
    counts: list[int] = []
    for turn in range(4):
        decode.load(load_of(f"r{turn}", peer.remote(f"p{turn}", [3]), [0]))
        wait_until(lambda: states(decode) == {}, "it to be forgotten")
        counts.append(num_sockets())
    wait_until(lambda: num_sockets() <= counts[0], f"{counts} sockets to be the first again")
    assert not decode.outcomes.failed
    assert not decode.thread._loader._peers._links._local_lists


def close_connections(server: SideChannelServer, *, reset: bool) -> None:
    """Let a server close its side channel's connections and live, with a reset as where its kernel
    has not heard from the other end."""
    for one in [*server._listener._connections]:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        one.shutdown(socket.SHUT_RD)


@pytest.mark.parametrize("reset", [True, False])
def test_a_peer_that_lives_and_whose_side_channel_closes_keeps_its_connection(
    make_engine: MakeEngine, reset: bool
) -> None:
    decode = make_engine("d", seed=2)
    peer = make_engine("p", seed=3, serve=True)
    assert_works(decode, peer)
    (known,) = decode.thread._loader._peers._peers.values()
    before = num_sockets()
    for turn in range(3):
        closing = known.channel._socket
        close_connections(peer.server, reset=reset)
        wait_until(lambda closing=closing: known.channel._socket is not closing, "it to be noticed")
        assert_works(decode, peer, f"turn{turn}")
    wait_until(lambda: states(decode) == {"ready": 1}, "the answer")
    wait_until(lambda: num_sockets() <= before, f"{num_sockets()} sockets to be {before}")


@pytest.mark.long
def test_a_peer_keeps_its_connection_where_one_of_its_addresses_ends(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_commext.nixl.decode.peers.IDLE_SECONDS", 2.0)
    decode = make_engine("d", seed=2)
    peer = make_engine("p", seed=3, serve=True)
    assert_works(decode, peer)
    before = num_sockets()
    port = free_port()
    other = SideChannelServer("p", peer.incarnation, HOST, port, {0: peer.description})
    decode.load(load_of("r", peer.remote("x", [9], port=port), [7]))
    other.close()
    wait_until(lambda: states(decode) == {}, "both addresses to be forgotten")
    assert_works(decode, peer, "again")
    assert decode.outcomes.failed == set()
    wait_until(lambda: num_sockets() <= before, f"{num_sockets()} sockets to be {before}")


@pytest.mark.long
def test_a_peer_that_was_late_and_is_not_needed_keeps_its_connection(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told of blocks on offer, so nobody has asked whether it lives."""
    monkeypatch.setattr("vllm_commext.nixl.decode.peers.IDLE_SECONDS", 1.0)
    settings = {"reuse_blocks": True, "transfer_timeout": 1.0}
    decode = make_engine("d", seed=2, **settings)
    peer = make_engine("p", seed=3, serve=True, **settings)
    assert_works(decode, peer)
    before = num_sockets()
    slow = SlowReads(decode.agent, monkeypatch)
    decode.thread.submit(load_of("late", peer.remote("x", [9], generations=(1,)), [7]))
    decode.wait(lambda: "late" in decode.collect().late)
    decode.thread.submit(GiveUp("late"))
    wait_until(lambda: states(decode) == {"suspect": 1}, "doubt")
    slow.end()
    wait_until(lambda: states(decode) == {}, "it to be forgotten")
    assert_works(decode, peer, "again")
    wait_until(lambda: num_sockets() <= before, f"{num_sockets()} sockets to be {before}")


def test_a_release_that_cannot_be_written_ends_no_connection(
    make_engine: MakeEngine, log_lines: Lines
) -> None:
    decode, peer = make_engine("d", seed=2), make_engine("p", seed=3, serve=True)
    assert_works(decode, peer)
    before = num_sockets()
    decode.load(load_of("r", peer.remote("half\ud800", [9]), [7]))  # UTF-8 has no half pairs
    wait_until(lambda: any("was not told" in one for one in log_lines.messages), "the line of it")
    assert_works(decode, peer, "again")
    assert states(decode) == {"ready": 1}
    assert decode.outcomes.failed == set()
    wait_until(lambda: num_sockets() <= before, f"{num_sockets()} sockets to be {before}")


def test_few_agents_are_kept_for_peers_that_may_be_needed_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_KEPT", 2)
    monkeypatch.setattr("vllm_commext.nixl.decode.peers.IDLE_SECONDS", 1.0)
    decode = make_engine("d", seed=2)
    agents = decode.thread._loader._peers._links._agents
    for number in range(4):
        assert_works(decode, make_engine(f"p{number}", seed=3, serve=True), f"r{number}")
        wait_until(lambda: states(decode) == {}, "it to be forgotten")
        assert len(agents) == min(number + 1, 2)


def test_the_peer_that_was_needed_least_recently_makes_room(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_commext.nixl.decode.peers.MAX_PEERS", 2)
    decode = make_engine("d", seed=2)
    peers = [make_engine(f"p{number}", seed=number, serve=True) for number in range(3)]
    loader = decode.thread._loader
    known = loader._peers._peers
    for turn, number in enumerate((0, 1, 0, 2, 0, 1)):
        assert_works(decode, peers[number], f"r{turn}")
        # A load is reported before its peer is let go, which alone can make room, and released
        # later, for which the peer is needed once more.
        wait_until(lambda: not len(loader.uses), "the release")
        wait_until(lambda: all(peer.is_idle for peer in list(known.values())), "nothing under way")
        assert sum(states(decode).values()) == min(turn + 1, 2)
    assert len(decode.recorded["handshake_seconds"]) == 4
