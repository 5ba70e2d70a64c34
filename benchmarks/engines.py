"""How benchmarks start servers, and let some of them take turns."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import repository  # noqa: F401

from tests.kit import cluster, fixed_cache
from tests.kit.servers import CPU_ENVIRON, CUDA_ENVIRON, LOOPBACK, Server, VllmServer, free_port
from vllm_commext.errors import CommextTimeoutError

NONE, OURS, VLLM = "", cluster.CONNECTOR, "NixlConnector"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
SMALL_CACHE = ("--block-size", str(cluster.BLOCK_SIZE), "--num-gpu-blocks-override", "2048")
"""On CPUs, for engines that keep what they have computed."""
SETTLE_SECONDS = 2.0  # a vLLM reader spins for a second after the last message
HEALTHY_SECONDS = 30.0


@dataclass(frozen=True)
class Setup:
    """What all engines of a run have in common.

    ``model_args``: vLLM's options for the model; ``server_args``: of the command line, the last.
    """

    device: str
    folder: Path
    model: Path
    model_args: Sequence[str]
    max_tokens: int
    max_requests: int
    start_seconds: float
    server_args: Sequence[str] = ()
    tp: int = 1


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        connector: ``OURS``, ``VLLM`` or ``NONE``.
        gpu: as for CUDA_VISIBLE_DEVICES.
        share: of that GPU's memory; or ``kv_bytes`` of KV cache, which needs no look at the memory
            that is free.
        extra: of our connector's configuration.
        environ: wins over what the connector needs.
    """

    name: str
    connector: str = NONE
    role: str = "both"
    gpu: str = ""
    share: float = 0.0
    kv_bytes: int = 0
    policy: str = "fail"
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    args: Sequence[str] = ()


def tier(num_bytes: int, port: int, num_blocks: int = 1, num_threads: int = 4) -> dict[str, Any]:
    """``--kv-transfer-config`` of vLLM's tier `p2p` in so much host memory. num_blocks: of a chunk;
    num_threads: of NIXL."""
    extra = {
        **{"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": num_bytes},
        **{"offload_prompt_only": False, "blocks_per_chunk": num_blocks},
        "secondary_tiers": [
            {"type": "p2p", "host": LOOPBACK, "port": port, "num_threads": num_threads}
        ],
    }
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return {**config, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def server(setup: Setup, one: Engine) -> VllmServer:
    """The engine's server, not started."""
    environ = {"VLLM_COMMEXT": "0"}
    config: dict[str, Any] | None = None
    if one.connector == OURS:
        environ = {"VLLM_COMMEXT": "1", "VLLM_COMMEXT_STRICT": "1"}
    if one.connector == VLLM:
        # In vLLM's key of compiled code, so that each engine compiles for itself.
        environ |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
    if one.connector:
        config = {
            "kv_connector": one.connector,
            "kv_role": ROLES[one.role],
            "kv_load_failure_policy": one.policy,
            "kv_buffer_device": setup.device,
        }
    if one.connector == OURS and config is not None:
        place = {"side_channel_host": LOOPBACK, "side_channel_port": free_port()}
        config["kv_connector_extra_config"] = {**place, **one.extra}
    args = ["--served-model-name", cluster.MODEL_NAME, *setup.model_args, *one.args]
    args += ["--max-model-len", str(setup.max_tokens), "--max-num-seqs", str(setup.max_requests)]
    if setup.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = one.gpu
        args += (
            fixed_cache(one.kv_bytes)
            if one.kv_bytes
            else ("--gpu-memory-utilization", str(one.share))
        )
    return VllmServer(
        one.name,
        setup.model,
        setup.folder,
        tensor_parallel_size=setup.tp,
        kv_transfer_config=config,
        args=[*args, *setup.server_args],
        environ={**environ, **one.environ},
        base_environ=CUDA_ENVIRON if setup.device == "cuda" else CPU_ENVIRON,
        ready_seconds=setup.start_seconds,
    )


@contextmanager
def ready(servers: Sequence[Server], *, one_by_one: bool = False) -> Iterator[None]:
    """Start servers and wait for them; they end with the block.

    ``one_by_one``: where each looks at how much of a GPU's memory is free.
    """
    with ExitStack() as stack:
        for one in servers:
            stack.callback(one.stop)
            one.start()
            if one_by_one:
                one.wait_ready()
        for one in servers:
            print(f"{one.name} ready after {one.wait_ready():.0f} s", flush=True)
        yield


@dataclass(frozen=True)
class Variant:
    """Servers that serve one cell together; requests go to ``url``."""

    url: str
    servers: Mapping[str, Server]

    def signal_all(self, number: signal.Signals, but: Variant | None = None) -> None:
        """Send a signal to every process of all servers, *but* of those that another has too."""
        for one in self.servers.values():
            if but is None or one not in but.servers.values():
                one.signal_all(number)

    def wait_healthy(self) -> None:
        """Wait until all servers answer, as after a stop; ``CommextTimeoutError`` otherwise."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        while not all(one.healthy() for one in self.servers.values()):
            if time.monotonic() > deadline:
                raise CommextTimeoutError(
                    f"expected 200 from /health of {sorted(self.servers)} within "
                    f"{HEALTHY_SECONDS:g} s"
                )
            time.sleep(0.1)


@contextmanager
def alone(variants: Mapping[str, Variant], name: str) -> Iterator[Variant]:
    """The variant, settled, while all processes of the others are stopped: what vLLM's queue and
    connector burn while idle would slow it down."""
    chosen = variants[name]
    others = [one for other, one in variants.items() if other != name]
    for other in others:
        other.signal_all(signal.SIGSTOP, but=chosen)
    try:
        time.sleep(SETTLE_SECONDS)
        chosen.wait_healthy()
        yield chosen
    finally:
        for other in others:
            other.signal_all(signal.SIGCONT, but=chosen)
