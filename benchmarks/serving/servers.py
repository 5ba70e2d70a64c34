"""The servers that take turns: `off` is vLLM as it is, `on` has everything of ours."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import cluster
from tests.kit.servers import (
    CUDA_ENVIRON,
    LOOPBACK,
    ProxyServer,
    Server,
    VllmServer,
    free_port,
)
from vllm_commext.errors import CommextTimeoutError

OFF, ON = "off", "on"
VARIANTS = (OFF, ON)
SINGLE, PAIR = "single", "1P1D"
CELLS = (SINGLE, PAIR)
# A vLLM reader spins for a second after the last message: let it, before anything is measured.
SETTLE_SECONDS = 2.0
HEALTHY_SECONDS = 30.0
MAX_MODEL_LEN = {"cpu": 1024, "cuda": 4096}
ANYWHERE: Mapping[str, str] = {
    "VLLM_COMMEXT_STRICT": "1",
    "VLLM_COMMEXT_SHM_QUEUE": "1",
    "VLLM_COMMEXT_NIXL": "1",
}
TOGGLES: Mapping[str, Mapping[str, str]] = {
    "cpu": {**ANYWHERE, "VLLM_COMMEXT_CPU_COLLECTIVES": "1"},
    "cuda": {**ANYWHERE, "VLLM_COMMEXT_ALLREDUCE": "1", "VLLM_COMMEXT_REDUCE_RMS": "1"},
}


@dataclass(frozen=True)
class Setup:
    """What all servers of a run have in common.

    ``gpus``: of the prefill (or single) and of the decode server, as for CUDA_VISIBLE_DEVICES;
    ``gpu_memory``: share of each GPU's memory for each of the servers that share it; ``changes``:
    environment of the servers that are on, over ``TOGGLES``.
    """

    model: Path
    model_args: Sequence[str]
    tp: int
    device: str
    gpus: Sequence[str]
    gpu_memory: float
    max_num_seqs: int
    server_args: Sequence[str]
    changes: Mapping[str, str]
    folder: Path
    ready_seconds: float


@dataclass(frozen=True)
class Variant:
    """Servers that serve one cell together; requests go to ``url``."""

    url: str
    servers: Mapping[str, Server]

    def signal_all(self, number: signal.Signals, but: Variant | None = None) -> None:
        """Send a signal to every process of all servers, *but* of those that another has too."""
        for server in self.servers.values():
            if but is None or server not in but.servers.values():
                server.signal_all(number)

    def wait_healthy(self) -> None:
        """Wait until all servers answer, as after a stop; ``CommextTimeoutError`` otherwise."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        while not all(server.healthy() for server in self.servers.values()):
            if time.monotonic() > deadline:
                raise CommextTimeoutError(
                    f"expected 200 from /health of {sorted(self.servers)} within "
                    f"{HEALTHY_SECONDS:g} s"
                )
            time.sleep(0.1)


def engine(setup: Setup, variant: str, role: str) -> VllmServer:
    """One server, not started; ``role`` is `single`, `prefill` or `decode`.

    The executor is named so that a message queue is there with one worker, too.
    """
    environ: dict[str, str] = {"VLLM_COMMEXT": "0"}
    if variant == ON:
        environ = {**TOGGLES[setup.device], **setup.changes}
    config = None
    if role != SINGLE:
        port = free_port()
        config = connector_config(setup, variant, role, port)
        if variant == OFF:
            environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = LOOPBACK
            environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    args = ["--distributed-executor-backend", "mp", "--no-enable-prefix-caching"]
    args += ["--served-model-name", cluster.MODEL_NAME, *setup.model_args]
    args += ["--max-model-len", str(MAX_MODEL_LEN[setup.device])]
    args += ["--max-num-seqs", str(setup.max_num_seqs)]
    if setup.device == "cpu":
        args += ["--enforce-eager", "--block-size", str(cluster.BLOCK_SIZE)]
    else:
        args += ["--gpu-memory-utilization", str(setup.gpu_memory)]
        environ["CUDA_VISIBLE_DEVICES"] = setup.gpus[1 if role == "decode" else 0]
    return VllmServer(
        f"{variant}-{role}",
        setup.model,
        setup.folder,
        tensor_parallel_size=setup.tp,
        kv_transfer_config=config,
        args=[*args, *setup.server_args],
        environ=environ,
        base_environ=CUDA_ENVIRON if setup.device == "cuda" else None,
        ready_seconds=setup.ready_seconds,
    )


def connector_config(setup: Setup, variant: str, role: str, port: int) -> dict[str, Any]:
    """``--kv-transfer-config``: our connector, or vLLM's own, otherwise alike."""
    config: dict[str, Any] = {
        "kv_connector": cluster.CONNECTOR if variant == ON else "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": setup.device,
    }
    if variant == ON:
        config["kv_connector_extra_config"] = {
            "side_channel_host": LOOPBACK,
            "side_channel_port": port,
        }
    return config


@contextmanager
def started(setup: Setup, cell: str) -> Iterator[dict[str, Variant]]:
    """Both variants of a cell, ready; on GPUs the second starts after the first, for each looks
    at how much memory is free."""
    roles = [SINGLE] if cell == SINGLE else ["prefill", "decode"]
    with ExitStack() as stack:
        made = {name: {role: engine(setup, name, role) for role in roles} for name in VARIANTS}
        for servers in made.values():
            for server in servers.values():
                stack.callback(server.stop)
                server.start()
            if setup.device == "cuda":
                _wait(servers)
        variants: dict[str, Variant] = {}
        for name, servers in made.items():
            _wait(servers)
            front: dict[str, Server] = {**servers}
            url = servers[roles[0]].url
            if cell == PAIR:
                proxy = ProxyServer(
                    f"{name}-proxy", [servers["prefill"].url], [servers["decode"].url], setup.folder
                )
                front["proxy"] = stack.enter_context(proxy)
                url = proxy.url
            variants[name] = Variant(url, front)
        yield variants


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


def _wait(servers: Mapping[str, VllmServer]) -> None:
    for server in servers.values():
        seconds = server.wait_ready()
        print(f"{server.name} ready after {seconds:.0f} s", flush=True)


def active(variants: Mapping[str, Variant]) -> dict[str, list[str]]:
    """What of ours runs in each engine, by the server's name, from its log.

    Raises ``SystemExit`` where ours is found off, or nothing of it on: nothing would be compared.
    """
    found: dict[str, list[str]] = {}
    for name, variant in variants.items():
        for role, server in variant.servers.items():
            if role == "proxy":
                continue
            found[server.name] = sorted(server.active())
            if bool(found[server.name]) != (name == ON):
                raise SystemExit(f"{server.name}: of ours is active: {found[server.name]}")
    return found


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Names in /dev/shm that were not there before."""
    return sorted(set(os.listdir("/dev/shm")) - before)
