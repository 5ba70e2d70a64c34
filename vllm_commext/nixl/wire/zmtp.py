"""The framing of the side channel: ZMTP 3.0 with the NULL mechanism, which is what ZMQ sockets
speak, for messages of one frame. Pure: bytes in, messages out.

A peer that announces a frame of more bytes than are allowed, a message of several frames, or a
command after the first one is refused before any of it is kept. The one message of two frames that
passes has an empty first one, as ZMQ's REQ sockets send and expect it."""

from __future__ import annotations

import struct

from vllm_commext.errors import ProtocolError

ROUTER, DEALER = "ROUTER", "DEALER"  # the answering and the asking end
_PEERS = {ROUTER: (b"DEALER", b"REQ"), DEALER: (b"ROUTER",)}
GREETING_BYTES = 64
MAX_COMMAND_BYTES = 512
MAX_HEADER_BYTES = 9
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES = 10
_VERSION = 3
_MECHANISM = b"NULL".ljust(20, b"\0")


def opening(kind: str) -> bytes:
    signature = b"\xff" + bytes(8) + b"\x7f"
    greeting = (signature + bytes([_VERSION, 0]) + _MECHANISM).ljust(GREETING_BYTES, b"\0")
    properties = {b"Socket-Type": kind.encode(), b"Identity": b""}
    body = b"\x05READY" + b"".join(map(_property, properties, properties.values()))
    return greeting + bytes([_COMMAND, len(body)]) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def header(num_bytes: int, *, is_enveloped: bool = False) -> bytes:
    """The bytes before a message; *enveloped* where its asker's was."""
    envelope = bytes([_MORE, 0]) if is_enveloped else b""
    if num_bytes < 256:
        return envelope + bytes([0, num_bytes])
    return envelope + struct.pack(">BQ", _LONG, num_bytes)


class Decoder:
    """Takes one end's messages from the bytes that come; ``kind`` is this end's.

    Attributes:
        is_ready: the other end has greeted and is ready; only then may it be sent a message.
        is_enveloped: the last message had an empty frame before it, as its answer has to.
    """

    __slots__ = (
        *("_has_greeting", "_held", "_is_in_envelope", "_kind", "_max_bytes"),
        *("is_enveloped", "is_ready"),
    )

    def __init__(self, kind: str, max_bytes: int) -> None:
        self.is_ready = False
        self.is_enveloped = False
        self._kind = kind
        self._max_bytes = max_bytes
        self._has_greeting = False
        self._is_in_envelope = False
        self._held = bytearray()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> None:
        self._held += data

    def take(self) -> bytes | None:
        """The next message, None where it is not whole yet; raises ProtocolError."""
        if not self._has_greeting and not self._take_greeting():
            return None
        while (found := self._take_frame()) is not None:
            flags, body = found
            if not self.is_ready:
                self._take_ready(flags, body)
            elif flags & _MORE:
                self._is_in_envelope = True
            else:
                self.is_enveloped, self._is_in_envelope = self._is_in_envelope, False
                return body
        return None

    def _take_greeting(self) -> bool:
        held = self._held
        if held and (held[0] != 0xFF or (len(held) >= _SIGNATURE_BYTES and not held[9] & 1)):
            raise ProtocolError("not a peer of ZMTP 3: its signature is another one")
        if len(held) > _SIGNATURE_BYTES and held[_SIGNATURE_BYTES] < _VERSION:
            raise ProtocolError(f"expected ZMTP {_VERSION}, got {held[_SIGNATURE_BYTES]}")
        if len(held) < GREETING_BYTES:
            return False
        if bytes(held[12:32]) != _MECHANISM:
            raise ProtocolError(f"expected ZMTP's mechanism NULL, got {bytes(held[12:32])!r}")
        self._has_greeting = True
        del held[:GREETING_BYTES]
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        held = self._held
        if len(held) < 2:
            return None
        flags, begin, num_bytes = held[0], 2, held[1]
        if flags & _LONG:
            if len(held) < MAX_HEADER_BYTES:
                self._check(flags, 0)
                return None
            begin, num_bytes = MAX_HEADER_BYTES, int.from_bytes(held[1:MAX_HEADER_BYTES], "big")
        self._check(flags, num_bytes)
        if len(held) < begin + num_bytes:
            return None
        body = bytes(memoryview(held)[begin : begin + num_bytes])
        del held[: begin + num_bytes]
        return flags, body

    def _check(self, flags: int, num_bytes: int) -> None:
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError(f"expected a frame of ZMTP 3, got flags {flags:#x}")
        if bool(flags & _COMMAND) == self.is_ready:
            what = "messages" if self.is_ready else "the command READY"
            raise ProtocolError(f"expected {what}, got flags {flags:#x}")
        if flags & _MORE and (num_bytes or self._is_in_envelope):
            raise ProtocolError("expected messages of one frame, got one of several")
        most = self._max_bytes if self.is_ready else MAX_COMMAND_BYTES
        if num_bytes > most:
            raise ProtocolError(f"expected a frame of at most {most} bytes, got {num_bytes}")

    def _take_ready(self, flags: int, body: bytes) -> None:
        if body[:1] == b"\x05" and body[1:6] == b"ERROR":
            raise ProtocolError(f"the peer refuses to talk: {body[7:]!r}")
        if not body.startswith(b"\x05READY"):
            raise ProtocolError(f"expected the command READY, got {body[:16]!r}")
        kind = _properties(body[6:]).get(b"socket-type", b"")
        if kind not in _PEERS[self._kind]:
            raise ProtocolError(f"expected a socket of {_PEERS[self._kind]}, got {kind!r}")
        self.is_ready = True


def _properties(data: bytes) -> dict[bytes, bytes]:
    """What a READY says, by name in small letters; raises ProtocolError."""
    found: dict[bytes, bytes] = {}
    while data:
        begin = 1 + data[0]
        num_bytes = int.from_bytes(data[begin : begin + 4], "big")
        end = begin + 4 + num_bytes
        if end > len(data):
            raise ProtocolError("the command READY is cut short")
        found[data[1:begin].lower()] = data[begin + 4 : end]
        data = data[end:]
    return found
