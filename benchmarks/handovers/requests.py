"""Requests through a prefill and a decode server, or a plain one, with the time of each step."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.kit.cluster import MODEL_NAME
from tests.kit.parity import PREFILL_PARAMS

REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """One request, in seconds.

    Attributes:
        prefilled: from sending it to the prefill server's answer; 0 where there is none.
        tokens: from sending it to each token.
        text: of all tokens.
    """

    prefilled: float
    tokens: tuple[float, ...]
    text: str

    def figures(self) -> dict[str, float]:
        """Milliseconds, by name."""
        gaps = len(self.tokens) - 2
        return {
            "prefill": self.prefilled * 1e3,
            "hand-over": (self.tokens[0] - self.prefilled) * 1e3 if self.prefilled else 0.0,
            "first token": self.tokens[0] * 1e3,
            "second token": self.tokens[1] * 1e3,
            "TPOT": (self.tokens[-1] - self.tokens[1]) / gaps * 1e3,
        }


def ask_all(
    prefill_url: str | None,
    decode_url: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    on_second: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """All prompts at the same time; *on_second* is called when one has its second token. Raises
    ``RuntimeError`` for an answer that is no success."""

    async def run() -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await asyncio.gather(
                *(
                    _ask(session, prefill_url, decode_url, one, output_tokens, on_second)
                    for one in prompts
                )
            )

    return asyncio.run(run())


async def _ask(
    session: aiohttp.ClientSession,
    prefill_url: str | None,
    decode_url: str,
    prompt: Sequence[int],
    output_tokens: int,
    on_second: Callable[[], None],
) -> Answer:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0.0}
    begun, prefilled = time.perf_counter(), 0.0
    if prefill_url is not None:
        first = {**body, "max_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
        async with session.post(f"{prefill_url}/v1/completions", json=first) as response:
            answer = await response.json()
        if response.status != 200 or not answer.get("kv_transfer_params"):
            raise RuntimeError(f"{prefill_url}: expected parameters for decode, got {answer}")
        body["kv_transfer_params"] = answer["kv_transfer_params"]
        prefilled = time.perf_counter() - begun
    body |= {"max_tokens": output_tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    times: list[float] = []
    text = ""
    async with session.post(f"{decode_url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{decode_url}: HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                count, new = _read(decode_url, line)
                had = len(times)
                times += [time.perf_counter() - begun] * (count - had)
                if had < 2 <= count:
                    on_second()
                text += new
    if len(times) != output_tokens:
        raise RuntimeError(f"{decode_url}: expected {output_tokens} tokens, got {len(times)}")
    return Answer(prefilled, tuple(times), text)


def _read(url: str, line: bytes) -> tuple[int, str]:
    """How many tokens there are with this event, and its text."""
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RuntimeError(f"{url}: {event['error']}")
    return event["usage"]["completion_tokens"], "".join(one["text"] for one in event["choices"])


def begins_with_text(url: str, prompt: Sequence[int]) -> bool:
    """Whether a server's first token is a text: of some nothing can be sent before the next one."""
    body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0.0, "ignore_eos": True}

    async def run() -> bool:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json={**body, "max_tokens": 1}) as response,
        ):
            return bool((await response.json())["choices"][0]["text"].strip("\ufffd"))

    return asyncio.run(run())
