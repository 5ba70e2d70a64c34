"""Reading a client's request body: bounded in time, in bytes, and in what all bodies take."""

import asyncio
from typing import Any

from aiohttp import web

from vllm_commext.proxy.body import LARGE_BODY_BYTES, members_of
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import Deadline
from vllm_commext.proxy.failures import ProxyError
from vllm_commext.proxy.two_step import bad_body


class BodyBudget:
    """The bytes of request bodies that the proxy holds at a time, at most *max_bytes*."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises `ProxyError` 503 if that is more than is left."""
        if self.held_bytes + num_bytes > self._max_bytes:
            message = (
                f"request bodies take {self.held_bytes} bytes and {num_bytes} more would exceed "
                f"{self._max_bytes}; retry"
            )
            raise ProxyError(503, "overloaded", message)
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


class Intake:
    """One request's body, and its share of the budget until `release`."""

    def __init__(self, budget: BodyBudget, config: ProxyConfig) -> None:
        self._budget = budget
        self._config = config
        self.num_bytes = 0

    async def read(self, request: web.Request) -> Any:
        """The JSON that *request* carries, large values as `RawJson`. Raises `ProxyError`."""
        if request.content_type != "application/json":
            raise ProxyError(
                415,
                "bad_request",
                f"expected Content-Type: application/json, got {request.content_type!r}",
            )
        seconds = self._config.client_timeout_seconds
        try:
            with Deadline(seconds):
                raw = await self._read_raw(request)
        except asyncio.TimeoutError as error:
            message = f"the request's body did not arrive within {seconds} s"
            raise ProxyError(408, "bad_request", message) from error
        try:
            return await _decoded(raw)
        except (ValueError, RecursionError) as error:
            raise bad_body(f"the body is not valid JSON: {error}") from error

    def release(self) -> None:
        self._budget.give_back(self.num_bytes)
        self.num_bytes = 0

    async def _read_raw(self, request: web.Request) -> bytes | bytearray:
        announced = request.content_length or 0
        self._take(announced)
        raw: bytes | bytearray = b""
        async for piece in request.content.iter_any():
            if len(raw) + len(piece) > self.num_bytes:
                self._take(len(raw) + len(piece) - self.num_bytes)
            if isinstance(raw, bytearray):
                raw += piece
            elif raw:
                raw = bytearray(raw + piece)
            else:
                raw = piece
        return raw

    def _take(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._config.max_body_bytes:
            message = f"expected a body of at most {self._config.max_body_bytes} bytes"
            raise ProxyError(413, "bad_request", message)
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes


async def _decoded(raw: bytes | bytearray) -> Any:
    """What *raw* holds; other tasks run between its windows."""
    if len(raw) > LARGE_BODY_BYTES:
        await asyncio.sleep(0)
    taking_apart = members_of(raw)
    while True:
        try:
            next(taking_apart)
        except StopIteration as end:
            return end.value
        await asyncio.sleep(0)
