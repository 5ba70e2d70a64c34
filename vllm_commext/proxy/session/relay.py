"""Passes an engine's response to the client as it arrives."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
from aiohttp import web
from prometheus_client import Histogram

from vllm_commext.proxy.errors_phases import ClientGoneError, ProxyError, Resume
from vllm_commext.proxy.http.answer_events import DONE, error_event, num_whole, with_cached_tokens
from vllm_commext.proxy.session import failures
from vllm_commext.proxy.session.failures import Deadline, EngineLostError, Losses, Opened, Watch
from vllm_commext.proxy.session.resumable_stream import Transcript

logger = logging.getLogger("vllm.commext.proxy")

# These describe one connection, or the proxy sets its own.
_NOT_PASSED_ON = frozenset[str]().union(
    ("connection", "content-length", "date", "keep-alive", "proxy-authenticate", "server"),
    ("te", "trailer", "transfer-encoding", "upgrade"),
)

BULK_BYTES = 4 << 10


class ClientStalledError(Exception):
    """The client takes no data."""


class LeftError(Exception):
    """The engine is to be left."""


class StreamWatch(Watch):
    """Bounds a stream's waits by one timer. Call `reading` before each wait for the engine and
    `writing` before each for the client; *since* is the loop's time of that call. Raises
    `TimeoutError`, `EngineLostError`, `ClientStalledError` or `LeftError`."""

    def __init__(self, on_lost: failures.OnLost, read_seconds: float, write_seconds: float) -> None:
        super().__init__(on_lost)
        self._limits = {False: read_seconds, True: write_seconds}

    def _begin(self) -> None:
        self.writing()
        self._timer = self._loop.call_later(min(self._limits.values()), self._look)

    def reading(self) -> None:
        self.is_writing, self.since = False, self._loop.time()

    def writing(self) -> None:
        self.is_writing, self.since = True, self._loop.time()

    def _look(self) -> None:
        left = self._limits[self.is_writing] - (self._loop.time() - self.since)
        if left <= 0:
            self._interrupt(ClientStalledError if self.is_writing else TimeoutError)
            return
        self._timer = self._loop.call_later(min(left, *self._limits.values()), self._look)

    def leave(self) -> None:
        """End a wait for the engine with `LeftError`; the client's goes on."""
        if not self.is_writing:
            self._interrupt(LeftError)

    def _lose(self) -> None:
        if not self.is_writing:
            super()._lose()


class Ended(NamedTuple):
    """The client has the whole answer."""


class Left(NamedTuple):
    """The answer has stopped at the end of an event, because `Relay.leave` was called."""


class Lost(NamedTuple):
    failure: ProxyError


End = Ended | Left | Lost


class Waits(NamedTuple):
    """Longest ones, in seconds: for a stream's next piece, for an answer's, and for the client."""

    repeated: float
    piece: float
    client: float


@dataclass(eq=False)
class Relay:
    """One answer on its way to a client; a token's cost is spent here. *bulk* is held while much of
    a stream is taken in. has_sent_end: the client has all of a stream's events."""

    _request: web.Request
    _waits: Waits
    _gaps: Histogram
    _losses: Losses
    _transcript: Transcript | None
    response: web.StreamResponse
    _bulk: asyncio.Lock
    _watch: StreamWatch | None = None
    _leaves: bool = False
    has_sent_end: bool = False

    def leave(self) -> None:
        """Stop when what has come is sent."""
        self._leaves = True
        if self._watch is not None:
            self._watch.leave()

    async def send(self, opened: Opened) -> End:
        """Send an engine's answer as far as it comes. Raises `ClientGoneError`."""
        engine, waits, self._leaves = opened.engine, self._waits, False
        try:
            with StreamWatch(engine.work.on_lost, waits.piece, waits.client) as watch:
                self._watch = watch
                await self._pass_on(opened, watch)
        except (TimeoutError, aiohttp.ClientError, OSError, EngineLostError) as error:
            is_lost = isinstance(error, EngineLostError)
            if not is_lost and (self._watch is None or self._watch.is_writing):
                raise ClientGoneError("the client closed its connection") from error
            if not is_lost and isinstance(error, TimeoutError):
                engine.state.note_silence()
            lost = self._lost()
            return Lost(failures.meaning_of(engine, error, waits.piece, lost, may_restart=True))
        except ProxyError as failure:
            return Lost(failure)
        except LeftError:
            return Left()
        except ClientStalledError as error:
            self._cut()
            raise ClientGoneError(f"the client took no data for {waits.client} s") from error
        except Exception:
            logger.exception("unexpected error in the midst of an answer")
            return Lost(ProxyError(500, "internal", "unexpected error; see the proxy's log"))
        finally:
            self._watch = None
        return Ended()

    @property
    def _held(self) -> bytes:
        return (self._transcript.held or b"") if self._transcript is not None else b""

    def _lost(self) -> Losses:
        if self._transcript is not None:
            self._transcript.settle()
            self._losses.break_off(self._transcript.place)
        return self._losses

    async def _pass_on(self, opened: Opened, watch: StreamWatch) -> None:
        read, cutter, response = opened.response.content.readany, opened.cutter, self.response
        engine, cached_tokens = opened.engine, opened.cached_tokens
        on_gap, transcript = self._gaps.labels(engine.name).observe, self._transcript
        await response.prepare(self._request)
        ready, held, is_open = opened.take(), b"", True
        arrived = watch.since
        while is_open or ready or held:
            if transcript is not None:
                if len(ready) > BULK_BYTES:  # takes milliseconds: others go on in between
                    async with self._bulk:
                        ready = transcript.pass_on(ready)
                        await asyncio.sleep(0)
                else:
                    ready = transcript.pass_on(ready)
            if cached_tokens is not None:
                ready = held + ready
                end = num_whole(ready) if is_open else len(ready)
                ready, held = with_cached_tokens(ready[:end], cached_tokens), ready[end:]
            if ready:
                await response.write(ready)
                self.has_sent_end = ready.rstrip().endswith(DONE)
            if transcript is not None and transcript.held is not None:
                raise failures.told(engine, self._held, self._lost())
            watch.reading()
            if self._leaves:
                raise LeftError
            piece = await read()
            is_open = bool(piece)
            watch.writing()
            if cutter is None:
                ready = piece
            elif piece:
                ready = cutter.feed(piece)
                opened.note(piece, watch.since)
                on_gap(watch.since - arrived)
                arrived = watch.since
            else:
                ready = cutter.rest()
                is_end = self.has_sent_end or ready.rstrip().endswith(DONE)
                if opened.has_end and not is_end:
                    raise failures.bad_answer(engine, "a stream without the event that ends it")
        await response.write_eof()

    async def catch_up(self, opened: Opened, trial: Transcript, may_reset: bool) -> Resume | None:
        """Read until another engine has repeated what the client has, from the start if it
        *may_reset*; why it cannot go on, or None."""
        unread, engine, on_lost = opened.first, opened.engine, opened.engine.work.on_lost
        seconds = self._waits.repeated
        while opened.cutter is not None:
            trial.pass_on(unread)
            if trial.has_failed or trial.refusal is not None:
                return trial.refusal or Resume.FAILED
            if not trial.is_behind:
                return None
            if not may_reset:
                return Resume.ANEW
            with failures.of(engine, seconds, self._losses), Deadline(seconds, on_lost):
                piece = await opened.response.content.readany()
            if not piece:
                break
            opened.note(piece, time.monotonic())
            unread = opened.cutter.feed(piece)
            opened.keep(unread)
        return Resume.FAILED

    async def end_broken(self, opened: Opened, failure: ProxyError) -> None:
        """Tell the client of *failure*, after the status line."""
        if opened.cutter is None:
            self._cut()  # a body shorter than announced is the only sign there is
            return
        try:
            async with asyncio.timeout(self._waits.client):
                held = self._held
                told = held + DONE + b"\n\n" if held else error_event(failure.in_a_stream())
                await self.response.write(told)
                await self.response.write_eof()
        except (TimeoutError, ConnectionError) as error:
            self._cut()
            raise ClientGoneError("the client closed its connection") from error

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


class _Response(web.StreamResponse):
    _send_headers_immediately = False  # but with the first bytes of the body, in one write


def response_to(opened: Opened, extra_headers: Mapping[str, str]) -> web.StreamResponse:
    """The client's response, which begins as the engine's does."""
    upstream = opened.response
    response = _Response(status=upstream.status)
    for name, value in upstream.headers.items():
        if name.lower() not in _NOT_PASSED_ON:
            response.headers.add(name, value)
    response.headers.update(extra_headers)
    if opened.cutter is None and opened.cached_tokens is None:  # others may get more or less
        response.content_length = upstream.content_length
    return response
