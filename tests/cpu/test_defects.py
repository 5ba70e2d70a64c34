"""What goes wrong with vLLM's NixlConnector between real servers, one test a defect.

    COMMEXT_TEST_CONNECTOR=vllm COMMEXT_TEST_LONG=1 pytest tests/cpu/test_defects.py

runs the same tests with the installed vLLM's own connector, and our plugin off: each fails there.
Every answer is compared with what the prefill server itself says.  vLLM's policy is `fail`: a load
that cannot be right must end as an error, in bounded time, and an answer was loaded."""

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.kit import ROOT, cluster
from tests.kit.parity import Completion, CompletionError, complete, prefill
from tests.kit.servers import CPU_ENVIRON, LOOPBACK, ServerEndedError, VllmServer, free_port
from vllm_commext.nixl.wire.messages import PROTOCOL_VERSION

KIND = os.environ.get("COMMEXT_TEST_CONNECTOR", "ours")
ENGINE_ID = "prefill-engine"
LEASE_SECONDS = 8
TRANSFER_SECONDS = 8
HANDSHAKE_SECONDS = 8
ANSWER_SECONDS = 45.0
START_SECONDS = 90.0
# Few enough for a test to make the prefill server use each of them again.
PREFILL_BLOCKS = 64
LONG = 900
RIGHT, WRONG, FAILED, NONE = "right", "wrong tokens", "an error", "no answer in time"
OLD_VERSION = {
    "kind": "describe",
    "magic": "commext-nixl",
    "version": 1,
    "engine_id": ENGINE_ID,
    "tp_rank": 0,
}
# No frame, one of another version, and one that asks for a rank that is not there; the third as
# each connector spells it.
FRAMES: tuple[bytes, ...] = (
    b"garbage",
    msgspec.msgpack.encode((b"get_meta_msg", 0)),
    msgspec.msgpack.encode(OLD_VERSION),
    msgspec.msgpack.encode((b"get_meta_msg", 0, 7)),
    msgspec.msgpack.encode({**OLD_VERSION, "version": PROTOCOL_VERSION, "tp_rank": 7}),
)
# nixl_agents and chaos runs have each of them in a quicker form.
pytestmark = pytest.mark.long
logger = logging.getLogger(__name__)
_rng = random.Random(11)


def new_prompt(num_tokens: int = 100) -> tuple[int, ...]:
    return tuple(_rng.randrange(32, 127) for _ in range(num_tokens))


def server(
    name: str,
    model: Path,
    folder: Path,
    side_channel_port: int,
    *,
    port: int | None = None,
    ready_seconds: float = 300.0,
) -> VllmServer:
    """One engine with the connector under test."""
    is_prefill = name == "prefill"
    role = "kv_producer" if is_prefill else "kv_consumer"
    extra = {"kv_lease_duration": LEASE_SECONDS}
    if KIND == "ours":
        config = cluster.kv_transfer_config(
            role,
            policy="fail",
            engine_id=f"{name}-engine",
            extra={
                **extra,
                "side_channel_port": side_channel_port,
                "transfer_timeout": TRANSFER_SECONDS,
                "handshake_timeout": HANDSHAKE_SECONDS,
            },
        )
        environ = {}
    else:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "engine_id": f"{name}-engine",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
        environ = {
            "VLLM_COMMEXT": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        }
    # A decode engine with a prefix cache would answer a replay without reading anything.
    args = ["--num-gpu-blocks-override", str(PREFILL_BLOCKS)] if is_prefill else []
    args += [] if is_prefill else ["--no-enable-prefix-caching"]
    made = cluster.engine_server(name, model, folder, config, args=args, environ=environ, port=port)
    made.ready_seconds = ready_seconds
    return made


class Pair:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = folder / "model", folder
        self._model.symlink_to(model)
        self.side_channel_port = free_port()
        self._make()

    def _make(self) -> None:
        self.prefill = server("prefill", self._model, self._folder, self.side_channel_port)
        self.decode = server("decode", self._model, self._folder, free_port())

    def renew(self) -> None:
        """Replace both servers."""
        self.stop()
        self._make()
        self.start()

    def start(self) -> None:
        for one in (self.prefill, self.decode):
            one.start()
        for one in (self.prefill, self.decode):
            one.wait_ready()

    def stop(self) -> None:
        for one in (self.prefill, self.decode):
            one.signal_all(signal.SIGKILL)
            one.stop()

    def restart_prefill(self, model: Path | None = None) -> None:
        """Start the prefill server anew: same engine id, same ports, same path of its model, where
        there may be another one now."""
        port = self.prefill.port
        if model is not None:
            self._model.unlink()
            self._model.symlink_to(model)
        self.prefill.signal_all(signal.SIGKILL)
        self.prefill.stop()
        place = (self._model, self._folder, self.side_channel_port)
        self.prefill = server("prefill", *place, port=port)
        self.prefill.start()
        self.prefill.wait_ready()

    def reference(self, prompt: Sequence[int]) -> Completion:
        return complete(self.prefill.url, cluster.MODEL_NAME, prompt)

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        return prefill(self.prefill.url, cluster.MODEL_NAME, prompt)

    def outcome(self, expected: Completion, params: dict[str, Any]) -> str:
        extra = {"kv_transfer_params": params}
        try:
            got = complete(
                self.decode.url,
                cluster.MODEL_NAME,
                expected.prompt,
                extra=extra,
                timeout_seconds=ANSWER_SECONDS,
            )
        except CompletionError as error:
            logger.info("HTTP %d: %.200s", error.status, error.body)
            return FAILED
        except httpx.TimeoutException:
            return NONE
        return RIGHT if got.token_ids == expected.token_ids else WRONG

    def disaggregated(self) -> str:
        prompt = new_prompt()
        try:
            expected, params = self.reference(prompt), self.prefilled(prompt)
        except (CompletionError, httpx.HTTPError) as error:
            return f"the prefill server does not serve: {error!r}"
        return self.outcome(expected, params)

    def reuse_blocks(self) -> None:
        for _ in range(2 * PREFILL_BLOCKS * cluster.BLOCK_SIZE // LONG):
            complete(self.prefill.url, cluster.MODEL_NAME, new_prompt(LONG), max_tokens=1)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(model, tmp_path_factory.mktemp("defects"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def pair(servers: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The servers; a test that fails leaves new ones to the next, so that each fails by itself."""
    before = request.session.testsfailed
    yield servers
    if request.session.testsfailed > before:
        servers.renew()


# First in this file: the decode server has not asked the side channel before it.
def test_garbage_and_other_versions_and_ranks_leave_the_side_channel_serving(pair: Pair) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"tcp://{LOOPBACK}:{pair.side_channel_port}")
        for frame in FRAMES:
            dealer.send_multipart([b"", frame])
        time.sleep(1.0)
    assert pair.disaggregated() == RIGHT


def test_malformed_notifications_leave_the_engine_serving(pair: Pair) -> None:
    command = [sys.executable, "-m", "tests.chaos.rogue", KIND, LOOPBACK]
    command += [str(pair.side_channel_port), ENGINE_ID]
    environ = {**os.environ, **CPU_ENVIRON}
    subprocess.run(command, env=environ, cwd=ROOT, check=True, timeout=300)
    assert pair.disaggregated() == RIGHT


def test_blocks_of_an_expired_lease_are_not_served(pair: Pair) -> None:
    prompt = new_prompt()
    expected, params = pair.reference(prompt), pair.prefilled(prompt)
    time.sleep(LEASE_SECONDS + 2.0)
    pair.reuse_blocks()
    assert pair.outcome(expected, params) == FAILED
    assert pair.disaggregated() == RIGHT


def test_replayed_parameters_do_not_serve_another_requests_blocks(pair: Pair) -> None:
    prompt = new_prompt()
    expected, params = pair.reference(prompt), pair.prefilled(prompt)
    assert pair.outcome(expected, params) == RIGHT
    pair.reuse_blocks()
    assert pair.outcome(expected, params) == FAILED
    assert pair.disaggregated() == RIGHT


def test_a_stopped_peer_does_not_hang_the_request(pair: Pair) -> None:
    assert pair.disaggregated() == RIGHT
    prompt = new_prompt()
    expected, params = pair.reference(prompt), pair.prefilled(prompt)
    pair.prefill.signal_all(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        outcome = pair.outcome(expected, params)
        seconds = time.monotonic() - begun
    finally:
        pair.prefill.signal_all(signal.SIGCONT)
    logger.info("stopped peer: %s after %.2f s, limit %g s", outcome, seconds, TRANSFER_SECONDS)
    assert outcome == FAILED
    assert pair.disaggregated() == RIGHT


def test_a_killed_peer_ends_its_reads_and_the_same_engine_comes_back(pair: Pair) -> None:
    assert pair.disaggregated() == RIGHT
    prompt = new_prompt()
    expected, params = pair.reference(prompt), pair.prefilled(prompt)
    pair.prefill.signal_all(signal.SIGSTOP)  # so that the read is under way when it dies
    outcomes: list[str] = []
    asking = threading.Thread(target=lambda: outcomes.append(pair.outcome(expected, params)))
    asking.start()
    time.sleep(1.0)
    begun = time.monotonic()
    pair.prefill.signal_all(signal.SIGKILL)
    asking.join(2 * ANSWER_SECONDS)
    logger.info("killed peer: %s after %.2f s", outcomes, time.monotonic() - begun)
    assert outcomes == [FAILED]
    pair.restart_prefill()
    found = [pair.disaggregated() for _ in range(5)]
    logger.info("after the restart: %s", found)
    assert RIGHT in found[:2]
    assert found[2:] == 3 * [RIGHT]


def test_a_restart_with_other_weights_in_the_same_place(
    pair: Pair, model: Path, other_model: Path
) -> None:
    expected = complete(pair.decode.url, cluster.MODEL_NAME, new_prompt())
    pair.restart_prefill(other_model)
    assert pair.reference(expected.prompt).token_ids != expected.token_ids, "take another prompt"
    outcome = pair.outcome(expected, pair.prefilled(expected.prompt))
    pair.restart_prefill(model)
    assert outcome == RIGHT
    assert pair.disaggregated() == RIGHT


def test_a_side_channel_port_in_use_ends_the_start(model: Path, tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        refused = server("prefill", model, tmp_path, port, ready_seconds=START_SECONDS)
        with pytest.raises(ServerEndedError):
            refused.__enter__()
    assert f"{port}" in refused.log_text()
