"""Request parameters between real servers, mixed up and altered.

A plain server without this package is the reference.  The decode server recomputes what it cannot
load, so that every answer can be compared: one that came from another prompt's KV would differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.testing import cluster
from vllm_commext.testing.metrics import Metrics, scrape, wait_for_added
from vllm_commext.testing.parity import Completion, compare, complete, prefill
from vllm_commext.testing.servers import Server, VllmServer

LOG_SECONDS = 30
ATOL = 1e-4  # nats, at float32
SECRET = {"COMMEXT_NIXL_SECRET": "0123456789abcdef0123456789abcdef"}
BLOCKS = "vllm:commext_nixl_blocks_total"
FAILURES = "vllm:commext_nixl_failures_total"
_rng = random.Random(23)


def new_prompt(num_tokens: int = 100) -> tuple[int, ...]:
    """A prompt that no server has seen."""
    return tuple(_rng.randrange(32, 127) for _ in range(num_tokens))


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    decode: VllmServer

    def reference(self, prompt: Sequence[int]) -> Completion:
        return complete(self.plain.url, cluster.MODEL_NAME, prompt)

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        return prefill(self.prefill.url, cluster.MODEL_NAME, prompt)

    def decoded(self, prompt: Sequence[int], params: Mapping[str, Any] | None) -> Completion:
        extra = {"kv_transfer_params": dict(params)} if params is not None else None
        return complete(self.decode.url, cluster.MODEL_NAME, prompt, extra=extra)

    def added(self, before: Metrics, name: str, at_least: float) -> Metrics:
        """What the decode server counts since ``before``; it reports with its next step."""
        self.decoded(new_prompt(8), None)
        return wait_for_added(self.decode.url, before, name, at_least=at_least)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("parameters")

    def engine(name: str, role: str) -> VllmServer:
        config = cluster.kv_transfer_config(role, policy="recompute")
        return cluster.engine_server(name, model, folder, config, environ=SECRET)

    plain = cluster.plain_server("plain", model, folder)
    engines = [plain, engine("prefill", "kv_producer"), engine("decode", "kv_consumer")]
    with ExitStack() as stack:
        for server in engines:
            stack.callback(server.stop)
            server.start()
        for server in engines:
            server.wait_ready()
        yield Servers(*engines)


def test_swapped_parameters_answer_from_nobodys_cache_but_their_own(servers: Servers) -> None:
    one, two = new_prompt(), new_prompt()
    expected = {prompt: servers.reference(prompt) for prompt in (one, two)}
    params = {prompt: servers.prefilled(prompt) for prompt in (one, two)}
    before, start = scrape(servers.decode.url), len(servers.decode.log_text())
    got = servers.decoded(one, params[two])
    assert compare(expected[one], got, ATOL).equal, "answered from another prompt's KV cache"
    line = servers.decode.wait_for_log("KV cache not loaded", LOG_SECONDS, start)
    assert "those of another prompt" in line
    assert "token ids" in line
    added = servers.added(before, FAILURES, at_least=1)
    assert added.total(FAILURES, reason="request") == added.total(FAILURES) == 1
    assert added.total(BLOCKS) == 0
    again = servers.decoded(one, None)
    assert compare(expected[one], again, ATOL).equal, "another prompt's KV cache was kept for it"
    # The mistake took nothing from the request whose parameters they are.
    before = scrape(servers.decode.url)
    assert compare(expected[two], servers.decoded(two, params[two]), ATOL).equal
    assert servers.added(before, BLOCKS, at_least=4).total(BLOCKS) == 4


def test_another_requests_blocks_cannot_be_named(servers: Servers) -> None:
    one, two = new_prompt(), new_prompt()
    expected = {prompt: servers.reference(prompt) for prompt in (one, two)}
    params = {prompt: servers.prefilled(prompt) for prompt in (one, two)}
    start = len(servers.decode.log_text())
    altered = {**params[one], "remote_block_ids": params[two]["remote_block_ids"]}
    assert compare(expected[one], servers.decoded(one, altered), ATOL).equal
    assert "or altered" in servers.decode.wait_for_log("KV cache not loaded", LOG_SECONDS, start)
    for prompt in (one, two):
        assert compare(expected[prompt], servers.decoded(prompt, None), ATOL).equal


def test_another_salt_is_another_prompt(servers: Servers) -> None:
    prompt = new_prompt()
    expected, params = servers.reference(prompt), servers.prefilled(prompt)
    start = len(servers.decode.log_text())
    extra = {"kv_transfer_params": params, "cache_salt": "tenant"}
    got = complete(servers.decode.url, cluster.MODEL_NAME, prompt, extra=extra)
    assert compare(expected, got, ATOL).equal
    assert "cache_salt" in servers.decode.wait_for_log("KV cache not loaded", LOG_SECONDS, start)
