"""What became of streamed answers when their engine went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
from load import Stream

from tests.kit.cluster import MODEL_NAME
from vllm_commext.bench.figures import quantile

BEFORE, AFTER, WINDOW = 2.0, 6.0, 0.02
MAX_RANK = 10
"""A greedy token whose rank, by another computation of the same, is worse is wrong: roundings
change the order of the likeliest alone."""


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


def tokens_by_window(streams: Sequence[Stream], went: float) -> list[int]:
    """Tokens of all streams in each `WINDOW` from `BEFORE` an engine went until `AFTER`, which are
    seconds."""
    counts = [0] * round((BEFORE + AFTER) / WINDOW)
    for stream in streams:
        for at, size in zip(stream.times, stream.sizes, strict=True):
            if 0 <= (place := int((at - went + BEFORE) // WINDOW)) < len(counts):
                counts[place] += size
    return counts


async def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait for a condition. Raises ``TimeoutError`` that says what for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"expected {what} within {seconds:g} s")
        await asyncio.sleep(0.01)


async def ranks(session: aiohttp.ClientSession, url: str, stream: Stream) -> list[int]:
    """The rank of each of an answer's tokens where an engine computes all of it at once."""
    ids = [*stream.prompt, *stream.ids]
    body = {"model": MODEL_NAME, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        told = (await response.json())["choices"][0]["prompt_logprobs"]
    of_answer = zip(stream.ids, told[len(stream.prompt) :], strict=True)
    return [one[str(token)]["rank"] for token, one in of_answer]
