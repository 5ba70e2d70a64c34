"""Pairs of real servers with further arguments, and the comparison that proves a composition: each
answer after a load is the one that the decode engine gives by itself, to 1e-4 nats."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import cluster
from tests.kit.metrics import Metrics, scrape
from tests.kit.parity import compare, complete
from tests.kit.servers import VllmServer
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import write_tiny_model

ATOL = 1e-4
NIXL = "vllm:commext_nixl_"
LENGTHS = (130, 96)
OWN = {"cache_salt": "answered alone"}  # nothing of it is a prefix-cache hit later on


@dataclass(frozen=True)
class Pair:
    prefill: VllmServer
    decode: VllmServer


@dataclass
class Cluster:
    folder: Path
    stack: ExitStack

    def model(self, kind: str) -> Path:
        return write_tiny_model(self.folder / kind, kind)

    def pair(
        self,
        model: Path,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        *,
        child: Mapping[str, Any] | None = None,
    ) -> Pair:
        """Start two engines with further arguments; with ``child``, another connector stands beside
        ours in both."""
        servers: list[VllmServer] = []
        options = KINDS[model.name].cpu_options if model.name in KINDS else []
        for role, args in (("kv_producer", prefill), ("kv_both", decode)):
            config = cluster.kv_transfer_config(role)
            if child is not None:
                extra = {"connectors": [config, child]}
                config = {
                    "kv_connector": "MultiConnector",
                    "kv_role": role,
                    "kv_connector_extra_config": extra,
                }
            arguments = [*options, *args]
            servers.append(cluster.engine_server(role, model, self.folder, config, args=arguments))
        self.stack.enter_context(cluster.all_ready(servers))
        return Pair(*servers)


def prompts() -> list[list[int]]:
    """One that ends inside a block, one that ends with it; both repeat themselves."""
    numbers = random.Random(11)
    return [[numbers.randrange(256) for _ in range(length // 2)] * 2 for length in LENGTHS]


def check(pair: Pair, *, max_tokens: int = 16, atol: float = ATOL) -> list[tuple[Metrics, Metrics]]:
    """Compare each answer after a load with that of the decode engine alone.

    Returns:
        For each answer, what the decode engine counted while it gave it alone, and after a load."""
    url, name = pair.decode.url, cluster.MODEL_NAME
    counted: list[tuple[Metrics, Metrics]] = []
    for prompt in prompts():
        start = scrape(url)
        own = complete(url, name, prompt, extra=OWN, max_tokens=max_tokens)
        before = scrape(url)
        got = cluster.disaggregated(pair.prefill.url, url, name, prompt, max_tokens=max_tokens)
        moved = scrape(url).minus(before)
        difference = compare(own, got, atol)
        assert difference.equal, f"{len(prompt)} tokens: {difference}"
        assert moved.total(f"{NIXL}failures_total") == 0
        assert moved.total(f"{NIXL}bytes_total") > 0
        counted.append((before.minus(start), moved))
    return counted
