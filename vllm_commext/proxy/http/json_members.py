"""Takes a JSON object apart without stopping the event loop for long.

A prompt, and any other long member, stays text, since 33 MB of token ids would take seconds to
decode. A large body is parsed a window at a time. The objects of `OBJECTS` are taken apart, too.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
STEP_SECONDS = 0.002
LARGE_BODY_BYTES = 32 << 10
WINDOW_BYTES = 32 << 10
_COMPACTED_BYTES = 8 << 10
MAX_DECODED_BYTES = 1 << 10
MAX_DECODED_SUM_BYTES = 128 << 10
"""Of all that are decoded: Python's objects take up to 50 times their text."""
MAX_MEMBERS = 1000
MAX_NAME_BYTES = 1024
MAX_DEPTH = 256
BYTES_PER_TOKEN = 4
LENGTHS = ("max_completion_tokens", "max_tokens")
_MAX_SCALAR_BYTES = 8 << 10
# Never decoded, so that they are the same text whatever the body's size.
_PROMPTS = frozenset[str]().union(
    ("prompt", "prompt_embeds", "suffix", "messages", "input", "instructions", "system"),
    ("tools", "documents", "chat_template", "chat_template_kwargs", "token_ids", "features"),
    ("content_parts", "prompt_token_ids", "previous_input_messages", "tokens"),
)


class Objects(dict[str, "Objects"]):
    """Names of objects that are taken apart, each with those in it."""


_XARGS = Objects()
OBJECTS = Objects(kv_transfer_params=_XARGS, vllm_xargs=_XARGS)
OBJECTS["sampling_params"] = Objects(extra_args=_XARGS)
_SPACE = b" \t\r\n"
_SPACES = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^\s,\]}]+")
_QUOTE, _COMMA = b'",'
_NESTING = (b"[", b"{")
_KEPT = (b'"', *_NESTING)
_IDS = b"0123456789, "
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT_ONCE = nullcontext()


@dataclass(frozen=True)
class RawJson:
    """A member as it came. kind: its first character. num_items, item_kind: an array's elements,
    and the first one's first character. num_leaves: numbers, if it holds arrays of them."""

    text: memoryview
    kind: str
    num_items: int = 0
    item_kind: str = ""
    num_leaves: int = 0


_NESTED = (RawJson, dict)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond what a number can hold")
    return value


def decode(text: bytes | bytearray | memoryview) -> Any:
    """Raises `ValueError` or `RecursionError`. Python's decoder, five times slower, judges what
    msgspec refuses: lone surrogates and other encodings than UTF-8 are JSON to the engines."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raw = bytes(text) if isinstance(text, memoryview) else text
        return json.loads(raw, parse_constant=_no_constant, parse_float=_finite)


async def in_steps(
    work: Generator[None, None, T],
    turn: AbstractAsyncContextManager[None] = _AT_ONCE,
    pause_seconds: float = 0.0,
) -> T:
    """Run *work* for at most `STEP_SECONDS` at a time, each time in a *turn* with a pause."""
    try:
        while True:
            async with turn:
                end = time.perf_counter() + STEP_SECONDS
                while time.perf_counter() < end:
                    next(work)
                await asyncio.sleep(pause_seconds)
    except StopIteration as done:
        return done.value


def members_of(raw: bytes | bytearray, objects: Objects = OBJECTS) -> Generator[None, None, Any]:
    """Take *raw* apart; yields wherever others may run. Raises `ValueError` or `RecursionError` for
    what is not JSON, as far as it is looked at, or too much."""
    if len(raw) > LARGE_BODY_BYTES:
        return (yield from _Splitter(raw, _Members(), objects).members())
    try:
        texts: Mapping[str, Any] = _MEMBERS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = decode(raw)
        if not isinstance(content, dict):
            return content
        texts = {name: dumps(value) for name, value in content.items()}
    members = _Members()
    for name, text in texts.items():
        view = memoryview(text)
        if name in objects and bytes(view[:1]) == b"{":
            members.found[name] = yield from members_of(bytes(view), objects[name])
        else:
            members.add(name, view)
    return members.found


class _Members:
    def __init__(self, of: "_Members | None" = None) -> None:
        self.found: dict[str, Any] = {}
        self._sums = [0, 0] if of is None else of._sums

    def add(self, name: str, text: memoryview, nest: "_Nest | None" = None) -> None:
        """Add a member; *nest* has followed it to its end, if anything has."""
        kind, sums = bytes(text[:1]), self._sums
        sums[0] += 1
        if sums[0] > MAX_MEMBERS:
            raise ValueError(f"expected at most {MAX_MEMBERS} members")
        if kind in _KEPT and (name in _PROMPTS or len(text) > MAX_DECODED_BYTES):
            self.found[name] = _kept(text, kind, nest)
            return
        sums[1] += len(text)
        if sums[1] > MAX_DECODED_SUM_BYTES:
            raise ValueError(f"expected at most {MAX_DECODED_SUM_BYTES} bytes beside the prompt")
        if nest is None and kind in _NESTING:
            _check_depth(bytes(text))
        self.found[name] = decode(text)


def _kept(text: memoryview, kind: bytes, nest: "_Nest | None") -> RawJson:
    if kind in _NESTING and nest is None:
        nest = _Nest.of(bytes(text))
    if nest is None:
        return RawJson(text, kind.decode())
    item = bytes(text[1:WINDOW_BYTES]).lstrip(_SPACE)[:1].decode("latin-1")
    num_items = 0 if item == "]" else nest.num_commas + 1
    num_leaves = nest.num_leaves + 1 if item == "[" else 0
    return RawJson(text, kind.decode(), num_items, item, num_leaves)


def _check_depth(text: bytes) -> None:
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH:
        _Nest().feed(text)


class _Nest:
    """Follows an array or an object to its end, window by window. num_commas: at its top level.
    num_leaves: at any level."""

    def __init__(self) -> None:
        self.num_commas = self.num_leaves = 0
        self._depth, self._in_string = 0, False

    @classmethod
    def of(cls, text: bytes) -> "_Nest":
        """Follow all of a short *text*; objects in an array are not counted. Raises as `feed`."""
        nest = cls()
        if not text[1:-1].translate(None, _IDS):
            nest.num_commas = text.count(b",")
        elif _counts(text):
            nest.feed(text)
        else:
            _check_depth(text)
        return nest

    def feed(self, window: bytes | bytearray) -> int | None:
        """Follow the next window, which cuts no escape; the end of the value in it, or None. Raises
        `ValueError` for what is nested too deep."""
        window = _without_escapes(window)
        if self._is_friendly(window):
            return None
        chars = np.frombuffer(window, np.uint8)
        steps, commas = _STEPS[chars], chars == _COMMA
        if self._in_string or b'"' in window:
            inside = np.logical_xor.accumulate(chars == _QUOTE) ^ self._in_string
            steps[inside], commas[inside] = 0, False
            self._in_string = bool(inside[-1])
        levels = np.cumsum(steps, dtype=np.int32)
        levels += self._depth
        if levels.max() > MAX_DEPTH:
            raise ValueError(f"expected JSON that is nested at most {MAX_DEPTH} deep")
        end = int(np.argmin(levels != 0)) + 1 if not levels.all() else None
        self.num_commas += int(np.count_nonzero(commas[:end] & (levels[:end] == 1)))
        self.num_leaves += int(np.count_nonzero(commas[:end]))
        self._depth = int(levels[-1])
        return end

    def _is_friendly(self, window: bytes | bytearray) -> bool:
        if self._in_string:
            return b'"' not in window
        if self._depth != 1 or window.translate(None, _IDS):
            return False
        self.num_commas += window.count(b",")
        return True


def _counts(text: bytes) -> bool:
    return text[:1] == b"[" and text[1:].lstrip(_SPACE)[:1] != b"{"


def _without_escapes(window: bytes | bytearray) -> bytes | bytearray:
    """Copy of *window*, as long, in which each quote begins or ends a string."""
    if b"\\" not in window:
        return window
    return window.replace(b"\\\\", b"__").replace(b'\\"', b"__")


class _Splitter:
    """Takes apart the object from *start* to *end*; *objects* of its members, too."""

    def __init__(
        self,
        raw: bytes | bytearray,
        members: _Members,
        objects: Objects,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        self._raw, self._members, self._objects = raw, members, objects
        self._view = memoryview(raw)
        self._start, self._end = start, len(raw) if end is None else end

    def members(self) -> Generator[None, None, dict[str, Any]]:
        members = self._members
        pos = yield from self._after(b"{", self._start)
        if self._byte(pos) == b"}":
            pos += 1
        else:
            while True:
                name_end = yield from self._string_end(self._expect(b'"', pos))
                if name_end - pos > MAX_NAME_BYTES:
                    raise ValueError(f"expected names of at most {MAX_NAME_BYTES} bytes")
                name = decode(self._view[pos:name_end])
                start = yield from self._after(b":", name_end)
                pos, nest = yield from self._value_end(start)
                if name in self._objects and self._byte(start) == b"{":
                    inner = (self._raw, _Members(members), self._objects[name], start, pos)
                    members.found[name] = yield from _Splitter(*inner).members()
                else:
                    members.add(name, self._view[start:pos], nest)
                pos = yield from self._after(b"", pos)
                if self._byte(pos) == b"}":
                    pos += 1
                    break
                pos = yield from self._after(b",", pos)
        pos = yield from self._after(b"", pos)
        if pos != self._end:
            raise ValueError(f"more after the object's end at byte {pos}")
        return members.found

    def _value_end(self, start: int) -> Generator[None, None, tuple[int, _Nest | None]]:
        kind = self._byte(start)
        if kind == b'"':
            return (yield from self._string_end(start + 1)), None
        if kind not in _NESTING:
            match = _SCALAR.match(self._raw, start, start + _MAX_SCALAR_BYTES)
            return (match.end() if match else start), None
        nest, pos = _Nest(), start
        while pos < self._end:
            window = self._window(pos)
            end = nest.feed(window)
            if end is not None:
                return pos + end, nest
            pos += len(window)
            yield
        raise ValueError(f"what opens at byte {start} has no end")

    def _string_end(self, start: int) -> Generator[None, None, int]:
        pos = start
        while pos < self._end:
            window = self._window(pos)
            found = _without_escapes(window).find(b'"')
            if found >= 0:
                return pos + found + 1
            pos += len(window)
            yield
        raise ValueError(f"the string at byte {start - 1} has no end")

    def _window(self, pos: int) -> bytes | bytearray:
        window = self._raw[pos : min(pos + WINDOW_BYTES, self._end)]
        num_backslashes = len(window) - len(window.rstrip(b"\\"))
        is_cut = num_backslashes % 2 and pos + len(window) < self._end
        return window[:-1] if is_cut else window

    def _after(self, what: bytes, pos: int) -> Generator[None, None, int]:
        pos = yield from self._after_space(pos)
        if what:
            pos = yield from self._after_space(self._expect(what, pos))
        return pos

    def _after_space(self, pos: int) -> Generator[None, None, int]:
        while True:
            yield
            match = _SPACES.match(self._raw, pos, min(pos + WINDOW_BYTES, self._end))
            end = match.end() if match else pos
            if end < pos + WINDOW_BYTES:
                return end
            pos = end

    def _byte(self, pos: int) -> bytes:
        return bytes(self._raw[pos : pos + 1])

    def _expect(self, what: bytes, pos: int) -> int:
        if self._byte(pos) != what:
            raise ValueError(f"expected {what.decode()!r} at byte {pos}")
        return pos + 1


def encode(body: Mapping[str, Any]) -> list[bytes | memoryview]:
    raw = {name: one for name, one in body.items() if type(one) in _NESTED and _has_raw(one)}
    if not raw:
        return [dumps(body)]
    pieces: list[bytes | memoryview] = []
    opening = b"{"
    for name, value in raw.items():
        pieces.append(opening + dumps(name) + b":")
        pieces += [value.text] if isinstance(value, RawJson) else encode(value)
        opening = b","
    rest = dumps({name: value for name, value in body.items() if name not in raw})
    pieces.append(b"," + rest[1:] if len(rest) > 2 else b"}")
    return pieces


def compacted(value: Any) -> Generator[None, None, Any]:
    """Copy of a body without insignificant white space, which holds nothing of the original;
    yields wherever others may run."""
    if isinstance(value, dict):
        copy: dict[str, Any] = {}
        for name, member in value.items():
            copy[name] = yield from compacted(member)
        return copy
    if not isinstance(value, RawJson):
        return value
    kept, in_string, pos = bytearray(), False, 0
    while pos < len(value.text):
        window = bytes(value.text[pos : pos + _COMPACTED_BYTES])
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # it cuts an escape
            window = bytes(value.text[pos : pos + _COMPACTED_BYTES + 1])
        pos += len(window)
        in_string = _compact(window, kept, in_string)
        if pos < len(value.text):
            yield
    return replace(value, text=memoryview(bytes(kept)))


def _compact(window: bytes, kept: bytearray, in_string: bool) -> bool:
    """Append *window* to *kept* without white space outside strings; true if it ends in one."""
    masked, start = _without_escapes(window), 0
    if len(window.translate(None, _SPACE)) == len(window):
        kept += window
        return in_string ^ bool(masked.count(b'"') % 2)
    for piece in masked.split(b'"'):
        if start:
            kept += b'"'
            in_string = not in_string
        part = window[start : start + len(piece)]
        kept += part if in_string else part.translate(None, _SPACE)
        start += len(piece) + 1
    return in_string


def _has_raw(value: RawJson | dict[str, Any]) -> bool:
    if isinstance(value, RawJson):
        return True
    return any(_has_raw(one) for one in value.values() if type(one) in _NESTED)


def dumps(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def num_tokens(prompt: Any) -> int:
    """Estimate the tokens of *prompt* by the length of its text; token ids are counted."""
    if not isinstance(prompt, RawJson):
        return 0
    if prompt.kind == "[" and prompt.item_kind.isdigit():
        return prompt.num_items
    # The brackets or quotes around it are no text.
    by_bytes = (len(prompt.text) - 2 + BYTES_PER_TOKEN - 1) // BYTES_PER_TOKEN
    return max(by_bytes, prompt.num_leaves)
