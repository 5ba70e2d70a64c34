"""The engines whose streams move, and the proxy in front of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from handovers.variants import Setup, write_model

from tests.kit import cluster, fixed_cache
from tests.kit.servers import CUDA_ENVIRON, LOOPBACK, ProxyServer, VllmServer, free_port

POLL_SECONDS = 0.005
BOUND_SECONDS = 120.0
ROLES = ("prefill", "decode", "both")


@dataclass(frozen=True)
class Shape:
    """Of each engine: its role, its GPU, and GiB of its KV cache."""

    role: str
    gpu: str
    kv_gib: float
    args: Sequence[str] = ()


def make(
    setup: Setup, shapes: Sequence[Shape], step: int, extra: Mapping[str, Any]
) -> list[VllmServer]:
    """All engines, not started."""
    model, options = write_model(setup)
    options = [*options, "--max-num-batched-tokens", str(step)]
    if setup.device == "cpu":
        options += ["--block-size", str(cluster.BLOCK_SIZE), "--num-gpu-blocks-override", "2048"]
    made: list[VllmServer] = []
    for number, shape in enumerate(shapes):
        config = cluster.kv_transfer_config("kv_both", policy="recompute", extra=extra)
        config["kv_buffer_device"] = setup.device
        args = ["--served-model-name", cluster.MODEL_NAME, *options]
        args += ["--max-model-len", str(setup.max_tokens)]
        args += ["--max-num-seqs", str(2 * setup.concurrency)]
        environ = {"VLLM_COMMEXT": "1", "VLLM_COMMEXT_STRICT": "1"}
        if setup.device == "cuda":
            args += fixed_cache(int(shape.kv_gib * (1 << 30)))
            environ["CUDA_VISIBLE_DEVICES"] = shape.gpu
        made.append(
            VllmServer(
                f"{shape.role}-{number}",
                model,
                setup.folder,
                kv_transfer_config=config,
                args=[*args, *shape.args, *setup.server_args],
                environ=environ,
                base_environ=CUDA_ENVIRON if setup.device == "cuda" else None,
                ready_seconds=setup.start_seconds,
            )
        )
    return made


class Admin:
    """The admin port of a proxy that is started with ``args``."""

    def __init__(self, setup: Setup) -> None:
        self._port, token = free_port(), secrets.token_hex(16)
        file = setup.folder / "admin.token"
        file.write_text(token)
        self.args = ("--admin-port", str(self._port), "--admin-token-file", str(file))
        self._headers = {"Authorization": f"Bearer {token}"}

    async def ask(
        self, session: aiohttp.ClientSession, method: str, path: str, **fields: str
    ) -> list[dict[str, Any]]:
        """All engines, after what was asked for."""
        url = f"http://{LOOPBACK}:{self._port}/{path}"
        data = json.dumps(fields) if fields else None
        async with session.request(method, url, data=data, headers=self._headers) as response:
            response.raise_for_status()
            return (await response.json())["engines"]

    async def until_usable(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        """Wait until these engines may be given work."""
        end = time.monotonic() + BOUND_SECONDS
        while time.monotonic() < end:
            told = await self.ask(session, "GET", "engines")
            usable = {one["url"] for one in told if one["healthy"] and not one["draining"]}
            if usable >= set(urls):
                return
            await asyncio.sleep(POLL_SECONDS)
        raise TimeoutError(f"expected {list(urls)} usable within {BOUND_SECONDS:g} s, got {told}")

    async def until_empty(self, session: aiohttp.ClientSession, url: str) -> float:
        """When an engine serves nobody any more, of the monotonic clock."""
        end = time.monotonic() + BOUND_SECONDS
        while time.monotonic() < end:
            told = await self.ask(session, "GET", "engines")
            if not sum(one["in_flight"] for one in told if one["url"] == url):
                return time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
        raise TimeoutError(f"expected no request at {url} within {BOUND_SECONDS:g} s")


def proxy(
    setup: Setup,
    shapes: Sequence[Shape],
    engines: Sequence[VllmServer],
    admin: Admin,
    args: Sequence[str],
) -> ProxyServer:
    """The proxy, not started."""
    named = [
        word
        for shape, engine in zip(shapes, engines, strict=True)
        for word in (f"--{'engine' if shape.role == 'both' else shape.role}", engine.url)
    ]
    return ProxyServer("proxy", [], [], setup.folder, args=[*named, *admin.args, *args])
