"""Sets of engines, all of them resident at once; started once for all rounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import engines
from engines import Engine, Setup

from tests.kit.ports import free_port
from tests.kit.servers import Server, ServerEndedError
from vllm_commext.errors import CommextTimeoutError

BOTH, NIXL, P2P = "both", "nixl", "p2p"
PLAIN = "plain"
"""Kinds of sets: ours, where every engine both prefills and decodes; vLLM's connector; vLLM's tier;
none."""
CONNECTORS = {BOTH: engines.OURS, NIXL: engines.VLLM, P2P: engines.NONE, PLAIN: engines.NONE}
MODEL = "model"
TIER_PORT, TIER_BYTES = "VLLM_P2P_SIDE_CHANNEL_PORT", 48 << 30


@dataclass(frozen=True)
class EngineSet:
    """Engines of a kind; step: tokens of a step at most; tp: GPUs of each."""

    kind: str
    step: int
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.step}" + (f" TP {self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True)
class Places:
    """Where a set's engines run.

    gpus: a device each, as for CUDA_VISIBLE_DEVICES; kv_bytes: of KV cache for each engine; extra:
    of our connector's configuration; tier: blocks of a chunk and threads of vLLM's tier.
    """

    gpus: Sequence[str]
    kv_bytes: int
    extra: Mapping[str, Any]
    tier: Sequence[int] = ()


def _server(setup: Setup, chosen: EngineSet, places: Places, number: int) -> Server:
    if setup.device == MODEL:
        command = [sys.executable, "-m", "tools.stand_in", "--number", str(number), "--port"]
        port = free_port()
        return Server(f"stand-in-{number}", [*command, str(port)], setup.folder, port=port)
    small = engines.SMALL_CACHE if setup.device == "cpu" else ()
    port, tier = free_port(), ()
    if chosen.kind == P2P:
        tier = ("--kv-transfer-config", json.dumps(engines.tier(TIER_BYTES, port, *places.tier)))
    gpus = places.gpus[number * chosen.tp : (number + 1) * chosen.tp]
    one = Engine(
        f"{chosen.kind}-{chosen.step}-tp{chosen.tp}-{number}",
        CONNECTORS[chosen.kind],
        gpu=",".join(gpus),
        kv_bytes=places.kv_bytes,
        extra=places.extra,
        environ={TIER_PORT: str(port)},
        args=["--max-num-batched-tokens", str(chosen.step), *small, *tier],
    )
    return engines.server(replace(setup, tp=chosen.tp), one)


def _ready(chosen: EngineSet, servers: Sequence[Server]) -> bool:
    """Wait for a set's engines; say what became of them."""
    try:
        seconds = [server.wait_ready() for server in servers]
    except (ServerEndedError, CommextTimeoutError) as error:
        print(f"engines {chosen} left out: {error}", flush=True)
        return False
    print(f"engines {chosen} ready after {max(seconds):.0f} s", flush=True)
    return True


def stop_all(servers: Sequence[Server]) -> None:
    """Stop all at the same time, each within its bound; say which did not end."""
    with ThreadPoolExecutor(max(len(servers), 1)) as pool:
        for server, stopping in [(one, pool.submit(one.stop)) for one in servers]:
            try:
                stopping.result()
            except ServerEndedError as error:
                print(f"{server.name}: {error}", flush=True)


@contextmanager
def started(
    setup: Setup, places: Places, sets: Sequence[EngineSet]
) -> Iterator[dict[EngineSet, list[Server]]]:
    """All sets whose engines start, all at once."""
    made = {
        chosen: [_server(setup, chosen, places, n) for n in range(len(places.gpus) // chosen.tp)]
        for chosen in sets
    }
    found: dict[EngineSet, list[Server]] = {}
    try:
        for server in (server for servers in made.values() for server in servers):
            server.start()
        for chosen, servers in made.items():
            if _ready(chosen, servers):
                found[chosen] = servers
            else:
                stop_all(servers)
        yield found
    finally:
        stop_all([server for servers in found.values() for server in servers])
