"""Server-sent events: cutting a byte stream at the ends of events."""

import json
from collections.abc import Mapping
from typing import Any

MAX_HELD_BYTES = 8 << 20
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class EventCutter:
    """Lets whole events pass and holds back an unfinished one.

    So a client never sees half an event before the error event that tells of a lost engine.
    An event longer than *max_held_bytes* passes in pieces: memory stays bounded.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._held = bytearray()
        self._max_held_bytes = max_held_bytes

    def feed(self, data: bytes) -> bytes:
        """Add *data*; return what may be sent on now, perhaps nothing."""
        self._held += data
        end = _end_of_last_event(self._held)
        if end == 0 and len(self._held) > self._max_held_bytes:
            end = len(self._held)
        ready = bytes(self._held[:end])
        del self._held[:end]
        return ready

    def rest(self) -> bytes:
        """What is still held, for a stream that ended properly."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def _end_of_last_event(held: bytearray) -> int:
    ends = (held.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in held)
    return max(ends, default=0)


def error_event(error: Mapping[str, Any]) -> bytes:
    """*error* as one event, for a stream that has begun and cannot change its status."""
    return b"data: " + json.dumps(error).encode() + b"\n\n"
