"""A number of streamed requests at once, each with its times."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.kit.cluster import MODEL_NAME
from tests.kit.prompts import PRINTABLE

REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """One request: seconds from sending it to the first token, to the last, and the tokens."""

    first_seconds: float
    last_seconds: float
    token_ids: tuple[int, ...]

    @property
    def seconds_per_token(self) -> float:
        """Mean time between two tokens after the first."""
        return (self.last_seconds - self.first_seconds) / max(len(self.token_ids) - 1, 1)


@dataclass(frozen=True)
class Outcome:
    """All requests of one load, and the seconds from the first's start to the last's end."""

    answers: Sequence[Answer]
    seconds: float


def make_prompts(number: int, num_tokens: int) -> list[list[int]]:
    """Prompts of one length, the same in every run."""
    numbers = random.Random(1)
    return [[numbers.choice(PRINTABLE) for _ in range(num_tokens)] for _ in range(number)]


def run(
    url: str, prompts: Sequence[Sequence[int]], concurrency: int, output_tokens: int
) -> Outcome:
    """Ask everything, ``concurrency`` requests at a time. Raises ``RuntimeError`` for any answer
    that is not as many tokens as asked for."""
    return asyncio.run(_run(url, prompts, concurrency, output_tokens))


async def _run(
    url: str, prompts: Sequence[Sequence[int]], concurrency: int, output_tokens: int
) -> Outcome:
    waiting = list(enumerate(prompts))[::-1]
    answers: dict[int, Answer] = {}

    async def client(session: aiohttp.ClientSession) -> None:
        while waiting:
            place, prompt = waiting.pop()
            answers[place] = await _ask(session, url, prompt, output_tokens)

    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    return Outcome([answers[place] for place in range(len(prompts))], seconds)


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], output_tokens: int
) -> Answer:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    started = time.perf_counter()
    first = last = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            new = _tokens(url, line)
            if new:
                last = time.perf_counter() - started
                first = first or last
                token_ids += new
    if len(token_ids) != output_tokens:
        raise RuntimeError(f"{url}: expected {output_tokens} tokens, got {len(token_ids)}")
    return Answer(first, last, tuple(token_ids))


def _tokens(url: str, line: bytes) -> list[int]:
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RuntimeError(f"{url}: {event['error']}")
    return [token for choice in event["choices"] for token in choice.get("token_ids") or []]
