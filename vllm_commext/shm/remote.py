"""The queue's readers on other hosts: over TCP, with back pressure and numbered messages.

A message is sent to every reader; the writer waits while one has not taken what is under way. A
reader whose connection breaks gets an error and never a later message in place of a lost one. Who
is let in: see `admission.py`.
"""

import hmac
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..errors import CommextTimeoutError, ProtocolError
from ._shm_ring import MAX_PARTS
from .admission import (
    ADMISSION_SECONDS,
    MAGIC,
    MOST_STRANGERS,
    NONCE_BYTES,
    PROOF_BYTES,
    TOKEN_BYTES,
    VERSION,
    WELCOME,
    Post,
    proof,
    set_up,
    some,
)
from .codec import Record
from .ring import PeerLostError, QueueCancelledError, warning_interval

logger = logging.getLogger("vllm.commext.shm")

MIXED = (
    "this message queue was made by vllm_commext, and the process that attaches to it uses vLLM's "
    "own: set VLLM_COMMEXT, VLLM_COMMEXT_SHM_QUEUE and VLLM_PLUGINS alike in all processes of this "
    "server, and install the same vllm-commext in all their environments"
)
REMOTE_SCHEME = "commext-tcp://"  # vLLM's own queue cannot connect to that, and says so
HEADER = struct.Struct("<QQ")  # of a message: its number and how many parts; 0 and 0 is "ready"
LENGTH = struct.Struct("<Q")  # of a part; the first bit: it was, and becomes, `bytes`
IMMUTABLE = 1 << 63
RETRY_SECONDS = 0.2  # between two attempts to connect

Message = tuple[int, list[bytes | bytearray]]


class RemoteEnd:
    """A way to wait, and to be cancelled."""

    def __init__(self) -> None:
        self.number = 0  # of the last message
        self._cancelled = False
        self._cancel_fd = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._cancel_fd).atexit = False

    def cancel(self) -> None:
        """End the wait in progress and every later one. From any thread or signal handler."""
        self._cancelled = True
        os.eventfd_write(self._cancel_fd, 1)

    def _wait(self, fd: int, deadline: float | None, what: str, quiet: bool = False) -> None:
        """Wait until `fd` can be read. Raises at the deadline and on `cancel`; unless `quiet`, a
        long wait writes a line into the log now and then."""
        poller, started, interval = select.poll(), time.monotonic(), warning_interval()
        poller.register(fd, select.POLLIN)
        poller.register(self._cancel_fd, select.POLLIN)
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            step = interval if left is None else min(interval, left)
            ready = [one for one, _ in poller.poll(step * 1000)]
            if self._cancel_fd in ready:
                raise QueueCancelledError("cancelled")
            if ready:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise CommextTimeoutError(f"{what} within the timeout, after message {self.number}")
            if not quiet:
                waited = time.monotonic() - started
                logger.info("%s for %.0f s, after message %d", what, waited, self.number)


class RemoteWriter(RemoteEnd):
    """Sends every message to `n_readers` readers on other hosts, of which `budget` bytes may be
    under way to each; a longer one goes alone."""

    def __init__(self, n_readers: int, connect_ip: str, budget: int) -> None:
        super().__init__()
        self.is_ipv6 = _is_ipv6(connect_ip)
        family = socket.AF_INET6 if self.is_ipv6 else socket.AF_INET
        listener = socket.create_server((connect_ip, 0), family=family, backlog=MOST_STRANGERS)
        listener.setblocking(False)
        token = secrets.token_bytes(TOKEN_BYTES)
        host = f"[{connect_ip}]" if self.is_ipv6 else connect_ip
        self.address = f"{REMOTE_SCHEME}{host}:{listener.getsockname()[1]}"
        self.invitation = f"{self.address}/{token.hex()}"
        self._budget, self._post = budget, Post(listener, token, n_readers)
        threading.Thread(target=self._post.run, name="commext-queue", daemon=True).start()
        weakref.finalize(self, self._post.close).atexit = False

    def wait_attached(self, timeout: float | None) -> None:
        post, deadline = self._post, None if timeout is None else time.monotonic() + timeout
        if post.listener is not None:
            what = f"{len(post.readers)} of {post.n_readers} remote readers attached"
            self._wait_until(lambda: post.listener is None, deadline, what)

    def _wait_until(self, is_done: Callable[[], bool], deadline: float | None, what: str) -> None:
        while True:
            with suppress(BlockingIOError):
                os.eventfd_read(self._post.news)
            if self._post.lost:
                raise PeerLostError(
                    f"a remote reader of {self.address} has disconnected, at message "
                    f"{self.number}; the queue cannot go on without it: see that process's log, "
                    "and restart"
                )
            if self._cancelled:
                raise QueueCancelledError("cancelled")
            if is_done():
                return
            self._wait(self._post.news, deadline, what)

    def announce_ready(self) -> None:
        """Send message 0: whoever gets it will get all the others."""
        self._send(HEADER.pack(0, 0), None)

    def send(self, record: Record, timeout: float | None) -> None:
        """Send the message to every reader, or, if it raises, to none."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait_attached(timeout)
        parts = record if isinstance(record, tuple) else (record,)
        lengths = [memoryview(part).nbytes | IMMUTABLE * isinstance(part, bytes) for part in parts]
        head = [HEADER.pack(self.number + 1, len(parts)), *map(LENGTH.pack, lengths)]
        self._send(b"".join([*head, *parts]), deadline)
        self.number += 1

    def _send(self, content: bytes, deadline: float | None) -> None:
        post = self._post

        def has_room() -> bool:
            most = max((peer.num_bytes for peer in post.readers), default=0)
            return most == 0 or most + len(content) <= self._budget

        self._wait_until(has_room, deadline, f"no remote reader of {self.address} made room")
        try:
            with post.lock:
                for peer in post.readers:
                    post.send(peer, content)
                is_waiting = any(peer.backlog for peer in post.readers)
        except BaseException:  # a signal's: some may have it and others not
            post.lost = True
            raise
        if is_waiting or post.lost:
            os.eventfd_write(post.work, 1)


class RemoteReader(RemoteEnd):
    """Receives every message of a `RemoteWriter`."""

    def __init__(self, address: str) -> None:
        place, _, token = address.removeprefix(REMOTE_SCHEME).partition("/")
        if not address.startswith(REMOTE_SCHEME) or len(token) != 2 * TOKEN_BYTES:
            raise ProtocolError(f"cannot connect to {address}: {MIXED}")
        super().__init__()
        host, _, port = place.rpartition(":")
        self._place, self._token = (host.strip("[]"), int(port)), bytes.fromhex(token)
        self.address = REMOTE_SCHEME + place
        self._connection: socket.socket | None = None
        self._messages: Iterator[Message | None] = iter(())
        self._is_ready = False
        with suppress(CommextTimeoutError):  # then whoever waits for a message goes on with it
            self._connect(time.monotonic() + ADMISSION_SECONDS)

    def _connect(self, deadline: float | None) -> socket.socket:
        while self._connection is None:
            try:
                self._connection = connection = self._introduce()
                self._messages = _messages(connection, self.address)
            except OSError as error:
                what = f"no connection to the writer at {self.address} ({error})"
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise CommextTimeoutError(what) from None
                with suppress(CommextTimeoutError):  # cancelled or not, what there is to wait for
                    self._wait(self._cancel_fd, now + RETRY_SECONDS, what, quiet=True)
        return self._connection

    def _introduce(self) -> socket.socket:
        connection = socket.create_connection(self._place, ADMISSION_SECONDS)
        try:
            self._prove(connection)
        except BaseException:
            connection.close()
            raise
        weakref.finalize(self, connection.close).atexit = False
        return connection

    def _prove(self, connection: socket.socket) -> None:
        """Prove that this reader knows the token, and check that the other end does."""
        set_up(connection)
        magic, version, nonce = WELCOME.unpack(_exactly(connection, WELCOME.size))
        if (magic, version) != (MAGIC, VERSION):
            raise ProtocolError(
                f"{self.address}: expected version {VERSION} of this queue's messages, got "
                f"{magic!r} {version}; install the same vllm-commext on every host. {MIXED}"
            )
        nonces = nonce + (own := secrets.token_bytes(NONCE_BYTES))
        connection.sendall(own + proof(self._token, b"reader", nonces))
        answer = _exactly(connection, PROOF_BYTES)
        if not hmac.compare_digest(answer, proof(self._token, b"writer", nonces)):
            raise ProtocolError(f"{self.address}: expected the queue's writer, got a stranger")
        connection.setblocking(False)

    def wait_ready(self, timeout: float | None) -> None:
        if not self._is_ready and self._next(timeout, False):
            raise ProtocolError(f"{self.address} sends messages but was never announced ready")

    def receive(
        self, timeout: float | None, quiet: bool = False
    ) -> "bytes | list[bytes | bytearray]":
        """Return the next message, as `RingReader.read` does. `quiet`: a long wait is as it should
        be."""
        parts = self._next(timeout, quiet) or self._next(timeout, quiet)  # behind "ready"
        return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else parts

    def _next(self, timeout: float | None, quiet: bool) -> list[bytes | bytearray]:
        """The parts of the next message; none of "ready"."""
        deadline = None if timeout is None else time.monotonic() + timeout
        connection = self._connect(deadline)
        with suppress(ConnectionError):
            for message in self._messages:
                if message is None:
                    what = f"nothing from the writer at {self.address}"
                    self._wait(connection.fileno(), deadline, what, quiet)
                    continue
                self._is_ready, (self.number, parts) = True, message
                return parts
        raise PeerLostError(
            f"the connection to the writer at {self.address} broke after message {self.number}; "
            "see that process's log, and restart"
        )


def _messages(connection: socket.socket, address: str) -> "Iterator[Message | None]":
    """Yield number and parts of each message; None where nothing has come yet. ConnectionError at
    the end."""
    last = 0
    while True:
        head = bytearray(HEADER.size)
        yield from _fill(connection, head)
        number, count = HEADER.unpack(head)
        if (number, count) != (0, 0) and (number != last + 1 or not 0 < count <= MAX_PARTS):
            raise ProtocolError(
                f"{address}: expected message {last + 1}, got {number} of {count} parts"
            )
        table = bytearray(count * LENGTH.size)
        yield from _fill(connection, table)
        parts: list[bytes | bytearray] = []
        for (entry,) in LENGTH.iter_unpack(table):
            part = bytearray(entry & ~IMMUTABLE)
            yield from _fill(connection, part)
            parts.append(bytes(part) if entry & IMMUTABLE else part)
        last = number
        yield number, parts


def _fill(connection: socket.socket, memory: bytearray) -> Iterator[None]:
    view = memoryview(memory)
    while view:
        try:
            num_bytes = connection.recv_into(view)
        except BlockingIOError:
            yield None
            continue
        except OSError as error:  # no TimeoutError, which is another wait's
            raise ConnectionError(str(error)) from error
        if num_bytes == 0:
            raise ConnectionError("the other end has closed the connection")
        view = view[num_bytes:]


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    got = b""
    while len(got) < num_bytes:
        got += some(connection, num_bytes - len(got))
    return got


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:  # a host's name
        return False
