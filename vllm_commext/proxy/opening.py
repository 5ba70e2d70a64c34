"""A decode engine's answer up to the point from which the client is told of it."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

import aiohttp

from vllm_commext.proxy.answers import aborted, empty, engine_error, read_answer
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

MAX_OPENING_BYTES = 64 << 10


@dataclass
class Opened:
    """An answer that has begun. first: what may be sent on already; a stream's first token is in
    it. cutter: of a stream of events. opened_at: `time.monotonic` when *first* was there.
    work: what ends with the answer."""

    engine: Engine
    response: aiohttp.ClientResponse
    first: bytes
    cutter: EventCutter | None
    opened_at: float
    work: ExitStack

    def close(self) -> None:
        """Let go of the engine, which aborts what it has not finished."""
        self.work.close()


async def read_opening(
    engine: Engine, response: aiohttp.ClientResponse
) -> tuple[bytes, EventCutter | None]:
    """The first piece of *response*, and what cuts the rest of a stream into whole events.

    Raises `ProxyError` if it tells of a failed request. Only its beginning can: vLLM answers a
    stream with status 200 before it has computed anything, and a failure is then the first
    event, or follows the role that opens a chat, or is the end of a stream without an answer.
    """
    if response.status >= 500:
        raise engine_error(engine, response.status, await read_answer(engine, response))
    if response.content_type != "text/event-stream":
        first = await response.content.readany()
        if is_aborted(first):
            raise aborted(engine)
        return first, None
    cutter = EventCutter()
    first = await _opening(response, cutter)
    if opens_aborted(first):
        raise aborted(engine)
    if (failed := opening_error(first)) is not None and failed[0] >= 500:
        raise engine_error(engine, failed[0], EngineAnswer(failed[1], "application/json"))
    if ends_empty(first):
        raise empty(engine)
    return first, cutter


async def _opening(response: aiohttp.ClientResponse, cutter: EventCutter) -> bytes:
    """Whole events, until one of them says something."""
    events = b""
    while piece := await response.content.readany():
        events += cutter.feed(piece)
        if events and (len(events) > MAX_OPENING_BYTES or not says_nothing(events)):
            break
        await asyncio.sleep(0)
    return events
