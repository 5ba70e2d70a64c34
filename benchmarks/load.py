"""Streamed answers that are read token by token: the load of benchmarks whose requests are compared
with one another. Those that count goodput under open load use `vllm_commext.bench.client`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import repository  # noqa: F401

from tests.kit.cluster import MODEL_NAME
from tests.kit.prompts import PRINTABLE

REQUEST_SECONDS = 600.0
_END = b"\n\n"


@dataclass
class Stream:
    """One greedy answer of exactly *num_tokens*.

    Attributes:
        extra: further members of the request's body.
        sent: instant of the request; times: of each event with tokens, of the monotonic clock.
        sizes: tokens of each of these events.
        error: what went wrong, or empty.
    """

    prompt: Sequence[int]
    num_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ids: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    sizes: list[int] = field(default_factory=list[int])
    sent: float = 0.0
    num_told: int = 0
    num_resumed: int = 0
    error: str = ""

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        """Ask, and read to the end."""
        body = {
            **{"model": MODEL_NAME, "prompt": list(self.prompt), "max_tokens": self.num_tokens},
            **{"temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True},
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        rest, is_whole = b"", False
        self.sent = time.monotonic()
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    self.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return
                async for data in response.content.iter_any():
                    now = time.monotonic()
                    *events, rest = (rest + data).split(_END)
                    for event in events:
                        is_whole = is_whole or event == b"data: [DONE]"
                        self._take(event, now)
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            self.error = f"{type(error).__name__}: {error}"
        if not self.error and not is_whole:
            self.error = "ended before [DONE]"
        if not self.error and not self.num_tokens == len(self.ids) == self.num_told:
            told = f"{len(self.ids)} and a usage of {self.num_told}"
            self.error = f"expected {self.num_tokens} tokens, got {told}"

    def _take(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data: {"):
            return
        told: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
        if "error" in told:
            self.error = self.error or str(told["error"])[:200]
        self.num_resumed = told.get("commext_resumed", self.num_resumed)
        if told.get("usage"):
            self.num_told = told["usage"]["completion_tokens"]
        for choice in told.get("choices") or ():
            if new := choice.get("token_ids"):
                self.ids += new
                self.times.append(now)
                self.sizes.append(len(new))

    def token_seconds(self) -> list[float]:
        """Seconds from the request to each token."""
        return [
            at - self.sent
            for at, size in zip(self.times, self.sizes, strict=True)
            for _ in range(size)
        ]

    def next_after(self, at: float) -> float | None:
        """When the first event after a time came."""
        return next((one for one in self.times if one > at), None)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between two events, of those that overlap a span."""
        return [b - a for a, b in pairwise(self.times) if b > begin and a < end]


def make_prompts(count: int, num_tokens: int, dice: random.Random) -> list[list[int]]:
    return [[dice.choice(PRINTABLE) for _ in range(num_tokens)] for _ in range(count)]


async def read_all(
    session: aiohttp.ClientSession, url: str, streams: Sequence[Stream], concurrency: int
) -> None:
    """Read all streams, *concurrency* at a time.

    Raises:
        RuntimeError: one that did not end as asked for.
    """
    waiting = list(streams)[::-1]

    async def client() -> None:
        while waiting:
            one = waiting.pop()
            await one.read(session, url)
            if one.error:
                raise RuntimeError(f"{url}: {one.error}")

    await asyncio.gather(*(client() for _ in range(concurrency)))


def new_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=10)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def play(url: str, streams: Sequence[Stream], concurrency: int) -> float:
    """Read all streams; seconds from the first's start to the last's end."""

    async def run() -> float:
        async with new_session() as session:
            begun = time.monotonic()
            await read_all(session, url, streams, concurrency)
            return time.monotonic() - begun

    return asyncio.run(run())
