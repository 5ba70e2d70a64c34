"""Passes an engine's response to the client as it arrives."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from prometheus_client import Histogram

from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import (
    ClientStalledError,
    EngineLostError,
    LeftError,
    StreamWatch,
)
from vllm_commext.proxy.http.connections import cut
from vllm_commext.proxy.http.sse import DONE, error_event, with_cached_tokens
from vllm_commext.proxy.outcome import ClientGoneError, Losses, ProxyError
from vllm_commext.proxy.session.response import Opened, bad_answer, failure_of, failure_told
from vllm_commext.proxy.session.transcript import Transcript

logger = logging.getLogger("vllm.commext.proxy")

# These describe one connection, or the proxy sets its own.
_NOT_PASSED_ON = frozenset(
    (
        *("connection", "content-length", "date", "keep-alive", "proxy-authenticate", "server"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)


class _UnfinishedError(Exception):
    """The engine ended a stream too early, without an error."""


class _GivenUpError(Exception):
    """The engine gave the stream up, or another one continues otherwise."""


LEFT = "left"
"""Kind of failure of a stream that was stopped to leave its engine."""


@dataclass(eq=False)
class Relay:
    """One answer on its way to a client; a token's cost is spent here. has_sent_end: the client has
    all of a stream's events. *resuming* gives the rest of a failed stream, or None."""

    _request: web.Request
    _opened: Opened
    _config: ProxyConfig
    _gaps: Histogram
    _losses: Losses
    _transcript: Transcript | None
    _resuming: Callable[[ProxyError], Awaitable[Opened | None]]
    _is_engines_turn: bool = False
    _watch: StreamWatch | None = None
    _leaves: bool = False
    has_sent_end: bool = False

    def leave(self) -> None:
        """Stop when what has come is sent, and go on as *resuming* says."""
        self._leaves = True
        if self._watch is not None:
            self._watch.leave()

    async def run(
        self, extra_headers: Mapping[str, str]
    ) -> tuple[web.StreamResponse, ProxyError | None]:
        """Send everything; returns the failure that ended it, too. Raises `ClientGoneError`."""
        response = self._begin(extra_headers)
        while (failure := await self._send(response)) is not None:
            opened = await self._resuming(failure)
            if opened is None:
                await self._end_broken(response, failure)
                break
            self._opened = opened
        return response, failure

    async def _send(self, response: web.StreamResponse) -> ProxyError | None:
        idle_seconds = min(
            self._config.decode_idle_timeout_seconds, self._config.decode_timeout_seconds
        )
        try:
            with StreamWatch(
                self._opened.engine.on_lost, idle_seconds, self._config.client_timeout_seconds
            ) as watch:
                self._watch = watch
                await self._pass_on(response, watch)
        except (TimeoutError, ConnectionError, aiohttp.ClientError, OSError) as error:
            if not self._is_engines_turn:
                raise ClientGoneError("the client closed its connection") from error
            return failure_of(self._opened.engine, error, idle_seconds, self._lost())
        except EngineLostError as error:
            return failure_of(self._opened.engine, error, idle_seconds, self._lost())
        except LeftError:
            self._leaves, self._opened.first = False, b""
            return ProxyError(503, LEFT, f"{self._opened.engine.name} drains")
        except _UnfinishedError:
            return bad_answer(self._opened.engine, "a stream without the event that ends it")
        except _GivenUpError:
            held = self._transcript.held if self._transcript is not None else b""
            return failure_told(self._opened.engine, held, self._lost())
        except ClientStalledError as error:
            cut(self._request)
            seconds = self._config.client_timeout_seconds
            raise ClientGoneError(f"the client took no data for {seconds} s") from error
        except Exception:
            logger.exception("unexpected error in the midst of an answer")
            return ProxyError(500, "internal", "unexpected error; see the proxy's log")
        finally:
            self._watch = None
        return None

    def _lost(self) -> Losses:
        if self._transcript is not None:
            self._transcript.settle()
            self._losses.break_off(self._transcript.place)
        return self._losses

    async def _pass_on(self, response: web.StreamResponse, watch: StreamWatch) -> None:
        read, cutter = self._opened.response.content.readany, self._opened.cutter
        cached_tokens, answer = self._opened.cached_tokens, self._opened.answer
        on_gap, transcript = self._gaps.labels(self._opened.engine.name).observe, self._transcript
        await response.prepare(self._request)
        ready, is_open = self._opened.first, True
        arrived = watch.since
        while is_open or ready:
            if transcript is not None:
                ready = transcript.pass_on(ready)
            if cached_tokens is not None:
                ready = with_cached_tokens(ready, cached_tokens)
            if ready:
                await response.write(ready)
                self.has_sent_end = ready.rstrip().endswith(DONE)
            if transcript is not None and transcript.has_failed:
                raise _GivenUpError
            self._is_engines_turn = True
            watch.reading()
            if self._leaves:
                raise LeftError
            piece = await read()
            is_open = bool(piece)
            self._is_engines_turn = False
            watch.writing()
            if cutter is None:
                ready = piece
            elif piece:
                ready = cutter.feed(piece)
                if answer is not None:
                    answer.go_on(piece.count(b"\n\n"), watch.since)
                on_gap(watch.since - arrived)
                arrived = watch.since
            else:
                ready = cutter.rest()
                is_end = self.has_sent_end or ready.rstrip().endswith(DONE)
                if self._opened.has_end and not is_end:
                    raise _UnfinishedError
        await response.write_eof()

    def _begin(self, extra_headers: Mapping[str, str]) -> web.StreamResponse:
        upstream = self._opened.response
        response = web.StreamResponse(status=upstream.status)
        for name, value in upstream.headers.items():
            if name.lower() not in _NOT_PASSED_ON:
                response.headers.add(name, value)
        response.headers.update(extra_headers)
        has_length = self._opened.cutter is None and self._opened.cached_tokens is None
        if has_length:  # a stream may get an event more than was announced
            response.content_length = upstream.content_length
        return response

    async def _end_broken(self, response: web.StreamResponse, failure: ProxyError) -> None:
        """Tell the client of *failure*, after the status line."""
        if self._opened.cutter is None:
            cut(self._request)  # a body shorter than announced is the only sign there is
            return
        try:
            async with asyncio.timeout(self._config.client_timeout_seconds):
                held = self._transcript.held if self._transcript is not None else b""
                told = held + DONE + b"\n\n" if held else error_event(failure.in_a_stream())
                await response.write(told)
                await response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            cut(self._request)
            raise ClientGoneError("the client closed its connection") from error
