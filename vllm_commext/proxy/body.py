"""A request's JSON object, taken apart without ever stopping the event loop for long. Pure.

A small body is decoded as a whole. Of a large one only the members are told apart, a window at
a time: what is short is decoded, what is long (a prompt, the messages) stays the text that came,
since all that the proxy asks of it is its kind and about how many tokens it has. 33 MB of token
ids would take seconds to decode, and ten times their size.
"""

import json
import math
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

LARGE_BODY_BYTES = 256 << 10
MAX_DECODED_BYTES = 64 << 10
WINDOW_BYTES = 128 << 10
BYTES_PER_TOKEN = 4
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^\s,\]}]+")
_STRUCTURE = re.compile(rb'["\[\]{}]')
_QUOTE = b'"'[0]
_OPENING = b"[{"


@dataclass(frozen=True)
class RawJson:
    """A long value as it came.

    text: its JSON. kind: the first character, one of ``"``, ``[`` and ``{``. num_items, item_kind:
    of an array, how many elements it has and the first one's first character.
    """

    text: memoryview
    kind: str
    num_items: int = 0
    item_kind: str = ""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond what a number can hold")
    return value


def decode(text: bytes | bytearray | memoryview) -> Any:
    """The JSON in *text*. Raises `ValueError` or `RecursionError`.

    msgspec takes a fifth of the time of Python's decoder, which judges what msgspec refuses: lone
    surrogates and other encodings than UTF-8 are JSON to the engines.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raw = bytes(text) if isinstance(text, memoryview) else text
        return json.loads(raw, parse_constant=_no_constant, parse_float=_finite)


def members_of(raw: bytes | bytearray) -> Generator[None, None, Any]:
    """Take *raw* apart; yields wherever the caller may let others run, returns what it holds.

    Raises `ValueError` or `RecursionError` if that is not JSON, as far as it is looked at.
    """
    if len(raw) <= LARGE_BODY_BYTES:
        return decode(raw)
    return (yield from _Splitter(raw).members())


class _Splitter:
    """The members of one large object."""

    def __init__(self, raw: bytes | bytearray) -> None:
        self._raw = raw
        self._view = memoryview(raw)
        self._end = len(raw)
        self._looked_at = 0

    def members(self) -> Generator[None, None, dict[str, Any]]:
        members: dict[str, Any] = {}
        pos = self._after_space(self._expect(b"{", self._after_space(0)))
        if self._byte(pos) == b"}":
            pos += 1
        else:
            while True:
                name_end = yield from self._string_end(self._expect(b'"', pos))
                name = decode(self._view[pos:name_end])
                start = self._after_space(self._expect(b":", self._after_space(name_end)))
                members[name], pos = yield from self._value(start)
                if self._byte(pos := self._after_space(pos)) == b"}":
                    pos += 1
                    break
                pos = self._after_space(self._expect(b",", pos))
        if self._after_space(pos) != self._end:
            raise ValueError(f"more after the object's end at byte {pos}")
        return members

    def _value(self, start: int) -> Generator[None, None, tuple[Any, int]]:
        kind, num_commas = self._byte(start), 0
        if kind == b'"':
            end = yield from self._string_end(start + 1)
        elif kind in (b"[", b"{"):
            end, num_commas = yield from self._nested_end(start)
        else:
            match = _SCALAR.match(self._raw, start)
            end = match.end() if match else start
        if end - start <= MAX_DECODED_BYTES:
            return decode(self._view[start:end]), end
        item = self._byte(self._after_space(start + 1)).decode("latin-1")
        return RawJson(self._view[start:end], kind.decode(), num_commas + 1, item), end

    def _string_end(self, pos: int) -> Generator[None, None, int]:
        """Behind the quote that ends the string whose first character is at *pos*."""
        start, run = pos, 0
        while True:
            window_end = min(self._end, pos + WINDOW_BYTES)
            found = self._raw.find(b'"', pos, window_end)
            piece = self._raw[pos : window_end if found < 0 else found]
            num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
            run = num_backslashes + (run if num_backslashes == len(piece) else 0)
            if found < 0:
                if window_end == self._end:
                    raise ValueError(f"the string at byte {start - 1} has no end")
                pos = window_end
            else:
                pos = found + 1
                if run % 2 == 0:
                    return pos
                run = 0
            if self._window_is_over(pos):
                yield

    def _nested_end(self, start: int) -> Generator[None, None, tuple[int, int]]:
        """Behind the bracket that closes the one at *start*; the commas right inside."""
        pos, depth, num_commas = start + 1, 1, 0
        while depth:
            window_end = min(self._end, pos + WINDOW_BYTES)
            match = _STRUCTURE.search(self._raw, pos, window_end)
            found = match.start() if match else window_end
            if depth == 1:
                num_commas += self._raw.count(b",", pos, found)
            pos = found + 1 if match else found
            if match is None:
                if found == self._end:
                    raise ValueError(f"what opens at byte {start} has no end")
            elif self._raw[found] == _QUOTE:
                pos = yield from self._string_end(pos)
            else:
                depth += 1 if self._raw[found] in _OPENING else -1
            if self._window_is_over(pos):
                yield
        return pos, num_commas

    def _window_is_over(self, pos: int) -> bool:
        if pos - self._looked_at < WINDOW_BYTES:
            return False
        self._looked_at = pos
        return True

    def _after_space(self, pos: int) -> int:
        match = _SPACE.match(self._raw, pos)
        return match.end() if match else pos

    def _byte(self, pos: int) -> bytes:
        return bytes(self._raw[pos : pos + 1])

    def _expect(self, what: bytes, pos: int) -> int:
        if self._byte(pos) != what:
            raise ValueError(f"expected {what.decode()!r} at byte {pos}")
        return pos + 1


def encode(body: Mapping[str, Any]) -> list[bytes | memoryview]:
    """*body* as JSON, in the pieces that it is made of; an engine reads what was judged here."""
    raw = {name: value for name, value in body.items() if isinstance(value, RawJson)}
    if not raw:
        return [dumps(body)]
    pieces: list[bytes | memoryview] = []
    opening = b"{"
    for name, value in raw.items():
        pieces += [opening + dumps(name) + b":", value.text]
        opening = b","
    rest = dumps({name: value for name, value in body.items() if name not in raw})
    pieces.append(b"," + rest[1:] if len(rest) > 2 else b"}")
    return pieces


def dumps(value: Any) -> bytes:
    """What `decode` returned, as JSON without spaces."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def num_tokens(body: Mapping[str, Any]) -> int:
    """About how many tokens the prompt of *body* has, by the length of its text; what is neither
    text nor token ids (an image) counts by its length too."""
    return sum(_tokens_of(body.get(name)) for name in ("prompt", "messages", "input"))


def _tokens_of(value: Any) -> int:
    if isinstance(value, RawJson):
        if value.kind == "[" and value.item_kind.isdigit():
            return value.num_items
        return len(value.text) // BYTES_PER_TOKEN
    if isinstance(value, str):
        return (len(value) + BYTES_PER_TOKEN - 1) // BYTES_PER_TOKEN
    if isinstance(value, dict):
        return sum(map(_tokens_of, value.values()))
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], int) else sum(map(_tokens_of, value))
    return 0
