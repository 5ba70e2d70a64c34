"""Sets of engines, one engine a GPU, all of them resident at once; started once for all rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handovers.variants import EIGHT_BILLION

from tests.kit import cluster
from tests.kit.servers import (
    CUDA_ENVIRON,
    LOOPBACK,
    Server,
    ServerEndedError,
    VllmServer,
    free_port,
)
from tests.kit.tiny_model import write_tiny_model, write_tokenizer
from vllm_commext.errors import CommextTimeoutError

BOTH, NIXL = "both", "nixl"
PLAIN = "plain"
"""Kinds of sets: ours, where every engine both prefills and decodes; vLLM's connector; none."""
# vLLM looks at this share of a GPU before it starts, even where it is told how much to take.
STARTING_SHARE = 0.05


@dataclass(frozen=True)
class EngineSet:
    """Engines of a kind, a GPU each; step: tokens of a step at most."""

    kind: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind} {self.step}"


@dataclass(frozen=True)
class Setup:
    """What all engines have in common.

    gpus: a device each, as for CUDA_VISIBLE_DEVICES; gpu_memory: share of one for each engine on
    it; kv_bytes: of KV cache for each engine instead, with which all sets start at once; extra:
    of our connector's configuration.
    """

    device: str
    folder: Path
    gpus: Sequence[str]
    gpu_memory: float
    kv_bytes: int
    max_tokens: int
    max_requests: int
    start_seconds: float
    extra: Mapping[str, Any]
    server_args: Sequence[str]


def write_model(setup: Setup) -> tuple[Path, list[str]]:
    """The model's folder and vLLM's options for it: tiny on CPUs, eight billion on GPUs."""
    folder = setup.folder / "model"
    if setup.device == "cpu":
        sizes = ["--block-size", str(cluster.BLOCK_SIZE), "--num-gpu-blocks-override", "2048"]
        return write_tiny_model(folder), ["--dtype", "float32", "--enforce-eager", *sizes]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(EIGHT_BILLION, indent=1))
    write_tokenizer(folder, EIGHT_BILLION["vocab_size"])
    return folder, ["--load-format", "dummy", "--dtype", "bfloat16"]


def _server(
    setup: Setup, chosen: EngineSet, place: int, model: Path, options: Sequence[str]
) -> VllmServer:
    environ: dict[str, str] = {"VLLM_COMMEXT": "0"}
    config: dict[str, Any] | None = None
    if chosen.kind != PLAIN:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        config |= {"kv_load_failure_policy": "fail", "kv_buffer_device": setup.device}
        environ |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
    if chosen.kind == BOTH:
        environ |= {"VLLM_COMMEXT": "1", "VLLM_COMMEXT_STRICT": "1"}
        config |= {"kv_connector": cluster.CONNECTOR, "kv_connector_extra_config": setup.extra}
    args = ["--served-model-name", cluster.MODEL_NAME, str(model), *options]
    args += ["--max-num-batched-tokens", str(chosen.step)]
    args += ["--max-model-len", str(setup.max_tokens), "--max-num-seqs", str(setup.max_requests)]
    if setup.device == "cuda":
        share = STARTING_SHARE if setup.kv_bytes else setup.gpu_memory
        args += ["--gpu-memory-utilization", str(share)]
        args += ["--kv-cache-memory-bytes", str(setup.kv_bytes)] if setup.kv_bytes else []
        environ["CUDA_VISIBLE_DEVICES"] = setup.gpus[place]
    return VllmServer(
        f"{chosen.kind}-{chosen.step}-{place}",
        model,
        setup.folder,
        kv_transfer_config=config,
        args=[*args, *setup.server_args],
        environ=environ,
        base_environ=CUDA_ENVIRON if setup.device == "cuda" else None,
        ready_seconds=setup.start_seconds,
    )


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
def started(setup: Setup, sets: Sequence[EngineSet]) -> Iterator[dict[EngineSet, list[VllmServer]]]:
    """All sets whose engines start.  One after the other where each looks at the memory that is
    free, else at once."""
    model, options = write_model(setup)
    made = {
        chosen: [_server(setup, chosen, n, model, options) for n in range(len(setup.gpus))]
        for chosen in sets
    }
    at_once = setup.device == "cpu" or setup.kv_bytes > 0
    everything = [server for servers in made.values() for server in servers]
    found: dict[EngineSet, list[VllmServer]] = {}
    try:
        for server in everything if at_once else []:
            server.start()
        for chosen, servers in made.items():
            for server in servers if not at_once else []:
                server.start()
            if _ready(chosen, servers):
                found[chosen] = servers
            else:
                stop_all(servers)
        yield found
    finally:
        stop_all([server for servers in found.values() for server in servers])
