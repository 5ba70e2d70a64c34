"""A decode engine's answer up to the point from which the client is told of it."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

import aiohttp

from vllm_commext.proxy.answers import (
    aborted,
    bad_answer,
    check_answer,
    engine_error,
    read_answer,
)
from vllm_commext.proxy.engines import Engine
from vllm_commext.proxy.failures import EngineAnswer
from vllm_commext.proxy.sse import (
    EventCutter,
    ends_empty,
    is_aborted,
    opening_error,
    opens_aborted,
    says_nothing,
)

EVENTS = "text/event-stream"
MAX_OPENING_BYTES = 64 << 10
MAX_WHOLE_BYTES = 1 << 20
"""Of an answer in one piece that is read before the client is told of it: it can be repeated."""


@dataclass
class Opened:
    """An answer that has begun. first: what may be sent on already; a stream's first token is in
    it. cutter: of a stream of events. has_end: such a stream ends with an event that says so.
    opened_at: `time.monotonic` when *first* was there. work: what ends with the answer.
    cached_tokens: of the prompt, at the prefill engine, where the decode engine was asked before
    that could say."""

    engine: Engine
    response: aiohttp.ClientResponse
    first: bytes
    cutter: EventCutter | None
    has_end: bool
    opened_at: float
    work: ExitStack
    cached_tokens: int | None = None

    def close(self) -> None:
        """Let go of the engine, which aborts what it has not finished."""
        self.work.close()


async def read_opening(
    engine: Engine, response: aiohttp.ClientResponse, streams: bool | None
) -> tuple[bytes, EventCutter | None]:
    """The first piece of *response*, and what cuts the rest of a stream into whole events.

    *streams*: whether a completion is to come as a stream; None for what is none, or may come in
    either form. Raises `ProxyError` if it tells of a failed request, or tells nothing. Only its
    beginning can: vLLM answers a stream with status 200 before it has computed anything, and a
    failure is then the first event, or follows the role that opens a chat, or is the end of a
    stream without an answer.
    """
    if response.status >= 500:
        raise engine_error(engine, response.status, await read_answer(engine, response))
    is_stream = response.content_type == EVENTS
    if response.status < 400 and streams is not None:
        expected = EVENTS if streams else "application/json"
        if response.content_type != expected:
            raise bad_answer(engine, f"{response.content_type} in place of {expected}")
    if is_stream:
        cutter = EventCutter()
        return await _opening(engine, response, cutter), cutter
    first, is_whole = await _beginning(response)
    if is_aborted(first):
        raise aborted(engine)
    if is_whole and streams is False and response.status < 400:
        check_answer(engine, first)
    elif not first and response.status < 400:
        raise bad_answer(engine, "no byte")
    return first, None


async def _beginning(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """An answer in one piece, or much of one, and whether that is all."""
    body = bytearray()
    while len(body) <= MAX_WHOLE_BYTES:
        piece = await response.content.readany()
        if not piece:
            return bytes(body), True
        body += piece
    return bytes(body), False


async def _opening(engine: Engine, response: aiohttp.ClientResponse, cutter: EventCutter) -> bytes:
    """Whole events, until one of them says something."""
    events, has_ended = b"", False
    while not has_ended and (not events or says_nothing(events)):
        if len(events) > MAX_OPENING_BYTES:
            break
        piece = await response.content.readany()
        events += cutter.feed(piece)
        has_ended = not piece
        await asyncio.sleep(0)
    if opens_aborted(events):
        raise aborted(engine)
    if (failed := opening_error(events)) is not None and failed[0] >= 500:
        raise engine_error(engine, failed[0], EngineAnswer(failed[1], "application/json"))
    if has_ended or ends_empty(events):
        raise bad_answer(engine, "a stream that ends before its first token; its log may say why")
    return events
