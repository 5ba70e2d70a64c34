"""The connector together with vLLM's other features, between real servers: each answer after a load
is the one that the decode engine gives by itself, to 1e-4 nats."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.testing import cluster
from vllm_commext.testing.metrics import scrape
from vllm_commext.testing.parity import Completion, compare, complete
from vllm_commext.testing.servers import VllmServer
from vllm_commext.testing.tiny_lora import write_lora
from vllm_commext.testing.tiny_model import write_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ATOL = 1e-4
NIXL = "vllm:commext_nixl_"
LENGTHS = (130, 96)
OWN = {"cache_salt": "answered alone"}  # nothing of it is a prefix-cache hit later on


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, and the names of the models that both serve."""

    prefill: VllmServer
    decode: VllmServer
    names: Sequence[str] = (cluster.MODEL_NAME,)


@dataclass
class Cluster:
    """Servers of one test."""

    folder: Path
    stack: ExitStack

    def model(self, kind: str) -> Path:
        """A tiny model."""
        return write_tiny_model(self.folder / kind, kind)

    def pair(
        self,
        model: Path,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        *,
        names: Sequence[str] = (cluster.MODEL_NAME,),
        child: Mapping[str, Any] | None = None,
    ) -> Pair:
        """Start two engines with further arguments; with ``child``, another connector stands beside
        ours in both."""
        servers: list[VllmServer] = []
        for role, args in (("kv_producer", prefill), ("kv_both", decode)):
            config = cluster.kv_transfer_config(role)
            if child is not None:
                extra = {"connectors": [config, child]}
                config = {
                    "kv_connector": "MultiConnector",
                    "kv_role": role,
                    "kv_connector_extra_config": extra,
                }
            servers.append(cluster.engine_server(role, model, self.folder, config, args=args))
            servers[-1].start()
            self.stack.callback(servers[-1].stop)
        for server in servers:
            server.wait_ready()
        return Pair(servers[0], servers[1], names)


@pytest.fixture
def servers(tmp_path: Path) -> Any:
    """Where a test's servers come from; they end with it."""
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def prompts() -> list[list[int]]:
    """One that ends inside a block, one that ends with it; both repeat themselves."""
    numbers = random.Random(11)
    return [[numbers.randrange(256) for _ in range(length // 2)] * 2 for length in LENGTHS]


def check(pair: Pair) -> None:
    """Compare each answer after a load with that of the decode engine alone."""
    url = pair.decode.url
    for name in pair.names:
        for prompt in prompts():
            own = complete(url, name, prompt, extra=OWN)
            before = scrape(url)
            got = cluster.disaggregated(pair.prefill.url, url, name, prompt)
            moved = scrape(url).minus(before)
            difference = compare(own, got, ATOL)
            assert difference.equal, f"{name}, {len(prompt)} tokens: {difference}"
            assert moved.total(f"{NIXL}failures_total") == 0
            assert moved.total(f"{NIXL}bytes_total") > 0


def test_two_adapters(servers: Cluster) -> None:
    model = servers.model("llama")
    names = ["first", "second"]
    adapters = [
        f"{name}={write_lora(servers.folder / name, model, seed)}"
        for seed, name in enumerate(names)
    ]
    both = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    both += ["--lora-modules", *adapters]
    pair = servers.pair(model, both, both, names=[cluster.MODEL_NAME, *names])
    check(pair)
    (prompt, _) = prompts()
    own = [complete(pair.decode.url, name, prompt, extra=OWN) for name in pair.names]
    assert len({completion.token_ids for completion in own}) == len(pair.names)


def test_another_connector_beside_ours(servers: Cluster) -> None:
    child = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(servers.folder / "store")},
    }
    check(servers.pair(servers.model("llama"), child=child))


def test_preemption_on_the_decode_side(servers: Cluster) -> None:
    """Four requests that each need 7 of 12 blocks in the end: preempted ones begin anew here."""
    small = ["--num-gpu-blocks-override", "13", "--max-model-len", "256"]
    pair = servers.pair(servers.model("llama"), decode=[*small, "--no-enable-prefix-caching"])
    numbers = random.Random(13)
    asked = [[numbers.randrange(256) for _ in range(100)] for _ in range(4)]
    name, url = cluster.MODEL_NAME, pair.decode.url
    own = [complete(url, name, prompt, max_tokens=100) for prompt in asked]
    before = scrape(url)

    def ask(prompt: Sequence[int]) -> Completion:
        return cluster.disaggregated(pair.prefill.url, url, name, prompt, max_tokens=100)

    with ThreadPoolExecutor(len(asked)) as threads:
        got = list(threads.map(ask, asked))
    counted = scrape(url).minus(before)
    assert counted.total("vllm:num_preemptions_total") > 0
    assert counted.total(f"{NIXL}failures_total") == 0
    differences = [compare(one, two, ATOL) for one, two in zip(own, got, strict=True)]
    assert [one for one in differences if not one.equal] == []
