"""Loads that cannot go well: each ends as failed, with a line that says why, and the next one
works."""

import dataclasses
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cpu.nixl_agents.harness import FACTS, assert_fails, assert_works, load_of
from tests.kit.servers import free_port
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.transfer_thread import GiveUp
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire.description import describe, encode_description, open_description

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture


@contextmanager
def silence() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("enforce", [True, False])
def test_other_facts(make_engine: MakeEngine, log_lines: Lines, enforce: bool) -> None:
    other = {**FACTS, "dtype": "int8", "model": "n"}
    prefill = make_engine("p", facts=other, serve=True)
    decode = make_engine("d", seed=2, enforce_handshake_compat=enforce)
    words = ["dtype: decode 'uint8', prefill 'int8'", "'p'"]
    if enforce:
        words.append("model: decode 'm', prefill 'n'")
    load = load_of("r", prefill.remote("x", [1]), [1])
    assert_fails(decode, load, "configuration", log_lines, *words)
    friend = make_engine("p2", seed=3, serve=True)
    assert_works(decode, friend)


def test_a_tolerated_difference_is_logged(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", facts={**FACTS, "model": "n"}, serve=True)
    decode = make_engine("d", seed=2, enforce_handshake_compat=False)
    assert_works(decode, prefill)
    assert [line for line in log_lines.messages if "tolerated" in line and "'n'" in line]


HALF = "half\ud800"  # of a surrogate pair, which UTF-8 cannot write


@pytest.mark.parametrize(
    ("settings", "changes", "reason", "words"),
    [
        ({"num_heads": 4}, {}, "configuration", ["layer0", "num_heads is 2", "and 4 in the"]),
        ({}, {"engine_id": "q"}, "handshake", ["'q'", "'p'"]),
        ({}, {"engine_id": HALF}, "handshake", []),
        ({}, {"host": HALF}, "handshake", ["not an address"]),
        ({}, {"block_ids": ()}, "request", ["have 0 groups of blocks, expected 1", "'p'"]),
        ({}, {"fence_slot": 1 << 31}, "request", ["remote_fence_slot"]),
        ({}, {"block_ids": ((1 << 63,),)}, "request", ["remote block ids", "'p'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_another_engine_has_or_is_said_to_have(
    make_engine: MakeEngine,
    log_lines: Lines,
    settings: dict[str, Any],
    changes: dict[str, Any],
    reason: str,
    words: list[str],
) -> None:
    prefill = make_engine("p", serve=True, **settings)
    decode = make_engine("d", seed=2)
    remote = dataclasses.replace(prefill.remote("x", [1]), **changes)
    assert_fails(decode, load_of("r", remote, [1]), reason, log_lines, *words)
    assert_works(decode, make_engine("p2", seed=3, serve=True) if settings else prefill)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"agent_metadata": b"garbage"}, "NIXL cannot use the metadata"),
        ({"memory_type": "MOON"}, "NIXL cannot use the metadata"),
        ({"engine_id": "q"}, "'q'"),
    ],
)
def test_a_description_that_does_not_hold(
    make_engine: MakeEngine, log_lines: Lines, change: dict[str, Any], word: str
) -> None:
    prefill = make_engine("p")
    right = open_description(describe(prefill.description, "x"))
    prefill.serve(encode_description(replace(right, **change)))
    decode = make_engine("d", seed=2)
    load = load_of("r", prefill.remote("x", [1]), [1])
    assert_fails(decode, load, "handshake", log_lines, word, "'p'")
    assert_works(decode, make_engine("p2", seed=3, serve=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_nobody_answers(make_engine: MakeEngine, log_lines: Lines, host: str) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, handshake_timeout=1.0)
    port = free_port()
    load = load_of("r", prefill.remote("x", [1], host=host, port=port), [1])
    words = (f"{host}:{port}", "connection refused by")
    assert_fails(decode, load, "handshake", log_lines, *words)


def test_nothing_but_silence(make_engine: MakeEngine, log_lines: Lines) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, handshake_timeout=1.0)
    with silence() as port:
        load = load_of("r", prefill.remote("x", [1], port=port), [1])
        assert_fails(decode, load, "handshake", log_lines, f"127.0.0.1:{port}", "within 1 s")


def test_more_unknown_engines_than_there_are_sockets(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", serve=True)
    decode = make_engine("d", seed=2, handshake_timeout=3.0)
    port = free_port()
    loads = [
        load_of(f"r{n}", prefill.remote("x", [1], engine_id=f"q{n}", port=port), [1])
        for n in range(1200)
    ]
    decode.load(*loads)
    assert decode.outcomes.failed == {load.request_id for load in loads}
    assert_works(decode, prefill)


def test_a_refused_load(make_engine: MakeEngine, log_lines: Lines) -> None:
    decode = make_engine("d", seed=2)
    load = load_of("r", None, [1], refusal="the parameters are wrong")
    assert_fails(decode, load, "request", log_lines, load.refusal)


def test_an_unknown_backend_is_refused_by_name() -> None:
    config = ConnectorConfig("127.0.0.1", 5600, backends=("UCX", "NOSUCH"))
    with pytest.raises(UnsupportedError, match="NOSUCH"):
        NixlAgent(config)


def test_giving_up_a_load_that_waits_for_its_peer(make_engine: MakeEngine) -> None:
    prefill = make_engine("p")
    decode = make_engine("d", seed=2)
    with silence() as port:
        decode.thread.submit(load_of("r", prefill.remote("x", [1], port=port), [1]))
        decode.thread.submit(GiveUp("r"))
        decode.wait(lambda: decode.collect().settled == {"r"})
    assert decode.outcomes.failed == decode.outcomes.received == {"r"}
    prefill.serve(prefill.description)
    assert_works(decode, prefill)
