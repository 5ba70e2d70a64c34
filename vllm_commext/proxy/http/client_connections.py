"""Bounds clients' connections, and what each may cost before it asks for anything.

Of a new one nothing is read before its first request, or the first message of TLS, is there.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from aiohttp import web

from vllm_commext.networks import network_of
from vllm_commext.proxy.errors_phases import ProxyError, complaints

# Bodies stay as they come, and a head may be as large as a vLLM server takes it.
_HTTP: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75.0,
    "tcp_keepalive": False,  # the port's, see `Door`
    "lingering_time": 5.0,
    "max_line_size": 64 << 10,
    "max_field_size": 64 << 10,
    "max_headers": 256,
}
MAX_HEAD_BYTES = 512 << 10
"""Of a connection: a head, and the one read of its body that may come before it is handled."""
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
_ACCEPTED, _LOOKED_AT = 32, 64
"""New connections, and those with news, at one look."""
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
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_NEWS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_MAX_HANDSHAKES = 32
"""Of one client in progress. While others of it wait, each has `MIN_IDLE_SECONDS`."""
_NO_HTTP = "expected a request in HTTP/1.1 with a line and headers of at most 64 KiB each"
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
_One: TypeAlias = "Connection | Arrival"


@dataclass
class _Peer:
    """waiting: its connections that keep the proxy waiting, oldest first, and since when."""

    num_open: int = 0
    waiting: dict[_One, float] = field(default_factory=dict[_One, float])


class _Begun(dict["_One", Callable[[], None]]):
    """What is to be done for connections with the beginning of a request, or that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self._step: asyncio.Handle | None = None
        self._end = self._next_step = 0.0

    def add(self, one: "_One", act: Callable[[], None]) -> None:
        self[one] = act
        self._plan_step()

    def _plan_step(self) -> None:
        if self and self._step is None:
            self._step = asyncio.get_running_loop().call_at(self._next_step, self._begin_step)

    def _begin_step(self) -> None:
        self._next_step = asyncio.get_running_loop().time() + _STEP_SECONDS + _PAUSE_SECONDS
        self._end = time.perf_counter() + _STEP_SECONDS
        self._look()

    def _look(self) -> None:
        self._step = None
        for one in list(islice(self, _STARTS)):
            self.pop(one)()
        if self and time.perf_counter() < self._end:  # what has begun by then counts, too
            self._step = asyncio.get_running_loop().call_soon(self._look)
        self._plan_step()


class _Ready(dict[str, dict[_One, None]]):
    """Connections with a request, or a handshake, that is to begin, by client."""

    def __init__(self) -> None:
        super().__init__()
        self._num_taken = 0
        self.hands = WeakValueDictionary[str, _Hands]()

    def take_up(self, one: _One) -> None:
        """Begin it: at once, or in its client's turn where many come at once."""
        if not self._num_taken:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._num_taken < _STARTS:
            self._num_taken += 1
            one.take_up()
        else:
            one.hold()
            self.setdefault(one.peer, {})[one] = None

    def _next_turn(self) -> None:
        self._num_taken = 0
        while self and self._num_taken < _STARTS:
            peer = next(iter(self))
            if ones := self.pop(peer):
                one = next(iter(ones))
                del ones[one]
                self[peer] = ones
                self.take_up(one)


class _Hands(dict["Arrival", float]):
    """One client's TLS handshakes in progress, oldest first; when each was begun."""

    def __init__(self, ready: _Ready) -> None:
        super().__init__()
        self._ready, self._held = ready, dict[Arrival, None]()

    def begin(self, one: "Arrival") -> None:
        """Begin it, once few are in progress, in its client's turn."""
        if one not in self:
            self._held[one] = None
            self._go_on()

    def give_up(self, one: "Arrival") -> None:
        """Have it take its place for the second all the same: its work is done."""
        self._held.pop(one, None)

    def end(self, one: "Arrival") -> None:
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
                oldest.cut()
            one = next(iter(self._held))
            del self._held[one]
            self[one] = now
            asyncio.get_running_loop().call_later(1.5 * MIN_IDLE_SECONDS, self._go_on)
            self._ready.take_up(one)


class Connections:
    def __init__(self, max_open: int, max_of_peer: int, client_seconds: float) -> None:
        self._max_open = max_open
        self._max_of_peer = max_of_peer
        self.client_seconds = client_seconds
        self._peers: dict[str, _Peer] = {}
        self._waiting: dict[_One, float] = {}
        self._refused: dict[_One, asyncio.TimerHandle] = {}
        self.begun, self.ready = _Begun(), _Ready()
        self.num_open = self._num_head_bytes = 0

    def enter(self, one: _One) -> bool:
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
        self.wait(one)
        return True

    def _idle_of(self, waiting: dict[_One, float]) -> "_One | None":
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

    def refuse(self, one: _One) -> None:
        """Have *one* end a little later, or when there are too many of them."""
        if len(self._refused) >= max(32, min(self._max_open, getrlimit(RLIMIT_NOFILE)[0] // 16)):
            next(iter(self._refused)).cut()
        loop = asyncio.get_running_loop()
        self._refused[one] = loop.call_later(_REFUSED_SECONDS, one.cut)

    def leave(self, one: _One) -> None:
        if (timer := self._refused.pop(one, None)) is not None:
            timer.cancel()
        self.begun.pop(one, None)
        self.ready.get(one.peer, {}).pop(one, None)
        if not one.is_open:
            return
        one.is_open = False
        self.serve(one)
        self.num_open -= 1
        self._num_head_bytes -= one.num_head_bytes
        self._peers[one.peer].num_open -= 1
        if not self._peers[one.peer].num_open:
            del self._peers[one.peer]

    def let_in(self, arrival: "Arrival", one: "Connection") -> None:
        """Count *one* in place of *arrival*."""
        if arrival in self._refused:
            self.refuse(one)
        one.is_open = arrival.is_open
        if one.is_open:
            self._peers[one.peer].num_open += 1
            self.num_open += 1
            self.wait(one)
        self.leave(arrival)

    def wait(self, one: _One) -> None:
        self._waiting[one] = self._peers[one.peer].waiting[one] = time.monotonic()

    def serve(self, one: _One) -> None:
        self._waiting.pop(one, None)
        self._peers[one.peer].waiting.pop(one, None)

    def take_head(self, one: _One, num_bytes: int) -> bool:
        one.num_head_bytes += num_bytes
        self._num_head_bytes += num_bytes
        is_scarce = self._num_head_bytes > MAX_HEADS_BYTES
        return one.num_head_bytes <= (_SMALL_HEAD_BYTES if is_scarce else MAX_HEAD_BYTES)

    def give_head_back(self, one: _One) -> None:
        self._num_head_bytes -= one.num_head_bytes
        one.num_head_bytes = 0


class Connection(web.RequestHandler):
    """A client's connection. peer: its address, or IPv6 network. is_open: it is counted."""

    def __init__(self, manager: web.Server, of_all: Connections, arrival: "Arrival") -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **_HTTP)
        self._all = of_all
        self._arrival: Arrival | None = arrival  # its turn is its first data's, too
        self._reads_body = self._is_held = False
        self._beginning = b""
        self._first: asyncio.TimerHandle | None = None
        self.peer, self.is_open = arrival.peer, False
        self.num_head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        self._client: asyncio.Transport = transport
        assert self._arrival is not None
        self._all.let_in(self._arrival, self)
        if self._arrival.hands is not None:
            self._arrival = None
        if self.is_open:
            self._wait_for_first()
            super().connection_made(transport)
            return
        transport.write(_REFUSAL)
        if transport.can_write_eof():
            transport.write_eof()

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
        self._all.begun.add(self, partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        if not self.is_open:  # refused
            self._beginning = (self._beginning + data)[:_BEGINNING_BYTES]
            if _is_whole(self._beginning):
                self._client.close()
            return
        if not data:  # aiohttp says so to go on with what it has
            super().data_received(data)
            return
        num_before = len(self._beginning)
        self._beginning += data
        if not self._reads_body and not self._count_head(num_before):
            message = f"{self.peer} is cut off after {self.num_head_bytes} bytes of a head"
            complaints.warning("head", message)
            self.cut()
            return
        if self._is_held:
            self._client.pause_reading()
            return
        is_large = self._reads_body or len(self._beginning) > _BEGINNING_BYTES
        is_whole = is_large or _is_whole(self._beginning)
        if is_whole:
            self._all.serve(self)
        if self._reads_body or self._arrival is not None:
            self._arrival = None
            self.take_up()
        elif is_whole:
            self._all.ready.take_up(self)
        else:
            self._all.begun.add(self, self.take_up)

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

    def begin(self, request: web.BaseRequest) -> None:
        if self._first is not None:
            self._first.cancel()
            self._first = None
        self._all.give_head_back(self)
        self._reads_body = request.body_exists
        if self.is_open:
            self._all.wait(self)

    @contextmanager
    def serving(self) -> Iterator[None]:
        self._reads_body = False
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


class Arrival:
    """A client's connection of which nothing is read yet: until its first message is there, and its
    turn comes, it costs a descriptor, and not the hundred kilobytes and 2 ms of TLS. hands: of its
    client, if it speaks TLS."""

    num_head_bytes, is_open, _num_seen = 0, False, 0
    _task: asyncio.Task[None] | None = None

    def __init__(self, client: socket.socket, peer: str, door: "Door") -> None:
        self.client, self.peer, self._door, self._all = client, peer, door, door.of_all
        self._timer = asyncio.get_running_loop().call_later(_FIRST_REQUEST_SECONDS, self.cut)
        ready = self._all.ready
        self.hands = ready.hands.setdefault(peer, _Hands(ready)) if door.tls else None

    def has_come(self) -> bool:
        early = self._peek()
        return early is not None and (not early or len(early) != self._num_seen)

    def _peek(self) -> bytes | None:
        """The beginning of what has come; empty if the connection has ended."""
        try:
            return self.client.recv(_BEGINNING_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def look(self, events: int) -> None:
        early = self._peek()
        if early is None:
            return
        self._num_seen = len(early)
        is_full = len(early) == _BEGINNING_BYTES
        if not early or (self.hands is not None and events & _ENDED):
            self.cut()
        elif self.hands is not None:
            num_bytes = max(5 + int.from_bytes(early[3:5]), 6)
            if early[:1] != _HANDSHAKE or len(early) >= num_bytes or is_full:
                self.hands.begin(self)
        elif is_full or _is_whole(early):
            self.begin()
        else:
            self._all.begun.add(self, self.take_up)

    def begin(self) -> None:
        """Let it in, in its turn."""
        self._forget()
        if self.is_open:
            self._all.serve(self)
        self._all.ready.take_up(self)

    def _forget(self) -> None:
        self._timer.cancel()
        self._door.forget(self.client)

    def hold(self) -> None:
        """What comes meanwhile stays in the kernel."""

    def take_up(self) -> None:
        self._forget()
        self._task = asyncio.create_task(self._let_in())

    async def _let_in(self) -> None:
        door, tls = self._door, self._door.tls
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(door.manager, self._all, self),
                self.client,
                ssl=tls,
                ssl_handshake_timeout=_TLS_SECONDS if tls else None,
            )
        except OSError:  # or it has been cut
            self.cut()
        else:
            if self.hands is not None:
                self.hands.end(self)

    def cut(self) -> None:
        self._all.leave(self)
        if self.hands is not None:
            self.hands.give_up(self)
        self._forget()
        if self._task is None:
            self.client.close()
        else:
            with suppress(OSError):
                self.client.shutdown(socket.SHUT_RDWR)


class Door:
    """Takes in clients' connections: many at a look, so that none waits in the kernel for long."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        of_all: Connections,
        manager: web.Server,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sockets, self.of_all, self.manager, self.tls = sockets, of_all, manager, tls
        self._loop, self._poll = asyncio.get_running_loop(), select.epoll()
        self._ports = {one.fileno(): one for one in sockets}
        self._arrivals: dict[int, Arrival] = {}
        for one in sockets:
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if _USER_TIMEOUT is not None:  # the kernel ends those whose client takes nothing
                milliseconds = max(int(of_all.client_seconds * 1000), 1)
                one.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, milliseconds)
            self._poll.register(one, select.EPOLLIN)
        self._loop.add_reader(self._poll.fileno(), self._look)

    def close(self) -> None:
        self._loop.remove_reader(self._poll.fileno())
        self._poll.close()
        for one in (*self.sockets, *self._arrivals.values()):
            one.close() if isinstance(one, socket.socket) else one.cut()

    def forget(self, client: socket.socket) -> None:
        if self._arrivals.pop(client.fileno(), None) and not self._poll.closed:
            self._poll.unregister(client)

    def _look(self) -> None:
        for number, events in self._poll.poll(0, _LOOKED_AT):
            if (port := self._ports.get(number)) is not None:
                self._accept(port)
            elif (one := self._arrivals.get(number)) is not None:
                one.look(events)

    def _accept(self, port: socket.socket) -> None:
        for _ in range(_ACCEPTED):
            try:
                client, name = port.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is free
                complaints.warning("accept", f"no connection is accepted for a second: {error}")
                self._poll.modify(port, 0)
                self._loop.call_later(1.0, self._poll.modify, port, select.EPOLLIN)
                return
            client.setblocking(False)
            self._arrivals[client.fileno()] = one = Arrival(client, network_of(name[0]), self)
            self._poll.register(client, _NEWS)
            one.is_open = self.of_all.enter(one)
            if not one.is_open:
                self.of_all.refuse(one)
                if self.tls is None:
                    one.begin()


def serving(request: web.Request) -> AbstractContextManager[None]:
    one = request.protocol
    return one.serving() if isinstance(one, Connection) else nullcontext()


def begin(request: web.BaseRequest) -> None:
    if isinstance(request.protocol, Connection):
        request.protocol.begin(request)


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
