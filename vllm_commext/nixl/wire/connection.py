"""The asking end of a side channel: one TCP connection that never blocks, and keeps one answer."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import threading
import time
from typing import Any

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire import zmtp

SideChannelAddress = tuple[str, int]  # host and port
CONNECT_SECONDS = 2.0
"""A connection that is not made by then, its address looked up included, counts as refused."""
UNACKNOWLEDGED_MS = 5000  # a connection on which sent bytes are not acknowledged by then is closed
KEEPALIVE_SECONDS = (5, 2, 3)
"""TCP keepalive: seconds before the first probe, seconds between two, and how many."""
MAX_UNFINISHED_BYTES = 16 * 1024 * 1024
"""Of answers that are not whole, over all connections of this process."""
MAX_LOOKUPS = 16  # names that this process looks up at a time
_CHUNK_BYTES = 64 * 1024
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")


def endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound_waits(connection: socket.socket) -> None:
    """Let a vanished host close a connection, and small messages go at once."""
    idle, interval, count = KEEPALIVE_SECONDS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
        (socket.TCP_KEEPIDLE, idle),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, count),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def addresses(host: str, port: int) -> list[tuple[int, Any]]:
    """Family and address of a host, IPv4 first; raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(
        ((entry[0], entry[4]) for entry in found), key=lambda one: one[0] != socket.AF_INET
    )


class _Budget:
    """Bytes that all connections of this process hold; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may close a connection at any point
        self._num_bytes = 0

    def change(self, num_bytes: int) -> bool:
        with self._lock:
            self._num_bytes += num_bytes
            return num_bytes <= 0 or self._num_bytes <= MAX_UNFINISHED_BYTES


_UNFINISHED = _Budget()
_LOOKUPS = threading.BoundedSemaphore(MAX_LOOKUPS)


class _Lookup:
    """The address of a host, found by a thread of its own where it is a name."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._found: tuple[int, Any] | OSError | None = None
        if not _LOOKUPS.acquire(blocking=False):
            raise OSError(f"{MAX_LOOKUPS} names are being looked up: retry later")
        threading.Thread(target=self._run, name="commext-lookup", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = addresses(*self._place)[0]
        except (OSError, UnicodeError) as error:
            self._found = OSError(f"{self._place[0]!r} has no address ({error})")
        finally:
            _LOOKUPS.release()

    def take(self) -> tuple[int, Any] | None:
        """None where it is still being looked up; raises OSError."""
        if isinstance(self._found, OSError):
            raise self._found
        return self._found


class SideChannelSocket:
    """One connection to a side channel.  Owned by one thread, which calls `receive` often.

    Raises:
        ProtocolError: the host cannot be the name of one.
        OSError: no socket is left.
    """

    def __init__(self, host: str, port: int, max_bytes: int) -> None:
        self._socket: socket.socket | None = None
        self._lookup: _Lookup | None = None
        self._decoder = zmtp.Decoder(zmtp.DEALER, max_bytes)
        self._out = bytearray(zmtp.opening(zmtp.DEALER))
        self._waiting = bytearray()
        self._num_counted = 0
        self._until = time.monotonic() + CONNECT_SECONDS
        self.error = ""
        """Why the connection was not made or has ended, "" as long as it has not."""
        self.is_refused = False
        """Whether nothing listens there: a process has ended, which no closed connection proves."""
        if not (_HOST.fullmatch(host) and 0 < port < 65536):
            raise ProtocolError(f"not an address to ask: host {host!r}, port {port}")
        if _is_numeric(host):
            self._connect(*addresses(host, port)[0])
        else:
            self._lookup = _Lookup(host, port)

    def fileno(self) -> int:
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def send(self, message: bytes) -> None:
        self._waiting += zmtp.header(len(message)) + message
        try:
            self._flush()
        except OSError as error:
            self._end(str(error), error.errno)

    def receive(self) -> bytes | None:
        """The next message, None where there is none yet; raises ProtocolError."""
        try:
            message = self._decoder.take()
            while message is None and self._move():
                message = self._decoder.take()
        except ProtocolError as error:
            self._end(str(error))
            raise
        self._count()
        return message

    def close(self) -> None:
        self._end("closed")
        self._decoder = zmtp.Decoder(zmtp.DEALER, 0)
        self._count()

    __del__ = close

    def _connect(self, family: int, address: Any) -> None:
        self._socket = made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        bound_waits(made)
        status = made.connect_ex(address)
        if status not in (0, errno.EINPROGRESS):
            self._end(os.strerror(status), status)

    def _move(self) -> bool:
        if self.error:
            return False
        try:
            if self._lookup is not None and (found := self._lookup.take()) is not None:
                self._lookup = None
                self._connect(*found)
            data = self._exchange()
        except OSError as error:
            self._end(str(error), error.errno)
            return False
        self._decoder.feed(data)
        self._count()
        return bool(data)

    def _exchange(self) -> bytes:
        self._flush()
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                data = self._socket.recv(_CHUNK_BYTES)
                if not data:
                    raise ConnectionError("the other end has closed it")
                return data
        if not self._decoder.is_ready and time.monotonic() >= self._until:
            raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} s")
        return b""

    def _flush(self) -> None:
        if self._decoder.is_ready and self._waiting:
            self._out += self._waiting
            self._waiting.clear()
        with contextlib.suppress(BlockingIOError):
            while self._out and self._socket is not None:
                del self._out[: self._socket.send(self._out)]

    def _count(self) -> None:
        change = self._decoder.num_held - self._num_counted
        self._num_counted += change
        if not _UNFINISHED.change(change):
            self.close()
            self.error = f"more than {MAX_UNFINISHED_BYTES} bytes of unfinished answers"

    def _end(self, error: str, number: int | None = None) -> None:
        if not self.error:
            self.error, self.is_refused = error, number == errno.ECONNREFUSED
        made, self._socket, self._lookup = self._socket, None, None
        if made is not None:
            made.close()


def _is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True
