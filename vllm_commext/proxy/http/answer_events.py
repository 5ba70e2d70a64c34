"""Reads engines' answers, which come whole or as server-sent events."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from vllm_commext.proxy.http.json_members import MAX_DECODED_BYTES as SMALL_BYTES
from vllm_commext.proxy.http.json_members import decode, in_steps, members_of

CHOICES = "choices"
_ONE_OF = ("text", "message", "delta", "token_ids")
"""Members of a choice, of which it has one at least."""
MAX_DECODED_BYTES = 64 << 10
MAX_HELD_BYTES = 2 << 20
_ABORT = b'"abort"'
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_ENVELOPE = frozenset(
    ("created", "id", "model", "object", "service_tier", "system_fingerprint", "usage")
)
MAX_READ_BYTES = 2 << 20
_CACHED = re.compile(rb'("(cached_tokens|created_cache_tokens)":\s*)(?:\d+|null)')
_CUT = re.compile(rb'"(?:c[a-z_]{0,19}(?:"(?::\s*(?:\d*|nu?l?))?)?)?\Z')
_CUT_BYTES = 64
_IDS = re.compile(rb'"token_ids":\[([\d,]*)\]')
_NUMBERS = re.compile(rb"\[[\d,]{256,}\]")
_ACCEPTED = re.compile(rb"(?:event: response\.(?:created|in_progress)\ndata: .*\n\n)+")
"""Events that vLLM sends before it computes a response."""
DONE = b"data: [DONE]"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class Cached(NamedTuple):
    """A prompt's tokens that a prefix cache had, and those that it took in (None: not said)."""

    cached_tokens: int
    created_cache_tokens: int | None = None


@cache
def _reader(member: str) -> msgspec.json.Decoder[Any]:
    answer = msgspec.defstruct("_Answer", [(member, msgspec.Raw, msgspec.Raw(b"null"))])
    return msgspec.json.Decoder(answer)


def lack_of(member: str, answer: bytes) -> str:
    """Reason why a whole *answer*, which has *member*, is none, without building it; "" if one."""
    try:
        told = getattr(_reader(member).decode(answer), member)
    except (ValueError, RecursionError) as error:
        return f"{len(answer)} bytes that are no JSON object ({error})"
    is_there = _has_choices(told) if member == CHOICES else bytes(told) != b"null"
    return "" if is_there else f"JSON without {member}"


def _has_choices(told: msgspec.Raw) -> bool:
    text = bytes(told)
    if len(text) > MAX_DECODED_BYTES:  # no text has a name in quotes that are not escaped
        return text[:1] == b"[" and any(b'"%s"' % name.encode() in text for name in _ONE_OF)
    choices = decode(text)
    return isinstance(choices, list) and bool(choices) and all(map(holds, choices))


def holds(choice: Any) -> bool:
    """True if *choice*, of an answer or an event, is one."""
    return isinstance(choice, dict) and any(choice.get(name) is not None for name in _ONE_OF)


async def decoded(answer: bytes) -> Any:
    """Of a large one, what is long stays text. Raises `ValueError` or `RecursionError`."""
    is_small = len(answer) <= SMALL_BYTES
    return decode(answer) if is_small else await in_steps(members_of(answer))


class EventCutter:
    """Passes whole events: no error follows half of one. Above *max_held_bytes* they are cut."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._held = bytearray()
        self._max_held_bytes = max_held_bytes

    def feed(self, data: bytes) -> bytes:
        if not self._held and data.endswith(b"\n\n"):
            return data
        self._held += data
        ends = (self._held.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in self._held)
        end = max(ends, default=0)
        if end == 0 and len(self._held) > self._max_held_bytes:
            end = len(self._held)
        ready = bytes(self._held[:end])
        del self._held[:end]
        return ready

    def rest(self) -> bytes:
        rest = bytes(self._held)
        self._held.clear()
        return rest


def error_event(error: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(error).encode() + b"\n\n"


def with_cached_tokens(events: bytes, cached: Cached) -> bytes:
    """Set the cached tokens of a usage. No text looks so: its quotes are escaped."""
    if b'"cached_tokens"' not in events:
        return events

    def mended(found: re.Match[bytes]) -> bytes:
        number = getattr(cached, found[2].decode())
        return found[0] if number is None else b"%b%d" % (found[1], number)

    return _CACHED.sub(mended, events)


def num_whole(piece: bytes) -> int:
    """Bytes of a piece of an answer without cached tokens that its end may cut."""
    cut = None if piece.endswith(b"\n") else _CUT.search(piece, len(piece) - _CUT_BYTES)
    return len(piece) if cut is None else cut.start()


def num_tokens(piece: bytes) -> int:
    """About the tokens of a piece of a stream: events that do not end it, or the ids in them."""
    more = sum(ids.count(b",") for ids in _IDS.findall(piece)) if b"token_ids" in piece else 0
    return piece.count(b"\n\n") - piece.count(DONE) - piece.count(b'"choices":[]') + more


def opening_error(events: bytes) -> tuple[int, bytes] | None:
    """Code and body of the error that *events* begin with, or None: what comes behind a token is
    the stream's."""
    if b'"error"' not in events:
        return None
    for content in _contents(events):
        error = content.get("error") if content is not None else None
        if isinstance(error, dict):
            code = error.get("code")
            return (code if isinstance(code, int) else 500), json.dumps(content).encode()
        if not _holds_nothing(content):
            break
    return None


def opens_aborted(events: bytes) -> bool:
    if _ABORT not in events:
        return False
    contents = [content or {} for content in _contents(events)]
    choices = [choice for content in contents for choice in _choices(content)]
    return not any(map(_says, choices)) and any(
        choice.get("finish_reason") == "abort" for choice in choices
    )


def is_aborted(answer: bytes) -> bool:
    """True for a whole answer that its engine gave up. No text looks so: its quotes are escaped."""
    return _ABORTED.search(answer) is not None and not lack_of(CHOICES, answer)


def _choices(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = content.get("choices")
    choices = choices if isinstance(choices, list) else []
    return [choice for choice in choices if isinstance(choice, dict)]


def _says(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    told = delta if isinstance(delta, dict) else {"text": choice.get("text")}
    return any(value for name, value in told.items() if name != "role")


def says_nothing(events: bytes) -> bool:
    """True for a chat's role, a response that is accepted, usage, an event that holds nothing, or
    the end mark alone, as vLLM 0.32 ends a completion that is aborted before its first token."""
    return bool(_ACCEPTED.fullmatch(events)) or all(map(_holds_nothing, _contents(events)))


def _holds_nothing(content: dict[str, Any] | None) -> bool:
    return content is not None and (_is_void(content) or _is_role_alone(content))


def _is_void(content: Mapping[str, Any]) -> bool:
    if CHOICES in content:
        return not any(map(holds, _choices(content)))
    return all(value is None or name in _ENVELOPE for name, value in content.items())


def _contents(events: bytes) -> Iterator[dict[str, Any] | None]:
    """JSON objects of *events*, each decoded when it is asked for; None at other data, or for much,
    and nothing behind it."""
    if MAX_DECODED_BYTES < len(events) <= MAX_READ_BYTES:
        events = _NUMBERS.sub(b"[]", events)
    if len(events) > MAX_DECODED_BYTES:
        yield None
        return
    for line in events.split(b"\n"):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        try:
            content = decode(line[5:])
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            yield None
            return
        yield content


def _is_role_alone(content: dict[str, Any]) -> bool:
    choices = _choices(content)
    return bool(choices) and all(
        isinstance(one.get("delta"), dict) and one.get("finish_reason") is None and not _says(one)
        for one in choices
    )
