"""The admin port of the proxy in front of engines whose streams move."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.kit.servers import LOOPBACK, free_port

POLL_SECONDS = 0.005
BOUND_SECONDS = 120.0


class Admin:
    """The admin port of a proxy that is started with ``args``."""

    def __init__(self, folder: Path) -> None:
        port, token = free_port(), secrets.token_hex(16)
        file = folder / "admin.token"
        file.write_text(token)
        self.args = ("--admin-port", str(port), "--admin-token-file", str(file))
        self.url = f"http://{LOOPBACK}:{port}"
        self.headers = {"Authorization": f"Bearer {token}"}

    async def ask(
        self, session: aiohttp.ClientSession, method: str, path: str, **fields: str
    ) -> list[dict[str, Any]]:
        """All engines, after what was asked for."""
        data = json.dumps(fields) if fields else None
        async with session.request(
            method, f"{self.url}/{path}", data=data, headers=self.headers
        ) as response:
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
