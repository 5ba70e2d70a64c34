"""Bounds clients' connections, and what each may cost before it asks for anything.

Where there are too many, the one that has kept the proxy waiting longest (for a handshake, a head,
or the rest of a body) is closed, if that is long enough; else the new one is refused. Requests that
are not whole are parsed for a share of the time alone. Of those that are, a few begin at a time,
each client's in turn.
"""

import asyncio
import re
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import EMPTY_PAYLOAD, web

from vllm_commext.networks import network_of
from vllm_commext.proxy.errors_phases import ProxyError, complaints

# Bodies stay as they come, and a head may be as large as a vLLM server takes it.
_HTTP: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75.0,
    "tcp_keepalive": False,  # the port's, see `Connections.bound_waits`
    "lingering_time": 5.0,
    "max_line_size": 64 << 10,
    "max_field_size": 64 << 10,
    "max_headers": 256,
}
MAX_HEAD_BYTES = 512 << 10
"""Of a connection, until its next request begins: heads, and bodies of requests that wait. No more
is read beyond that; where none waits, the head has no end, and the connection is cut off."""
MAX_HEADS_BYTES = 16 << 20
"""Of all heads that are not whole, or wait for the answer before them: beyond that, one may have
`_SMALL_HEAD_BYTES`."""
_SMALL_HEAD_BYTES = 8 << 10
_FIRST_REQUEST_SECONDS = 10.0
_BEGINNING_BYTES = 16 << 10
"""Of a request that is not whole: beyond that it is under way, and costs what bytes cost."""
_STEP_SECONDS, _PAUSE_SECONDS = 0.002, 0.006
_STARTS = 2
"""Most requests that begin between two looks at all connections."""
_ENTRY_SECONDS = 0.02
"""uvloop takes one new connection a look. While they come, none begins for so long."""
_BODY = re.compile(rb"\r\n(?:content-length:[ \t]*(\d{1,12})|transfer-encoding:)", re.IGNORECASE)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)
MIN_IDLE_SECONDS = 1.0
"""A connection that has waited for less is not idle: its request may be under way."""
_MAX_LOOKS = 8
_REFUSED_SECONDS = 2.0
"""A refused connection is kept until its request is read: one that is closed before is reset, and
its client never reads the refusal."""
_TLS_SECONDS, _HANDSHAKE = 10.0, b"\x16"
_MAX_HANDSHAKES = 32
"""Of one client in progress. While others of it wait, each has `MIN_IDLE_SECONDS`."""
_NO_HTTP = "expected a request in HTTP/1.1 with a line and headers of at most 64 KiB each"
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


@dataclass
class _Peer:
    """waiting: its connections that keep the proxy waiting, oldest first, and since when."""

    num_open: int = 0
    waiting: dict["Connection", float] = field(default_factory=dict["Connection", float])


class _Begun(dict["Connection", None]):
    """Connections with the beginning of a request: a step looks at some of them."""

    def __init__(self) -> None:
        super().__init__()
        self._step: asyncio.TimerHandle | None = None
        self._next_step = 0.0

    def look_later(self, one: "Connection") -> None:
        self[one] = None
        self._plan_step()

    def _plan_step(self) -> None:
        if self and self._step is None:
            loop = asyncio.get_running_loop()
            self._step = loop.call_at(self._next_step, self._look)

    def _look(self) -> None:
        self._step = None
        end = time.perf_counter() + _STEP_SECONDS
        while self and time.perf_counter() < end:
            one = next(iter(self))
            del self[one]
            one.take_up()
        self._next_step = asyncio.get_running_loop().time() + _STEP_SECONDS + _PAUSE_SECONDS
        self._plan_step()


class _Ready(dict[str, dict["Connection | Handshake", None]]):
    """Connections with a request, or a handshake, that is to begin, by client."""

    def __init__(self) -> None:
        super().__init__()
        self._num_taken, self._turn_end, self._num_looks = 0, 0.0, 0
        self.hands = WeakValueDictionary[str, _Hands]()

    def note_entered(self) -> None:
        self._num_looks = 2  # the next one may come before that of a connection that waits

    def take_up(self, one: "Connection | Handshake") -> None:
        """Begin it: at once, or in its client's turn where many come at once."""
        if not self._num_taken:
            self._turn_end = time.perf_counter() + _ENTRY_SECONDS
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._num_taken < _STARTS:
            self._num_taken += 1
            one.take_up()
        else:
            one.hold()
            self.setdefault(one.peer, {})[one] = None

    def _next_turn(self) -> None:
        if self._num_looks and time.perf_counter() < self._turn_end:
            self._num_looks -= 1
            asyncio.get_running_loop().call_soon(self._next_turn)
            return
        self._num_taken = 0
        while self and self._num_taken < _STARTS:
            peer = next(iter(self))
            if ones := self.pop(peer):
                one = next(iter(ones))
                del ones[one]
                self[peer] = ones
                self.take_up(one)


class _Hands(dict["Handshake", float]):
    """One client's TLS handshakes in progress, oldest first; when each was begun."""

    def __init__(self, ready: _Ready) -> None:
        super().__init__()
        self._ready, self._held = ready, dict[Handshake, None]()

    def begin(self, one: "Handshake") -> None:
        """Begin it, once few are in progress, in its client's turn."""
        if one not in self:
            self._held[one] = None
            self._go_on()

    def end(self, one: "Handshake") -> None:
        self._held.pop(one, None)
        self.pop(one, None)
        self._go_on()

    def _go_on(self) -> None:
        while self._held:
            now = time.monotonic()
            if len(self) >= _MAX_HANDSHAKES:
                oldest, since = next(iter(self.items()))
                if now - since < MIN_IDLE_SECONDS:
                    break
                del self[oldest]
                oldest.one.cut()
            one = next(iter(self._held))
            del self._held[one]
            self[one] = now
            asyncio.get_running_loop().call_later(1.5 * MIN_IDLE_SECONDS, self._go_on)
            self._ready.take_up(one)


class Connections:
    def __init__(self, max_open: int, max_of_peer: int, client_seconds: float) -> None:
        self._max_open = max_open
        self._max_of_peer = max_of_peer
        self._client_seconds = client_seconds
        self._peers: dict[str, _Peer] = {}
        self._waiting: dict[Connection, float] = {}
        self._refused: dict[Connection, asyncio.TimerHandle] = {}
        self.begun, self.ready = _Begun(), _Ready()
        self.num_open = self._num_head_bytes = 0

    def bound_waits(self, port: asyncio.Server) -> None:
        """Have the kernel end connections whose host is gone, or whose client takes nothing."""
        for bound in port.sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if _USER_TIMEOUT is not None:
                milliseconds = max(int(self._client_seconds * 1000), 1)
                bound.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, milliseconds)

    def make(self, manager: web.Server, tls: ssl.SSLContext | None) -> "Connection | Handshake":
        one = Connection(manager, self, asyncio.get_running_loop())
        return one if tls is None else Handshake(one, tls, self.ready)

    def enter(self, one: "Connection") -> bool:
        """Count *one* in; False if there is no room and none to close in its place."""
        peer = self._peers.get(one.peer, _Peer())
        is_over = peer.num_open >= self._max_of_peer
        if is_over or self.num_open >= self._max_open:
            oldest = self._idle_of(peer.waiting if is_over else self._waiting)
            whose = f"{one.peer} has {peer.num_open}" if is_over else f"there are {self.num_open}"
            end = "the oldest idle one goes" if oldest else "refused"
            complaints.warning("connections", f"{whose} connections, which is the limit: {end}")
            if oldest is None:
                return False
            oldest.cut()
        self._peers.setdefault(one.peer, _Peer()).num_open += 1
        self.num_open += 1
        self.ready.note_entered()
        self.wait(one)
        return True

    def _idle_of(self, waiting: dict["Connection", float]) -> "Connection | None":
        """The one that waits longest, if that is long enough and nothing of it is to be read."""
        now = time.monotonic()
        for one, since in list(islice(waiting.items(), _MAX_LOOKS)):
            if now - since < MIN_IDLE_SECONDS:
                break
            if not one.has_come():
                return one
            self.serve(one)
            self.wait(one)
        return None

    def refuse(self, one: "Connection") -> None:
        """Have *one* end a little later, or when there are too many of them."""
        if len(self._refused) >= max(32, min(self._max_open, getrlimit(RLIMIT_NOFILE)[0] // 16)):
            next(iter(self._refused)).cut()
        loop = asyncio.get_running_loop()
        self._refused[one] = loop.call_later(_REFUSED_SECONDS, one.cut)

    def leave(self, one: "Connection") -> None:
        if (timer := self._refused.pop(one, None)) is not None:
            timer.cancel()
        if not one.is_open:
            return
        one.is_open = False
        self.serve(one)
        self.begun.pop(one, None)
        self.ready.get(one.peer, {}).pop(one, None)
        self.num_open -= 1
        self._num_head_bytes -= one.num_head_bytes
        self._peers[one.peer].num_open -= 1
        if not self._peers[one.peer].num_open:
            del self._peers[one.peer]

    def wait(self, one: "Connection") -> None:
        self._waiting[one] = self._peers[one.peer].waiting[one] = time.monotonic()

    def serve(self, one: "Connection") -> None:
        self._waiting.pop(one, None)
        self._peers[one.peer].waiting.pop(one, None)

    def take_head(self, one: "Connection", num_bytes: int) -> bool:
        one.num_head_bytes += num_bytes
        self._num_head_bytes += num_bytes
        is_scarce = self._num_head_bytes > MAX_HEADS_BYTES
        return one.num_head_bytes <= (_SMALL_HEAD_BYTES if is_scarce else MAX_HEAD_BYTES)

    def give_head_back(self, one: "Connection") -> None:
        self._num_head_bytes -= one.num_head_bytes
        one.num_head_bytes = 0


class Connection(web.RequestHandler):
    """A client's connection. peer: its address, or IPv6 network. is_open: it is counted."""

    def __init__(
        self, manager: web.Server, of_all: Connections, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(manager, loop=loop, **_HTTP)
        self._all = of_all
        self._is_made = self._is_held = False
        self._beginning, self._body = b"", EMPTY_PAYLOAD  # the body of what began last
        self._first: asyncio.TimerHandle | None = None
        self.peer = ""
        self.is_open = False
        self.num_head_bytes = 0

    def enter(self, transport: Any) -> None:
        """Count it, if there is room."""
        self._client: asyncio.Transport = transport
        name = transport.get_extra_info("peername")
        self.peer = network_of(str(name[0])) if isinstance(name, tuple) else str(name)
        self.is_open = self._all.enter(self)
        if not self.is_open:
            self._all.refuse(self)

    def connection_made(self, transport: Any) -> None:
        if not self.peer:
            self.enter(transport)
        else:
            self._client.resume_reading()
        self._client = transport
        if not self.is_open:
            transport.write(_REFUSAL)
            if transport.can_write_eof():
                transport.write_eof()
            self._is_made = True
            self.data_received(b"")
            return
        self._wait_for_first()
        super().connection_made(transport)
        self._is_made = True
        if early := self._beginning:
            self._beginning = b""
            self.data_received(early)

    def _wait_for_first(self) -> None:
        loop = asyncio.get_running_loop()
        self._first = loop.call_later(_FIRST_REQUEST_SECONDS, self.force_close)

    def has_come(self) -> bool:
        """True if anything is there that has not been read, an end of the connection included."""
        number, poller = self._client.get_extra_info("socket").fileno(), select.poll()
        if number < 0:
            return True
        poller.register(number, select.POLLIN)
        return bool(poller.poll(0))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_open and not self._is_made:  # behind the end of a handshake
            self._beginning += data
            self._client.pause_reading()
            return
        if not self.is_open:  # refused
            self._beginning = (self._beginning + data)[:_BEGINNING_BYTES]
            if self._is_made and _is_whole(self._beginning):
                self._client.close()
            return
        if not data:  # aiohttp says so to go on with what it has
            super().data_received(data)
            return
        body = self._messages[-1][1] if self._messages else self._body
        num_before, is_body = len(self._beginning), not body.is_eof()
        self._beginning += data
        if (self._messages or not is_body) and not self._count_head(num_before):
            if not (self._messages or self._is_held):
                message = f"{self.peer} is cut off after {self.num_head_bytes} bytes of a head"
                complaints.warning("head", message)
                self.cut()
                return
            self.hold()
        if self._is_held:
            self._client.pause_reading()
            return
        is_large = is_body or len(self._beginning) > _BEGINNING_BYTES
        if not (is_large or _is_whole(self._beginning)):
            self._all.begun.look_later(self)
            return
        self._all.serve(self)
        if is_body:
            self.take_up()
        else:
            self._all.ready.take_up(self)

    def _count_head(self, num_before: int) -> bool:
        _, end, rest = self._beginning.rpartition(b"\r\n\r\n")
        num_bytes = len(self._beginning) - (len(rest) if end else 0) - num_before
        return self._all.take_head(self, max(num_bytes, 0))

    def hold(self) -> None:
        """Take in little more until it is taken up, and count no time against it."""
        self._is_held = True
        if self._first is not None:
            self._first.cancel()

    def take_up(self) -> None:
        """Parse what has come of a request."""
        data, self._beginning = self._beginning, b""
        if self._is_held:
            self._is_held = False
            self._client.resume_reading()
            if self._first is not None:
                self._wait_for_first()
        if data:
            super().data_received(data)

    def _handle_request(self, request: web.BaseRequest, *args: Any, **kwargs: Any) -> Any:
        """Begin it, in the step that takes it out of `_messages`."""
        if self._first is not None:
            self._first.cancel()
            self._first = None
        self._all.give_head_back(self)
        self._body = request.content
        if self.is_open:
            self.take_up()
            self._all.wait(self)
        return super()._handle_request(request, *args, **kwargs)

    @contextmanager
    def serving(self) -> Iterator[None]:
        if self.is_open:
            self._all.serve(self)
        try:
            yield
        finally:
            if self.is_open:
                self._all.wait(self)

    def cut(self) -> None:
        self._leave()
        self._client.abort()

    def _leave(self) -> None:
        if self._first is not None:
            self._first.cancel()
        self._all.leave(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        cause = " ".join((message or repr(exc)).split())[:200]
        complaints.warning("http", f"{self.peer} is refused with {status}: {cause}")
        told = _NO_HTTP if status < 500 else "unexpected error; see the log"
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun already")
        kind = "bad_request" if status < 500 else "internal"
        response = web.json_response(ProxyError(status, kind, told).as_json(), status=status)
        response.headers["Server"] = "vllm-commext"  # else aiohttp names itself
        response.force_close()
        return response

    def log_exception(self, *args: Any, **_: Any) -> None:
        complaints.exception("http", str(args[0]) % args[1:])


class Handshake(asyncio.Protocol):
    """A connection before the end of its TLS handshake; it counts like any other. TLS, which takes
    a hundred kilobytes and 2 ms, begins when a client's first message is there, in its turn."""

    def __init__(self, one: Connection, tls: ssl.SSLContext, ready: _Ready) -> None:
        self.one, self._tls, self._ready, self._early = one, tls, ready, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(_TLS_SECONDS, self.one.cut)
        self.one.enter(transport)
        self.peer = self.one.peer
        self._hands = self._ready.hands.setdefault(self.peer, _Hands(self._ready))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._hands.end(self)
        self.one.cut()

    def data_received(self, data: bytes) -> None:
        self._early += data
        num_bytes = 5 + int.from_bytes(self._early[3:5])
        if len(self._early) > _BEGINNING_BYTES:  # no client says so much before the first answer
            self.one.cut()
        elif self._early[:1] != _HANDSHAKE or len(self._early) >= max(num_bytes, 6):
            self._hands.begin(self)

    def hold(self) -> None:
        """Read on: `data_received` bounds what comes meanwhile."""

    def take_up(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._timer.cancel()
            self._task = asyncio.create_task(self._shake_hands(self._transport))

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        ends = transport, self.one, self._tls
        tls = loop.start_tls(*ends, server_side=True, ssl_handshake_timeout=_TLS_SECONDS)
        began = asyncio.create_task(tls)
        await asyncio.sleep(0)
        loop.call_soon(self._pass_on)  # behind what TLS begins with, and before it reads
        try:
            secured = await began
        except OSError:  # or it has been cut
            secured = None
        finally:
            self._hands.end(self)
        if secured is None or secured.is_closing():
            self.one.cut()
        else:
            self.one.connection_made(secured)

    def _pass_on(self) -> None:
        tls: Any = self._transport.get_protocol()
        while self._early and tls is not self:
            room = tls.get_buffer(len(self._early))[: len(self._early)]
            room[:] = self._early[: len(room)]
            tls.buffer_updated(len(room))
            self._early = self._early[len(room) :]


def serving(request: web.Request) -> AbstractContextManager[None]:
    one = request.protocol
    return one.serving() if isinstance(one, Connection) else nullcontext()


def cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _is_whole(data: bytes) -> bool:
    """Guess, without parsing, whether a whole request is in *data*."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    found = _BODY.search(data, 0, end + 2)
    if found is None:
        return True
    if found[1] is None:
        return data.endswith(b"0\r\n\r\n")
    return len(data) - end - 4 >= int(found[1])
