"""Loads that cannot go well: each ends as failed, with a line that says why, and the next one
works."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from nixl_agents_harness import FACTS, PeerProcess, expected_after, same

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl import wire
from vllm_commext.nixl.agent import NixlAgent
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.io_thread import GiveUp
from vllm_commext.nixl.requests import Hold, Load
from vllm_commext.testing.servers import free_port

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture


def assert_fails(decode: Any, load: Load, reason: str, lines: Lines, *words: str) -> None:
    """The load fails for one reason, with one line that has the words, and no byte moves."""
    before = [row.copy() for row in decode.memory]
    lines.clear()
    decode.load(load)
    assert load.request_id in decode.outcomes.failed
    assert same(decode.memory, before)
    about_it = [line for line in lines.messages if "KV cache not loaded" in line]
    assert len(about_it) == 1
    for word in (load.request_id, "'d'", *words):
        assert word in about_it[0]
    assert decode.recorded["failures"].pop(reason) == 1
    assert decode.recorded["failures"] == {}


def assert_works(decode: Any, prefill: Any, request_id: str = "works") -> None:
    """A load of blocks 3 and 1 into 0 and 2 moves the right bytes."""
    expected = expected_after(decode.memory, prefill.memory, [(0, 3), (2, 1)])
    decode.load(Load(request_id, prefill.remote(f"p-{request_id}", [3, 1]), [0, 2]))
    assert request_id not in decode.outcomes.failed
    assert same(decode.memory, expected)


@pytest.mark.parametrize("enforce", [True, False])
def test_other_facts(make_engine: MakeEngine, log_lines: Lines, enforce: bool) -> None:
    other = {**FACTS, "block_size": "32", "model": "n"}
    prefill = make_engine("p", facts=other, serve=True)
    decode = make_engine("d", seed=2, enforce_handshake_compat=enforce)
    words = ["block_size: decode '16', prefill '32'", "'p'"]
    if enforce:
        words.append("model: decode 'm', prefill 'n'")
    load = Load("r", prefill.remote("x", [1]), [1])
    assert_fails(decode, load, "handshake", log_lines, *words)
    friend = make_engine("p2", seed=3, serve=True)
    assert_works(decode, friend)


def test_a_tolerated_difference_is_logged(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", facts={**FACTS, "model": "n"}, serve=True)
    decode = make_engine("d", seed=2, enforce_handshake_compat=False)
    assert_works(decode, prefill)
    assert [line for line in log_lines.messages if "tolerated" in line and "'n'" in line]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_names": ["layer0", "layer1", "other"]}, ["'layer2'", "'other'"]),
        ({"num_layers": 2}, ["'layer2'"]),
        ({"block_bytes": 64}, ["96 bytes", "64"]),
    ],
)
def test_other_regions(
    make_engine: MakeEngine, log_lines: Lines, settings: dict[str, Any], words: list[str]
) -> None:
    prefill = make_engine("p", serve=True, **settings)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1]), [1])
    assert_fails(decode, load, "handshake", log_lines, *words)


def test_other_parallelism(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1], tp_size=2), [1])
    assert_fails(decode, load, "configuration", log_lines, "size 2", "1:", "--tensor-parallel-size")
    assert_works(decode, prefill)


def test_a_wrong_engine_id(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1], engine_id="q"), [1])
    assert_fails(decode, load, "handshake", log_lines, "'q'", "'p'")
    assert_works(decode, prefill)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"agent_metadata": b"garbage"}, "NIXL cannot use the metadata"),
        ({"agent_metadata": b""}, "NIXL cannot use the metadata"),
        ({"base_addresses": [1, 2, 3]}, "NIXL cannot use the metadata"),
        ({"base_addresses": [1 << 63, 1 << 62, 1 << 61]}, "NIXL cannot use the metadata"),
        ({"num_blocks": -1}, "NIXL cannot use the metadata"),
        ({"memory_type": "MOON"}, "NIXL cannot use the metadata"),
        ({"engine_id": "q"}, "'q'"),
        ({"tp_rank": 1}, "rank 1"),
    ],
)
def test_a_description_that_does_not_hold(
    make_engine: MakeEngine, log_lines: Lines, change: dict[str, Any], word: str
) -> None:
    prefill = make_engine("p")
    right = wire.open_description(wire.describe(prefill.description, "x"))
    prefill.serve(wire.encode_description(msgspec.structs.replace(right, **change)))
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1]), [1])
    assert_fails(decode, load, "handshake", log_lines, word, "'p'")
    assert_works(decode, make_engine("p2", seed=3, serve=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_nobody_answers(make_engine: MakeEngine, log_lines: Lines, host: str) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, handshake_timeout=1.0)
    port = free_port()
    load = Load("r", prefill.remote("x", [1], host=host, port=port), [1])
    assert_fails(decode, load, "handshake", log_lines, f"{host}:{port}", "within 1 s")


@pytest.mark.parametrize("host", ["a b", "half\ud800"])
def test_an_impossible_host(make_engine: MakeEngine, log_lines: Lines, host: str) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1], host=host), [1])
    assert_fails(decode, load, "handshake", log_lines, "not an address")
    assert_works(decode, prefill)


def test_an_engine_id_that_is_no_text(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1], engine_id="half\ud800"), [1])
    assert_fails(decode, load, "handshake", log_lines)
    assert_works(decode, prefill)


def test_more_unknown_engines_than_there_are_sockets(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, handshake_timeout=3.0)
    port = free_port()
    loads = [
        Load(f"r{n}", prefill.remote("x", [1], engine_id=f"q{n}", port=port), [1])
        for n in range(1200)
    ]
    decode.load(*loads)
    assert decode.outcomes.failed == {load.request_id for load in loads}
    assert_works(decode, prefill)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load("r", None, [1], refusal="the parameters are wrong"), ["the parameters are wrong"]),
        (Load("r", None, [1]), []),
    ],
)
def test_a_refused_load(
    make_engine: MakeEngine, log_lines: Lines, load: Load, words: list[str]
) -> None:
    decode = make_engine("d", seed=2)
    assert_fails(decode, load, "request", log_lines, *words)


@pytest.mark.parametrize(
    ("remote_ids", "local_ids", "first", "word"),
    [
        ([1, 24], [0, 1], 0, "remote block ids"),
        ([1, -1], [0, 1], 0, "remote block ids"),
        ([1, 1 << 63], [0, 1], 0, "remote block ids"),
        ([1, 2], [0, 24], 0, "local block ids"),
        ([1, 2], [0, 1, 2], 0, "offers 2 blocks"),
        ([1, 2], [0, 1], 1, "offers 2 blocks"),
        ([], [0], 0, "offers 0 blocks"),
    ],
)
def test_blocks_that_do_not_fit(
    make_engine: MakeEngine,
    log_lines: Lines,
    remote_ids: list[int],
    local_ids: list[int],
    first: int,
    word: str,
) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", remote_ids), local_ids, first)
    assert_fails(decode, load, "request", log_lines, word, "'p'")
    assert_works(decode, prefill)
    assert len(decode.recorded["handshake_seconds"]) == 1


def test_a_stale_incarnation(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    for name in ("before", "after"):
        load = Load(name, prefill.remote("x", [1], incarnation="older"), [1])
        assert_fails(decode, load, "request", log_lines, "restarted", "'p'")
        assert_works(decode, prefill, f"works-{name}")


def test_blocks_whose_lease_ran_out_are_not_used(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    prefill.thread.submit(Hold("x", 0.05, 7, 0))
    prefill.wait(lambda: prefill.collect().sent == {"x"})
    decode.load(Load("r", prefill.remote("x", [1], fence_slot=7, fence_ticket=0), [1]))
    assert decode.outcomes.failed == {"r"}
    assert decode.recorded["failures"] == {"expired": 1}
    assert [line for line in log_lines.messages if "request r of" in line]
    assert_works(decode, prefill)


def test_a_fence_holds_until_the_release_and_not_after_it(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    for ticket in range(3):
        name = f"x{ticket}"
        prefill.thread.submit(Hold(name, 600.0, 7, ticket))
        expected = expected_after(decode.memory, prefill.memory, [(4, 9)])
        remote = prefill.remote(name, [9], fence_slot=7, fence_ticket=ticket)
        decode.load(Load(f"first{ticket}", remote, [4]))
        assert f"first{ticket}" not in decode.outcomes.failed
        assert same(decode.memory, expected)
        prefill.wait(lambda name=name: name in prefill.collect().sent)
        decode.load(Load(f"replay{ticket}", remote, [4]))
        assert f"replay{ticket}" in decode.outcomes.failed
    assert decode.recorded["failures"] == {"expired": 3}


def test_more_fences_than_cells(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    loads = [
        Load(f"r{n}", prefill.remote(f"x{n}", [n % 24], fence_slot=n, fence_ticket=0), [n % 24])
        for n in range(1500)
    ]
    decode.load(*loads)
    assert decode.outcomes.failed == set()


@pytest.mark.parametrize("slot", [65536, 1 << 31])
def test_a_fence_that_is_none(make_engine: MakeEngine, log_lines: Lines, slot: int) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2)
    load = Load("r", prefill.remote("x", [1], fence_slot=slot), [1])
    assert_fails(decode, load, "request", log_lines, "remote_fence_slot")
    assert_works(decode, prefill)


def test_an_unknown_backend_is_refused_by_name() -> None:
    config = ConnectorConfig("127.0.0.1", 5600, backends=("UCX", "NOSUCH"))
    with pytest.raises(UnsupportedError, match="NOSUCH"):
        NixlAgent(config)


@pytest.mark.parametrize("incarnation_told", [True, False])
def test_a_killed_peer_and_its_successor(
    make_engine: MakeEngine, log_lines: Lines, incarnation_told: bool
) -> None:
    told = {} if incarnation_told else {"incarnation": ""}
    decode = make_engine("d", seed=2, handshake_timeout=2.0)
    with PeerProcess("p", seed=1) as first:
        assert_works(decode, first)
        first.kill()
        load = Load("r", first.remote("x", [1], **told), [1])
        assert_fails(decode, load, "handshake", log_lines, "'p'")
        with PeerProcess("p", seed=5, port=first.port) as second:
            expected = expected_after(decode.memory, second.memory, [(7, 9)])
            decode.load(Load("next", second.remote("y", [9], **told), [7]))
            assert "next" not in decode.outcomes.failed
            assert same(decode.memory, expected)
            assert_works(decode, second, "works too")


def test_a_successor_is_found_without_a_failure_between(make_engine: MakeEngine) -> None:
    decode = make_engine("d", seed=2)
    with PeerProcess("p", seed=1) as first:
        assert_works(decode, first)
        first.kill()
        with PeerProcess("p", seed=5, port=first.port) as second:
            expected = expected_after(decode.memory, second.memory, [(7, 9)])
            decode.load(Load("next", second.remote("y", [9], incarnation=""), [7]))
            assert decode.outcomes.failed == set()
            assert same(decode.memory, expected)


def test_a_stalled_peer_is_given_up_and_settles_when_it_goes_on(
    make_engine: MakeEngine, log_lines: Lines
) -> None:
    decode = make_engine("d", seed=2, transfer_timeout=1.0)
    with PeerProcess("p", seed=1) as peer:
        assert_works(decode, peer)
        peer.stop()
        decode.thread.submit(Load("r", peer.remote("x", [9]), [7]))
        decode.wait(lambda: decode.collect().late == {"r"})
        assert decode.outcomes.received == {"works"}
        decode.thread.submit(GiveUp("r"))
        decode.wait(lambda: "r" in decode.collect().received)
        assert decode.outcomes.failed == {"r"}
        assert decode.outcomes.settled == set()
        assert decode.recorded["failures"] == {"timeout": 1}
        assert_works(decode, make_engine("p2", seed=3, serve=True), "other")
        peer.go_on()
        decode.wait(lambda: decode.collect().settled == {"r"})
        assert decode.outcomes.failed == {"r"}
        assert_works(decode, peer, "recovered")


def test_a_peer_that_stalled_is_asked_anew_while_its_late_read_goes_on(
    make_engine: MakeEngine,
) -> None:
    decode = make_engine("d", seed=2, transfer_timeout=1.0)
    with PeerProcess("p", seed=1) as peer:
        assert_works(decode, peer)
        peer.stop()
        decode.thread.submit(Load("late", peer.remote("x", [9]), [7]))
        decode.wait(lambda: decode.collect().late == {"late"})
        decode.thread.submit(GiveUp("late"))
        expected = expected_after(decode.memory, peer.memory, [(7, 9), (8, 5)])
        decode.thread.submit(Load("second", peer.remote("y", [5]), [8]))
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


def test_giving_up_a_load_that_waits_for_its_peer(make_engine: MakeEngine) -> None:
    prefill = make_engine("p")
    decode = make_engine("d", seed=2, handshake_timeout=60.0)
    decode.thread.submit(Load("r", prefill.remote("x", [1]), [1]))
    decode.thread.submit(GiveUp("r"))
    decode.wait(lambda: decode.collect().settled == {"r"})
    assert decode.outcomes.failed == decode.outcomes.received == {"r"}
    prefill.serve(prefill.description)
    assert_works(decode, prefill)


def test_stop_is_bounded_while_a_read_is_under_way(make_engine: MakeEngine) -> None:
    decode = make_engine("d", seed=2)
    with PeerProcess("p", seed=1) as peer:
        assert_works(decode, peer)
        peer.stop()
        decode.thread.submit(Load("r", peer.remote("x", [9]), [7]))
        decode.thread.submit(Hold("h", 600.0))
        stopping = threading.Thread(target=decode.close)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive()
        names = [thread.name for thread in threading.enumerate()]
        assert "commext-transfer" not in names
        peer.go_on()
