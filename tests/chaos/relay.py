"""A TCP relay that can be slow or say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.kit.servers import LOOPBACK

CHUNK_BYTES = 512
CHUNK_SECONDS = 0.02
POLL_SECONDS = 0.2


@dataclass
class Relay:
    """Passes on what comes to its port on loopback: slowly, ``CHUNK_BYTES`` each ``CHUNK_SECONDS``,
    or where it is ``cut`` nothing of it."""

    target: tuple[str, int]
    port: int = 0
    slow: bool = False
    cut: bool = False
    num_connections: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def serve(self, listener: socket.socket) -> None:
        listener.settimeout(POLL_SECONDS)
        while not self._stop.is_set():
            try:
                accepted, _ = listener.accept()
                far = socket.create_connection(self.target, timeout=5.0)
            except OSError:
                continue
            self.num_connections += 1
            for source, sink in ((accepted, far), (far, accepted)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(POLL_SECONDS)
        with contextlib.suppress(OSError), source, sink:
            while not self._stop.is_set():
                try:
                    chunk = source.recv(CHUNK_BYTES if self.slow else 1 << 16)
                except TimeoutError:
                    continue
                if not chunk:
                    return
                if self.slow:
                    self._stop.wait(CHUNK_SECONDS)
                if not self.cut:
                    sink.sendall(chunk)


@contextlib.contextmanager
def relay_to(host: str, port: int) -> Iterator[Relay]:
    relay = Relay((host, port))
    with socket.create_server((LOOPBACK, 0)) as listener:
        relay.port = listener.getsockname()[1]
        thread = threading.Thread(target=relay.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.stop()
            thread.join(5.0)
