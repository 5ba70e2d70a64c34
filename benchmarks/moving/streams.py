"""Streamed answers that are read token by token, and what became of them when their engine went."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from vllm_commext.bench.figures import quantile

MAX_RANK = 10
"""A greedy token whose rank, by another computation of the same, is worse is wrong: roundings
change the order of the likeliest alone."""
_END = b"\n\n"


@dataclass
class Stream:
    """One greedy answer of exactly *num_tokens*; salt: of its conversation; times: of each event
    that has tokens; ids: of all tokens; error: what went wrong, or empty."""

    prompt: Sequence[int]
    num_tokens: int
    salt: str = ""
    ids: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    num_told: int = 0
    num_resumed: int = 0
    error: str = ""

    async def read(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        """Ask, and read to the end."""
        body = {
            **{"model": model, "prompt": list(self.prompt), "max_tokens": self.num_tokens},
            **{"temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True},
            "stream_options": {"include_usage": True},
            **({"cache_salt": self.salt} if self.salt else {}),
        }
        headers = {"X-Session-ID": self.salt} if self.salt else {}
        rest, is_whole = b"", False
        try:
            request = session.post(f"{url}/v1/completions", json=body, headers=headers)
            async with request as response:
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
            if choice.get("token_ids"):
                self.ids += choice["token_ids"]
                self.times.append(now)

    def next_after(self, at: float) -> float | None:
        """When the first event after a time came."""
        return next((one for one in self.times if one > at), None)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between two events, of those that overlap a span."""
        return [b - a for a, b in pairwise(self.times) if b > begin and a < end]


@dataclass(frozen=True)
class Span:
    """When all streams ran, when the engine went, and when it served nobody any more; seconds of
    the monotonic clock."""

    steady: float
    went: float
    empty: float


def figures(stream: Stream, span: Span) -> dict[str, float | int | str]:
    """Of one stream: milliseconds of its gaps before and since, and until it went on."""
    before = stream.gaps(span.steady, span.went)
    since = stream.gaps(span.went, max(span.empty, span.went))
    on = stream.next_after(span.empty)
    p99, longest = quantile(before, 0.99), max(since, default=0.0)
    return {
        "tokens": len(stream.ids),
        "resumed": stream.num_resumed,
        "p99 before": 1e3 * p99,
        "longest": 1e3 * longest,
        "beyond": 1e3 * (longest - p99),
        "on": 1e3 * (on - span.empty) if on is not None else float("nan"),
        "error": stream.error,
    }


async def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait for a condition. Raises ``TimeoutError`` that says what for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"expected {what} within {seconds:g} s")
        await asyncio.sleep(0.01)


async def ranks(session: aiohttp.ClientSession, url: str, model: str, stream: Stream) -> list[int]:
    """The rank of each of an answer's tokens where an engine computes all of it at once."""
    ids = [*stream.prompt, *stream.ids]
    body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        told = (await response.json())["choices"][0]["prompt_logprobs"]
    of_answer = zip(stream.ids, told[len(stream.prompt) :], strict=True)
    return [one[str(token)]["rank"] for token, one in of_answer]
