"""The answering end of a side channel's connections, which bounds what the other ends can cost.

A connection holds at most one unfinished message and its unread answer.  Connections, bytes and the
time to finish are bounded: over a bound, connections close that have asked nothing good first, of
the address that has the most.
"""

import contextlib
import fcntl
import math
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection

from vllm_commext.errors import ProtocolError
from vllm_commext.networks import network_of
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.wakeup import Wakeup
from vllm_commext.nixl.wire import zmtp
from vllm_commext.nixl.wire.connection import bound_waits

MAX_CONNECTIONS = 4096  # in all; less where half of the process's file descriptors are fewer
MAX_BYTES = 6 * 1024 * 1024
"""That all connections hold of messages that are not whole and of answers that are not read."""
FINISH_SECONDS = 5.0
"""For the first good message, for the rest of a message, and for reading an answer."""
_SWEEP_SECONDS = 0.25
_TURN_SECONDS = 0.005  # of answers at a stretch
_PAUSE_SECONDS = 0.002  # after that many, for the other threads of the process
_MAX_ACCEPTED = 256  # in one turn
_BUFFER_BYTES = 128 * 1024  # of the kernel, for each connection and direction
_BACKLOG = 4096
_CHUNK_BYTES = 16 * 1024


class Connection:
    """One asker's connection.

    Attributes:
        nonce: that of the question whose asker is told of a drain, None where it is not told.
        since: when it came; once it is admitted, when it began a message or last read its answer.
    """

    __slots__ = (
        *("address", "counted", "decoder", "is_admitted", "is_greeted", "is_writing", "nonce"),
        *("num_own", "num_taken", "out", "since", "socket"),
    )

    def __init__(self, made: socket.socket, address: str, max_bytes: int) -> None:
        self.socket = made
        self.address = address
        self.decoder = zmtp.Decoder(zmtp.ROUTER, max_bytes)
        self.is_admitted = False
        self.is_greeted = False
        self.nonce: bytes | None = None
        self.since = time.monotonic()
        self.num_taken = 0
        # What is still to be sent, how many bytes of it are nobody else's, whether the selector
        # waits until more can be sent, and how many bytes are counted for this connection.
        self.out: list[memoryview] = []
        self.num_own = 0
        self.is_writing = False
        self.counted = 0

    def begin_again(self) -> None:
        """Restart its time; before its first valid message that runs on."""
        if self.is_admitted:
            self.since = time.monotonic()

    @property
    def is_unfinished(self) -> bool:
        return not self.is_admitted or bool(self.out) or self.decoder.num_held > 0


class Listener:
    """A bound port and its connections.  Owned by one thread but for `wake`."""

    def __init__(
        self,
        bound: socket.socket,
        max_bytes: int,
        answer: Callable[[Connection, bytes], None],
        forget: Callable[[Connection], None],
    ) -> None:
        self._bound = bound
        self._max_bytes = max_bytes
        self._answer = answer
        self._forget = forget
        self._max_connections = _max_connections()
        # Widen the table of descriptors now: with threads, each doubling stops one for over 10 ms.
        with contextlib.suppress(OSError):  # that one is taken
            socket.close(fcntl.fcntl(bound, fcntl.F_DUPFD_CLOEXEC, 2 * self._max_connections - 1))
        self._connections: dict[socket.socket, Connection] = {}
        # Those that may hold another message which has come already.
        self._unread: dict[Connection, None] = {}
        self._num_held = 0
        self.num_refused = 0
        self._next_sweep = math.inf
        self._log = RateLimitedLog()
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        bound.setblocking(False)
        bound_waits(bound)  # and with it each connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            bound.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        bound.listen(_BACKLOG)
        self._selector.register(bound, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._connections)

    def wake(self) -> None:
        self._wakeup.notify()

    def close(self) -> None:
        for connection in [*self._connections.values()]:
            self._drop(connection)
        self._selector.close()
        self._bound.close()
        self._wakeup.close()

    def turn(self, seconds: float) -> None:
        """Wait for at most so long, and answer one message of each that has sent some; those that
        have sent the fewest first."""
        wait = 0.0 if self._unread else max(min(seconds, self._next_sweep - time.monotonic()), 0.0)
        events = self._selector.select(None if wait == math.inf else wait)
        begun = time.monotonic()
        ready = dict.fromkeys(self._unread)
        for key, _ in events:
            if key.data is not None:
                ready[key.data] = None
            elif key.fileobj is self._wakeup:
                self._wakeup.clear()
        has_served_all = True
        for connection in sorted(ready, key=lambda one: (one.num_taken, one.since)):
            self._serve(connection)
            if time.monotonic() - begun >= _TURN_SECONDS:
                time.sleep(_PAUSE_SECONDS)
                has_served_all = False
                break
        if any(key.fileobj is self._bound for key, _ in events):
            self._accept(may_make_room=has_served_all)
        if begun >= self._next_sweep:
            self._sweep(begun)
        elif events:
            self._next_sweep = min(self._next_sweep, begun + _SWEEP_SECONDS)

    def send(self, connection: Connection, message: bytes, *, is_shared: bool = False) -> None:
        """Send a message; a *shared* one does not count as held here."""
        if connection.socket not in self._connections:
            return
        enveloped = connection.decoder.is_enveloped
        connection.out.append(memoryview(zmtp.header(len(message), is_enveloped=enveloped)))
        connection.out.append(memoryview(message))
        connection.num_own += 0 if is_shared else len(message)
        self._flush(connection)
        self._count(connection)

    def _serve(self, connection: Connection) -> None:
        self._unread.pop(connection, None)
        message = None
        try:
            if connection.out:
                self._flush(connection)
            if not connection.out and connection.socket in self._connections:
                message = self._take(connection)
        except ProtocolError as error:
            self.num_refused += 1
            self._log.warning("closed", f"side channel: closed a connection: {error}")
            self._drop(connection)
        self._count(connection)
        if message is None or connection.socket not in self._connections:
            return
        connection.num_taken += 1
        if connection.decoder.num_held:
            self._unread[connection] = None
        self._answer(connection, message)
        connection.begin_again()

    def _take(self, connection: Connection) -> bytes | None:
        """The next message of a connection, None where there is none; raises ProtocolError."""
        message = connection.decoder.take()
        if message is not None:
            return message
        had_begun = connection.is_unfinished
        try:
            data = connection.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return None
        if not had_begun:
            connection.begin_again()
        if not connection.is_greeted:
            connection.is_greeted = True
            with contextlib.suppress(OSError):  # it may have gone
                connection.socket.send(zmtp.opening(zmtp.ROUTER))
        connection.decoder.feed(data)
        return connection.decoder.take()

    def _flush(self, connection: Connection) -> None:
        out = connection.out
        try:
            while out:
                num_sent = connection.socket.send(out[0])
                connection.begin_again()
                out[0] = out[0][num_sent:]
                if not out[0]:
                    del out[0]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if not out:
            connection.num_own = 0
        if connection.is_writing != bool(out):
            connection.is_writing = bool(out)
            event = selectors.EVENT_WRITE if out else selectors.EVENT_READ
            self._selector.modify(connection.socket, event, connection)
            if not out and connection.decoder.num_held:
                self._unread[connection] = None

    def _accept(self, *, may_make_room: bool) -> None:
        """Take in who has come. Nobody goes in their place before all that have sent something had
        their turn."""
        for _ in range(_MAX_ACCEPTED):
            if len(self._connections) >= self._max_connections:
                if not may_make_room:
                    return
                self._make_room()
            try:
                made, address = self._bound.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._log.warning("accept", f"side channel: accepting failed: {error}")
                self._make_room()
                time.sleep(_PAUSE_SECONDS)
                return
            self._add(made, address[0])

    def _add(self, made: socket.socket, host: str) -> None:
        made.setblocking(False)
        connection = Connection(made, network_of(host), self._max_bytes)
        self._connections[made] = connection
        self._selector.register(made, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.socket, None) is None:
            return
        self._num_held -= connection.counted
        self._unread.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.out.clear()
        self._forget(connection)

    def _count(self, connection: Connection) -> None:
        if connection.socket not in self._connections:
            return
        held = connection.decoder.num_held + connection.num_own
        self._num_held += held - connection.counted
        connection.counted = held
        while self._num_held > MAX_BYTES:
            self.num_refused += 1
            ours = _of_one_address(self._connections.values(), lambda one: one.counted)
            message = f"side channel: {ours[0].address} holds too much; closed a connection"
            self._log.warning("bytes", message)
            self._drop(max(ours, key=lambda one: one.counted))

    def _make_room(self) -> None:
        """Close some connections of the address that has the most: those that came first, of those
        that have asked nothing good if there are any."""
        everyone = self._connections.values()
        ones = [one for one in everyone if not one.is_admitted] or everyone
        ones = _of_one_address(ones, lambda _: 1)
        ones.sort(key=lambda one: one.since)
        del ones[1 + len(ones) // 16 :]
        self._log.warning(
            "full",
            f"side channel: {len(self._connections)} connections at once; closed {len(ones)}",
        )
        for one in ones:
            self._drop(one)

    def _sweep(self, now: float) -> None:
        self._next_sweep = math.inf
        for connection in [*self._connections.values()]:
            connection.num_taken //= 2
            if connection.is_unfinished and now - connection.since >= FINISH_SECONDS:
                self._drop(connection)
            elif connection.is_unfinished or connection.num_taken:
                self._next_sweep = now + _SWEEP_SECONDS


def _of_one_address(
    ones: Collection[Connection], size: Callable[[Connection], int]
) -> list[Connection]:
    sizes = Counter[str]()
    for one in ones:
        sizes[one.address] += size(one)
    most = max(sizes, key=sizes.__getitem__, default="")
    return [one for one in ones if one.address == most]


def _max_connections() -> int:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft_limit // 2, 16))
