"""What goes wrong between a prefill and a decode engine: each gives one clear line, the policy is
followed, and both servers go on serving.

One prefill server, and a decode server for each policy. Correct answers come from the prefill
server itself, asked without request parameters.
"""

import random
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.kit import cluster
from tests.kit.crossed import crossed
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import CompletionError, compare, complete, prefill
from tests.kit.servers import LOOPBACK, VllmServer, free_port

LEASE_SECONDS = 20
HANDSHAKE_SECONDS = 4
LOG_SECONDS = 30
EXPIRY_SECONDS = 60
# Few enough for a test to make the prefill server use each of them again.
PREFILL_BLOCKS = 160
LONG = 900
FAILURES = "vllm:commext_nixl_failures_total"
POLICIES = ("recompute", "fail")


@dataclass
class Engines:
    """The servers, and where the prefill server's side channel listens."""

    prefill: VllmServer
    decode: dict[str, VllmServer]
    side_channel_port: int


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("faults")
    config = cluster.kv_transfer_config("kv_producer", extra={"kv_lease_duration": LEASE_SECONDS})
    args = ("--num-gpu-blocks-override", str(PREFILL_BLOCKS))
    prefill_server = cluster.engine_server("prefill", model, folder, config, args=args)
    decode = {
        policy: cluster.engine_server(
            f"decode-{policy}",
            model,
            folder,
            cluster.kv_transfer_config(
                "kv_consumer", policy=policy, extra={"handshake_timeout": HANDSHAKE_SECONDS}
            ),
        )
        for policy in POLICIES
    }
    servers = [prefill_server, *decode.values()]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()
        port = config["kv_connector_extra_config"]["side_channel_port"]
        yield Engines(prefill_server, decode, port)


_rng = random.Random(7)


def new_prompt(num_tokens: int = 100) -> tuple[int, ...]:
    return tuple(_rng.randrange(32, 127) for _ in range(num_tokens))


def assert_serves(engines: Engines, policy: str) -> None:
    """An ordinary disaggregated request is answered right, and over NIXL."""
    prompt, decode = new_prompt(), engines.decode[policy]
    before = scrape(decode.url)
    got = cluster.disaggregated(engines.prefill.url, decode.url, cluster.MODEL_NAME, prompt)
    assert compare(complete(engines.prefill.url, cluster.MODEL_NAME, prompt), got).equal
    added = wait_for_added(decode.url, before, "vllm:commext_nixl_blocks_total", at_least=4)
    assert added.total("vllm:commext_nixl_blocks_total") == 4


# First in this file: requests that fail below leave blocks too, whose leases end at some time.
def test_blocks_that_nobody_fetches_are_freed_and_never_read_afterwards(engines: Engines) -> None:
    expired = "vllm:commext_nixl_expired_requests_total"
    before, start = scrape(engines.prefill.url), len(engines.prefill.log_text())
    prompt = new_prompt()
    expected = complete(engines.prefill.url, cluster.MODEL_NAME, prompt)
    params = prefill(engines.prefill.url, cluster.MODEL_NAME, prompt)
    line = engines.prefill.wait_for_log("its blocks were kept", EXPIRY_SECONDS, start)
    assert params["remote_request_id"] in line
    (seconds,) = re.findall(r"were kept for ([\d.]+) s", line)
    assert float(seconds) >= LEASE_SECONDS
    for _ in range(2 * PREFILL_BLOCKS * cluster.BLOCK_SIZE // LONG):
        complete(engines.prefill.url, cluster.MODEL_NAME, new_prompt(LONG), max_tokens=1)
    added = wait_for_added(engines.prefill.url, before, expired, at_least=1)
    assert added.total(expired) == 1
    extra = {"kv_transfer_params": params}
    recomputing, failing = (engines.decode[policy] for policy in POLICIES)
    before = scrape(recomputing.url)
    got = complete(recomputing.url, cluster.MODEL_NAME, prompt, extra=extra)
    assert compare(expected, got).equal, "blocks were read after another request had got them"
    added = wait_for_added(recomputing.url, before, FAILURES, at_least=1)
    assert added.total(FAILURES, reason="expired") == 1
    with pytest.raises(CompletionError):
        complete(failing.url, cluster.MODEL_NAME, prompt, extra=extra)
    for policy in POLICIES:
        assert_serves(engines, policy)


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "wrong engine id": ({"remote_engine_id": "nobody"}, "handshake", "is for engine 'nobody'"),
    "closed port": ({"remote_port": "closed"}, "handshake", "connection refused by"),
    "unknown host": (
        {"remote_host": "no.such.host.invalid"},
        "handshake",
        "connection refused by",
    ),
    "too few blocks": ({"remote_block_ids": [[1]]}, "request", "offers 1 blocks of"),
    "blocks out of range": ({"remote_block_ids": [[10**9] * 4]}, "request", "expected 0 to"),
    "blocks of a wrong type": ({"remote_block_ids": "1, 2"}, "request", "kv_transfer_params"),
    "another start": ({"remote_incarnation": "earlier"}, "expired", "was restarted"),
    "another nonce": ({"remote_fence_nonce": "0" * 16}, "expired", "used twice or altered"),
    "no fence": ({"remote_fence_slot": -1}, "request", "dropped remote_fence_slot"),
}


@pytest.mark.parametrize(("fault", "policy"), crossed(list(FAULTS), POLICIES))
def test_a_wrong_parameter(engines: Engines, policy: str, fault: str) -> None:
    changes, reason, text = FAULTS[fault]
    if changes.get("remote_port") == "closed":
        changes = {"remote_port": free_port()}
    decode, prompt = engines.decode[policy], new_prompt()
    before, start = scrape(decode.url), len(decode.log_text())
    if policy == "recompute":
        got = cluster.disaggregated(
            engines.prefill.url, decode.url, cluster.MODEL_NAME, prompt, changes=changes
        )
        assert compare(complete(engines.prefill.url, cluster.MODEL_NAME, prompt), got).equal
    else:
        with pytest.raises(CompletionError) as refused:
            cluster.disaggregated(
                engines.prefill.url, decode.url, cluster.MODEL_NAME, prompt, changes=changes
            )
        assert refused.value.status == 500
    assert text in decode.wait_for_log("KV cache not loaded", LOG_SECONDS, start)
    # An engine reports with its next step, and after a failed request there is none of itself.
    complete(decode.url, cluster.MODEL_NAME, new_prompt(8), max_tokens=2)
    added = wait_for_added(decode.url, before, FAILURES, at_least=1)
    # Under "fail" vLLM asks to release the remote blocks as well; that is not counted as a load.
    assert added.total(FAILURES, reason=reason) == added.total(FAILURES) == 1
    assert_serves(engines, policy)


def test_garbage_on_the_side_channel(engines: Engines) -> None:
    start = len(engines.prefill.log_text())
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{LOOPBACK}:{engines.side_channel_port}")
        for frame in (b"", b"garbage", b"\xff" * 1000, b"\x81\xa4type\xa4none"):
            dealer.send(frame)
            assert dealer.poll(10_000), f"no answer to {frame[:10]!r}"
            dealer.recv_multipart()
    with socket.create_connection((LOOPBACK, engines.side_channel_port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 10_000)
    assert "refused a frame" in engines.prefill.wait_for_log("side channel", LOG_SECONDS, start)
    # A wrong engine id makes the decode engine ask anew, so this needs a listener that still lives.
    test_a_wrong_parameter(engines, "recompute", "wrong engine id")


def test_a_request_for_the_wrong_role_is_served_as_an_ordinary_one(engines: Engines) -> None:
    prompt = new_prompt()
    params = prefill(engines.prefill.url, cluster.MODEL_NAME, prompt)
    start = len(engines.prefill.log_text())
    extra = {"kv_transfer_params": params}
    got = complete(engines.prefill.url, cluster.MODEL_NAME, prompt, extra=extra)
    assert compare(complete(engines.prefill.url, cluster.MODEL_NAME, prompt), got).equal
    assert "kv_producer" in engines.prefill.wait_for_log("do_remote_prefill", LOG_SECONDS, start)
    assert_serves(engines, "fail")
