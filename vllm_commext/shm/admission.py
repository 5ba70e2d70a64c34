"""How a queue's writer admits readers on other hosts, and sends them what their sockets did not
take at once: a thread of the writer's process.

A reader proves that it knows the queue's token, which only the handle tells, before anything is
kept for it, and the writer proves it in turn; the token itself never travels. Once all readers are
there the port is closed.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress

MAGIC, VERSION = b"VCXQ", 4
WELCOME = struct.Struct("<4sI16s")  # the writer's first word: magic, version, nonce
NONCE_BYTES = TOKEN_BYTES = 16
PROOF_BYTES = 32
ADMISSION_SECONDS = 5.0  # for a stranger to become a reader
MOST_STRANGERS = 64  # at once; the one that has waited longest makes room
LINGER_SECONDS = 1.0  # for what is still on its way when the queue is collected


def proof(token: bytes, who: bytes, nonces: bytes) -> bytes:
    """The proof that `who` knows the token."""
    return hmac.digest(token, who + nonces, "sha256")


def set_up(connection: socket.socket) -> None:
    """Switch off delays, and notice when the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 30),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def some(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes at most; OSError when there are no more."""
    got = connection.recv(num_bytes)
    if not got:
        raise ConnectionError("the other end has closed the connection")
    return got


class Peer:
    """A connection to the writer: a stranger's, until it has said what a reader says."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        set_up(connection)
        self.connection, self.said = connection, b""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.until = time.monotonic() + ADMISSION_SECONDS
        self.backlog: deque[memoryview] = deque()
        self.num_bytes = 0  # of the backlog
        connection.send(WELCOME.pack(MAGIC, VERSION, self.nonce))

    def listen(self, token: bytes) -> bytes | None:
        """The answer to a reader, None until it is known to be one; OSError for a stranger."""
        self.said += some(self.connection, NONCE_BYTES + PROOF_BYTES - len(self.said))
        if len(self.said) < NONCE_BYTES + PROOF_BYTES:
            return None
        nonces = self.nonce + self.said[:NONCE_BYTES]
        if not hmac.compare_digest(self.said[NONCE_BYTES:], proof(token, b"reader", nonces)):
            raise ConnectionError("a stranger")
        return proof(token, b"writer", nonces)

    def send(self, content: bytes) -> None:
        """Send as much as the socket takes, and keep the rest."""
        if content:
            self.backlog.append(memoryview(content))
            self.num_bytes += len(content)
        with suppress(BlockingIOError):
            while self.backlog:
                sent = self.connection.send(self.backlog[0])
                self.num_bytes -= sent
                rest = self.backlog.popleft()[sent:]
                if rest:
                    self.backlog.appendleft(rest)


class Post:
    """What the writer and its thread share; `lock` guards all of it.

    `work`: an eventfd that wakes the thread; `news`: one that wakes the writer.
    """

    def __init__(self, listener: socket.socket, token: bytes, n_readers: int) -> None:
        self.lock = threading.Lock()
        self.work, self.news = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self.listener: socket.socket | None = listener
        self.token, self.n_readers = token, n_readers
        self.strangers: list[Peer] = []
        self.readers: list[Peer] = []
        self.lost = False
        self.end: float | None = None  # when the thread gives up what is still under way

    def close(self) -> None:
        self.end = time.monotonic() + LINGER_SECONDS
        os.eventfd_write(self.work, 1)

    def run(self) -> None:
        """Run the thread, until the queue ends."""
        while self.end is None or (time.monotonic() < self.end and self._is_busy()):
            poller = select.poll()
            with self.lock:
                poller.register(self.work, select.POLLIN)
                if self.listener is not None:
                    poller.register(self.listener, select.POLLIN)
                for peer in self.strangers + ([] if self.lost else self.readers):
                    wanted = select.POLLIN | (select.POLLOUT if peer.backlog else 0)
                    poller.register(peer.connection, wanted)
            is_brief = self.strangers or self.end is not None
            ready = dict(poller.poll(LINGER_SECONDS * 100 if is_brief else None))
            with suppress(BlockingIOError):
                os.eventfd_read(self.work)
            with self.lock:
                self._look(ready)
        for peer in self.strangers + self.readers:
            peer.connection.close()
        self.stop_listening()
        os.close(self.work)
        os.close(self.news)

    def _is_busy(self) -> bool:
        return any(peer.backlog for peer in self.readers) and not self.lost

    def _look(self, ready: dict[int, int]) -> None:
        for peer in self.readers:
            if peer.connection.fileno() in ready and not self.lost:
                self._serve(peer)
        for peer in self.strangers[:]:
            if peer.connection.fileno() in ready:
                self._hear(peer)
            elif time.monotonic() > peer.until:
                self._drop(peer)
        if self.listener is not None and self.listener.fileno() in ready:
            with suppress(OSError):
                self.strangers.append(Peer(self.listener.accept()[0]))
            if len(self.strangers) > MOST_STRANGERS:
                self._drop(self.strangers[0])

    def _drop(self, peer: Peer) -> None:
        if peer in self.strangers:
            self.strangers.remove(peer)
        peer.connection.close()

    def _hear(self, peer: Peer) -> None:
        try:
            answer = peer.listen(self.token)
        except OSError:
            return self._drop(peer)
        if answer is None:
            return None
        self.strangers.remove(peer)
        self.readers.append(peer)
        if len(self.readers) == self.n_readers:
            self.stop_listening()
        self.send(peer, answer)
        return self.tell()

    def _serve(self, peer: Peer) -> None:
        """Send a reader more, or notice that it has gone: it has nothing else to say."""
        try:
            peer.connection.recv(1)
            self.lost = True
        except BlockingIOError:
            self.send(peer, b"")
        except OSError:
            self.lost = True
        self.tell()

    def send(self, peer: Peer, content: bytes) -> None:
        try:
            peer.send(content)
        except OSError:
            self.lost = True

    def tell(self) -> None:
        os.eventfd_write(self.news, 1)

    def stop_listening(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.listener = None
        for peer in self.strangers[:]:
            self._drop(peer)
