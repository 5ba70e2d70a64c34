"""Passing a decode engine's response to the client as it arrives."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from vllm_commext.proxy.answers import failures_of
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import Deadline
from vllm_commext.proxy.engines import Engine
from vllm_commext.proxy.failures import ClientGoneError, ProxyError
from vllm_commext.proxy.sse import EventCutter, error_event

# These describe one connection, or are set anew by whoever writes the response.
_NOT_PASSED_ON = frozenset(
    (
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


@dataclass(frozen=True)
class Relayed:
    """A response that has been sent; failure says what cut it short."""

    response: web.StreamResponse
    failure: ProxyError | None = None


class Relay:
    """One response on its way from *engine* to the client of *request*."""

    def __init__(
        self,
        request: web.Request,
        engine: Engine,
        upstream: aiohttp.ClientResponse,
        config: ProxyConfig,
    ) -> None:
        self._request = request
        self._engine = engine
        self._upstream = upstream
        self._config = config
        self._cutter = EventCutter() if upstream.content_type == "text/event-stream" else None

    async def run(self, extra_headers: Mapping[str, str]) -> Relayed:
        """Send everything. Raises `ClientGoneError`, or `ProxyError` before the first byte."""
        piece = await self._read(self._config.decode_timeout_seconds)
        response = self._begin(extra_headers)
        try:
            await self._to_client(response.prepare(self._request))
            idle_seconds = min(
                self._config.decode_idle_timeout_seconds, self._config.decode_timeout_seconds
            )
            while piece:
                await self._send(response, piece)
                piece = await self._read(idle_seconds)
            if self._cutter is not None:
                await self._write(response, self._cutter.rest())
            await self._to_client(response.write_eof())
        except ProxyError as failure:
            await self._end_broken(response, failure)
            return Relayed(response, failure)
        return Relayed(response)

    def _begin(self, extra_headers: Mapping[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(status=self._upstream.status)
        for name, value in self._upstream.headers.items():
            if name.lower() not in _NOT_PASSED_ON:
                response.headers.add(name, value)
        response.headers.update(extra_headers)
        if self._cutter is None:  # a stream may get an event more than the engine announced
            response.content_length = self._upstream.content_length
        return response

    async def _read(self, seconds: float) -> bytes:
        with failures_of(self._engine, seconds), Deadline(seconds):
            return await self._upstream.content.readany()

    async def _send(self, response: web.StreamResponse, piece: bytes) -> None:
        await self._write(response, piece if self._cutter is None else self._cutter.feed(piece))

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if data:
            await self._to_client(response.write(data))

    async def _to_client(self, sending: Awaitable[object]) -> None:
        seconds = self._config.client_timeout_seconds
        try:
            with Deadline(seconds):
                await sending
        except asyncio.TimeoutError as error:
            self._cut()
            raise ClientGoneError(f"the client took no data for {seconds} s") from error
        except ConnectionError as error:
            raise ClientGoneError("the client closed its connection") from error

    async def _end_broken(self, response: web.StreamResponse, failure: ProxyError) -> None:
        """Tell the client of *failure*, when the status line has been sent long ago."""
        if self._cutter is None:
            self._cut()  # a body shorter than announced is the only sign there is
            return
        await self._write(response, error_event(failure.as_json()))
        await self._to_client(response.write_eof())

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
