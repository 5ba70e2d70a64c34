"""Passing a decode engine's response to the client as it arrives."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from vllm_commext.proxy.answers import failure_of
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import ClientStalledError, Deadline, EngineLostError, StreamWatch
from vllm_commext.proxy.failures import ClientGoneError, ProxyError
from vllm_commext.proxy.opening import Opened
from vllm_commext.proxy.sse import error_event

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
    """One answer on its way to the client of *request*.

    What a token costs the proxy is spent here, so one timer watches over the whole stream, and
    failures are told apart outside of the loop. *on_gap* gets the seconds between two pieces.
    """

    def __init__(
        self,
        request: web.Request,
        opened: Opened,
        config: ProxyConfig,
        on_gap: Callable[[float], object],
    ) -> None:
        self._request = request
        self._opened = opened
        self._config = config
        self._on_gap = on_gap
        self._is_engines_turn = False

    async def run(self, extra_headers: Mapping[str, str]) -> Relayed:
        """Send everything. Raises `ClientGoneError`."""
        response = self._begin(extra_headers)
        idle_seconds = min(
            self._config.decode_idle_timeout_seconds, self._config.decode_timeout_seconds
        )
        try:
            with StreamWatch(
                self._opened.engine, idle_seconds, self._config.client_timeout_seconds
            ) as watch:
                await self._pass_on(response, watch)
        except (ConnectionError, aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if not self._is_engines_turn:
                raise ClientGoneError("the client closed its connection") from error
            failure = failure_of(self._opened.engine, error, idle_seconds)
        except EngineLostError as error:
            failure = failure_of(self._opened.engine, error, idle_seconds)
        except ClientStalledError as error:
            self._cut()
            seconds = self._config.client_timeout_seconds
            raise ClientGoneError(f"the client took no data for {seconds} s") from error
        else:
            return Relayed(response)
        await self._end_broken(response, failure)
        return Relayed(response, failure)

    async def _pass_on(self, response: web.StreamResponse, watch: StreamWatch) -> None:
        read, cutter = self._opened.response.content.readany, self._opened.cutter
        await response.prepare(self._request)
        piece = ready = self._opened.first
        arrived = watch.since
        while piece or ready:
            if ready:
                await response.write(ready)
            self._is_engines_turn = True
            watch.reading()
            piece = await read()
            self._is_engines_turn = False
            watch.writing()
            if cutter is None:
                ready = piece
            elif piece:
                ready = cutter.feed(piece)
                self._on_gap(watch.since - arrived)
                arrived = watch.since
            else:
                ready = cutter.rest()
        await response.write_eof()

    def _begin(self, extra_headers: Mapping[str, str]) -> web.StreamResponse:
        upstream = self._opened.response
        response = web.StreamResponse(status=upstream.status)
        for name, value in upstream.headers.items():
            if name.lower() not in _NOT_PASSED_ON:
                response.headers.add(name, value)
        response.headers.update(extra_headers)
        if self._opened.cutter is None:  # a stream may get an event more than was announced
            response.content_length = upstream.content_length
        return response

    async def _end_broken(self, response: web.StreamResponse, failure: ProxyError) -> None:
        """Tell the client of *failure*, when the status line has been sent long ago."""
        if self._opened.cutter is None:
            self._cut()  # a body shorter than announced is the only sign there is
            return
        seconds = self._config.client_timeout_seconds
        try:
            with Deadline(seconds):
                await response.write(error_event(failure.as_json()))
                await response.write_eof()
        except (ConnectionError, asyncio.TimeoutError) as error:
            self._cut()
            raise ClientGoneError("the client closed its connection") from error

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
