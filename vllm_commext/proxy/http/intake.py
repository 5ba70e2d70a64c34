"""Reading a request's body: bounded in time, in bytes, and in the bytes of all bodies."""

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vllm_commext.proxy.config import MIB, ProxyConfig
from vllm_commext.proxy.http.body import LARGE_BODY_BYTES, STEP_SECONDS, in_steps, members_of
from vllm_commext.proxy.outcome import ProxyError, bad_request

SMALL_BODY_BYTES = MIB
_FOR_SMALL_BODIES = 8
"""One such part of the budget is kept for bodies of at most `SMALL_BODY_BYTES`."""


class BodyBudget:
    """Bytes of request bodies at a time. turns: held while a large body is parsed, and as long
    after, so that others have half of the processor."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0
        self.turns = asyncio.Lock()

    def take(self, num_bytes: int, body_bytes: int) -> None:
        """Raises `ProxyError` 503 if *num_bytes* more are too many."""
        is_small = body_bytes <= SMALL_BODY_BYTES
        most = self._max_bytes - (0 if is_small else self._max_bytes // _FOR_SMALL_BODIES)
        if self.held_bytes + num_bytes > most:
            message = f"request bodies take {self.held_bytes} bytes of {most}; retry"
            raise ProxyError(503, "overloaded", message)
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


@dataclass(eq=False)
class Intake:
    """One request's body, and its share of the budget until `close`."""

    _budget: BodyBudget
    _config: ProxyConfig
    num_bytes: int = 0
    body: Any = None

    async def read(self, request: web.Request) -> None:
        """Read and parse the body. Raises `ProxyError`."""
        if request.content_type != "application/json":
            raise ProxyError(
                415,
                "bad_request",
                f"expected Content-Type: application/json, got {request.content_type!r}",
            )
        seconds, rate = self._config.client_timeout_seconds, self._config.upload_bytes_per_second
        try:
            async with asyncio.timeout(seconds) as bound:
                raw = await self._read_raw(request, bound)
        except TimeoutError as error:
            message = (
                f"the request's body did not arrive within {seconds} s and a second for each "
                f"{rate} bytes: got {self.num_bytes} bytes"
            )
            raise ProxyError(408, "bad_request", message) from error
        try:
            self.body = await self._decoded(raw)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error

    def close(self) -> None:
        self._budget.give_back(self.num_bytes)
        self.num_bytes, self.body = 0, None

    async def _read_raw(self, request: web.Request, bound: asyncio.Timeout) -> bytes | bytearray:
        most, end = self._config.max_body_bytes, bound.when()
        assert end is not None  # as every body has a bound
        announced = request.content_length or 0
        raw: bytes | bytearray = b""
        if announced > most:
            raise ProxyError(413, "bad_request", f"expected a body of at most {most} bytes")
        async for piece in request.content.iter_any():
            num_bytes = len(raw) + len(piece)
            bound.reschedule(end + num_bytes / self._config.upload_bytes_per_second)
            if num_bytes > most:
                raise ProxyError(413, "bad_request", f"expected a body of at most {most} bytes")
            self._budget.take(len(piece), max(announced, num_bytes))
            self.num_bytes = num_bytes
            if isinstance(raw, bytearray):
                raw += piece
            elif raw:
                raw = bytearray(raw + piece)
            else:
                raw = piece
        return raw

    async def _decoded(self, raw: bytes | bytearray) -> Any:
        taking_apart = members_of(raw)
        if len(raw) <= LARGE_BODY_BYTES:
            return await in_steps(taking_apart)
        return await in_steps(taking_apart, self._budget.turns, STEP_SECONDS)
