"""The queue's readers on other hosts: over ZMQ, with back pressure and numbered messages.

A message that cannot be queued for every reader is queued for none and the writer waits. Readers
subscribe to the queue's own token, which only its handle tells: whoever else connects gets nothing,
holds nothing up, and may leave. A reader that misses a number, or whose connection breaks, gets an
error and never a later message in place of a lost one.
"""

import ipaddress
import logging
import os
import secrets
import struct
import time
import weakref
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import CommextTimeoutError, ProtocolError
from .codec import Record
from .errors import PeerLostError, QueueCancelledError
from .handle import MIXED, REMOTE_SCHEME
from .waiting import warning_interval

logger = logging.getLogger("vllm.commext.shm")

HEADER = struct.Struct("<4s16sIQ")  # magic, token, version, the message's number; a byte a part
MAGIC, VERSION = b"VCXQ", 3
TOKEN_BYTES = 16
RETRY_MS = 2  # between two attempts to queue a message while a reader's queue is full
LINGER_MS = 1000  # for what is still on its way when the queue is collected


class RemoteEnd:
    """What both ends have in common: one socket, one context, and a way to be cancelled."""

    def __init__(self, kind: int, is_ipv6: bool) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a host that is gone, not a process that
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)  # is stopped: the kernel answers
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        if is_ipv6:
            self.socket.setsockopt(zmq.IPV6, 1)
        self._cancelled = False
        self._cancel_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._cancel_fd, zmq.POLLIN)
        self.number = 0  # of the last message
        self._sockets = [self.socket]  # the finalizer keeps them: a context with open sockets hangs
        finalizer = weakref.finalize(self, _close, self._context, self._sockets, self._cancel_fd)
        finalizer.atexit = False

    def cancel(self) -> None:
        """End the wait in progress and every later one. From any thread or signal handler."""
        self._cancelled = True
        os.eventfd_write(self._cancel_fd, 1)

    def poll(
        self, deadline: float | None, what: str, at_most_ms: int | None = None, quiet: bool = False
    ) -> set[Any]:
        """What is ready; empty only after `at_most_ms`. Raises at the deadline and on `cancel`.
        Unless `quiet`, a long wait writes a line into the log now and then.
        """
        started, interval_ms = time.monotonic(), max(1, int(warning_interval() * 1000))
        while True:
            now = time.monotonic()
            left_ms = interval_ms if deadline is None else max(0, int((deadline - now) * 1000))
            wait_ms = min(left_ms, interval_ms, interval_ms if at_most_ms is None else at_most_ms)
            ready = {source for source, _ in self._poller.poll(wait_ms)}
            if self._cancel_fd in ready:
                raise QueueCancelledError("cancelled")
            if ready:
                return ready
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise CommextTimeoutError(f"{what} within the timeout, after message {self.number}")
            if at_most_ms is not None:
                return ready
            if not quiet and wait_ms == interval_ms:
                self.tell(what, now - started)

    def tell(self, what: str, seconds: float) -> None:
        """The line about a long wait."""
        logger.info("%s for %.0f s, after message %d", what, seconds, self.number)


def _close(context: Any, sockets: "list[zmq.Socket[bytes]]", cancel_fd: int) -> None:
    os.close(cancel_fd)
    for socket in sockets:
        socket.close()
    context.term()


class RemoteWriter(RemoteEnd):
    """Sends every message to `n_readers` readers on other hosts."""

    def __init__(self, n_readers: int, connect_ip: str) -> None:
        self.is_ipv6 = _is_ipv6(connect_ip)
        super().__init__(zmq.XPUB, self.is_ipv6)
        self.socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # every coming and going, not the first alone
        self.socket.setsockopt(zmq.XPUB_MANUAL, 1)  # none counts that is not confirmed
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._topic = MAGIC + self._token
        host = f"[{connect_ip}]" if self.is_ipv6 else connect_ip
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"{REMOTE_SCHEME}{host}:{port}"
        self.invitation = f"{self.address}/{self._token.hex()}"
        self._n_readers, self._attached = n_readers, 0

    def wait_attached(self, timeout: float | None) -> None:
        """Wait until every reader has subscribed."""
        if self._attached == self._n_readers:
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        self._poller.register(self.socket, zmq.POLLIN)
        try:
            while self._attached < self._n_readers:
                what = f"{self._attached} of {self._n_readers} remote readers attached"
                if self.socket in self.poll(deadline, what):
                    self._meet()
        finally:
            self._poller.unregister(self.socket)

    def _meet(self) -> None:
        news = self.socket.recv()
        if news[1:] != self._topic:  # not one of ours
            return
        if news[0]:
            self.socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            self._attached += 1
            return
        raise PeerLostError(
            f"a remote reader of {self.address} has disconnected, at message {self.number}; the "
            "queue cannot go on without it: see that process's log, and restart"
        )

    def announce_ready(self) -> None:
        """Message 0: whoever gets it will get all the others."""
        self._send([HEADER.pack(MAGIC, self._token, VERSION, 0)], None)

    def send(self, record: Record, timeout: float | None) -> None:
        """Queue the message for every reader, or, if it raises, for none. The first one waits until
        all readers have subscribed: ZMQ would drop it for those who have not.
        """
        self.wait_attached(timeout)
        parts = record if isinstance(record, tuple) else (record,)
        kinds = bytes(isinstance(part, bytes) for part in parts)
        header = HEADER.pack(MAGIC, self._token, VERSION, self.number + 1) + kinds
        self._send([header, *parts], None if timeout is None else time.monotonic() + timeout)
        self.number += 1

    def _send(self, frames: list[Any], deadline: float | None) -> None:
        what, told = f"no remote reader of {self.address} made room", time.monotonic()
        while True:
            while self.socket.poll(0):
                self._meet()
            if self._cancelled:
                raise QueueCancelledError("cancelled")
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
            except zmq.Again:
                self.poll(deadline, what, RETRY_MS)
                if (waited := time.monotonic() - told) >= warning_interval():
                    told += waited
                    self.tell(what, waited)
            else:
                return


class RemoteReader(RemoteEnd):
    """Receives every message of a `RemoteWriter`."""

    def __init__(self, address: str, is_ipv6: bool) -> None:
        self.address, _, token = address.removeprefix(REMOTE_SCHEME).partition("/")
        if not address.startswith(REMOTE_SCHEME) or len(token) != 2 * TOKEN_BYTES:
            raise ProtocolError(f"cannot connect to {address}: {MIXED}")
        super().__init__(zmq.SUB, is_ipv6)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sockets.append(self._monitor)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self.socket, zmq.POLLIN)
        self.socket.setsockopt(zmq.SUBSCRIBE, MAGIC + bytes.fromhex(token))
        self.socket.connect(f"tcp://{self.address}")
        self.address = REMOTE_SCHEME + self.address
        self._lost = self._is_ready = False

    def wait_ready(self, timeout: float | None) -> None:
        """Wait until the writer has announced that every reader is there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._is_ready and self._receive(deadline):
            raise ProtocolError(f"{self.address} sends messages but was never announced ready")

    def receive(
        self, timeout: float | None, quiet: bool = False
    ) -> "bytes | list[bytes | bytearray]":
        """The next message, as `RingReader.read` returns it. `quiet`: a long wait is as it should
        be.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            parts = self._receive(deadline, quiet)
            if parts:
                return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else parts

    def _receive(self, deadline: float | None, quiet: bool = False) -> list[bytes | bytearray]:
        """The parts of the next message; none of message 0."""
        what = f"nothing from the writer at {self.address}"
        while not self.socket.poll(0):  # what has arrived comes before any bad news
            if self._lost:
                raise PeerLostError(
                    f"the connection to the writer at {self.address} broke after message "
                    f"{self.number}; see that process's log, and restart"
                )
            if self._monitor in self.poll(deadline, what, quiet=quiet):
                recv_monitor_message(self._monitor)
                self._lost = True
        number, parts = parse(self.socket.recv_multipart(copy=False), self.address)
        if number == 0:
            self._is_ready = True
        elif number != self.number + 1:
            raise ProtocolError(
                f"{self.address}: expected message {self.number + 1}, got {number}; messages were "
                "lost before this reader had attached, or on the way"
            )
        self.number = number
        return parts


def parse(frames: list[Any], address: str) -> tuple[int, list[bytes | bytearray]]:
    """The number and the parts of a message, in memory of their own."""
    header = bytes(frames[0].buffer)
    kinds = header[HEADER.size :]
    if len(header) < HEADER.size or header[:4] != MAGIC or len(kinds) != len(frames) - 1:
        raise ProtocolError(f"{address}: got something else than this queue's messages; {MIXED}")
    _, _, version, number = HEADER.unpack_from(header)
    if version != VERSION:
        raise ProtocolError(
            f"{address}: expected version {VERSION} of the messages, got {version}; install the "
            "same vllm-commext on every host"
        )
    parts: list[bytes | bytearray] = [
        bytes(frame.buffer) if immutable else bytearray(frame.buffer)
        for frame, immutable in zip(frames[1:], kinds, strict=True)
    ]
    return number, parts


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:  # a host's name
        return False
