"""Room for streams that may go on at another decode engine, and the check of what it repeats."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

MAX_RESUMES = 4
MAX_MOVES = 3
"""Streams that move at a time: the more read at once, the longer each pauses."""
MAX_SHARE = 1 / 16


class Holder(Protocol):
    """is_behind: it is being repeated, and cannot be given up."""

    @property
    def is_behind(self) -> bool: ...
    def give_up(self) -> None: ...


class Room:
    """Bytes kept for all streams, of which one may hold `MAX_SHARE`. Where they would be too many,
    the stream that holds the most is given up."""

    def __init__(self, max_bytes: int) -> None:
        self._left, self._most = max_bytes, int(max_bytes * MAX_SHARE)
        self._taken: dict[Holder, int] = {}

    def take(self, holder: Holder, num_bytes: int) -> bool:
        total = self._taken.get(holder, 0) + num_bytes
        if total > self._most:
            return False
        while num_bytes > self._left:
            others = [one for one in self._taken if one is not holder and not one.is_behind]
            largest = max(others, key=lambda one: self._taken[one], default=None)
            if largest is None or self._taken[largest] <= total:
                return False
            largest.give_up()
        self._left -= num_bytes
        self._taken[holder] = total
        return True

    def give_back(self, holder: Holder) -> None:
        self._left += self._taken.pop(holder, 0)


class DiffersError(Exception):
    """Another engine has answered otherwise."""


class UnknownError(Exception):
    """A part of an answer that is not known here."""


UNKNOWN = (UnknownError, AttributeError, TypeError, OverflowError)


Edit = Callable[[str, str], str]


def edited(delta: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """A chat's delta without its role, each text as *edit* leaves it."""
    kept: dict[str, Any] = {}
    for name, value in delta.items():
        if name == "role" or not value:
            continue
        if name == "tool_calls":
            calls = (_edited_call(call, edit) for call in value)
            value = [call for call in calls if call]
        elif isinstance(value, str):
            value = edit(name, value)
        else:
            raise UnknownError
        if value:
            kept[name] = value
    return kept


def _edited_call(call: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    number, function = call.get("index"), call.get("function") or {}
    kept: dict[str, str] = {}
    for name in ("name", "arguments"):
        if text := edit(f"{number} {name}", function.get(name) or ""):
            kept[name] = text
    if "name" in kept:
        return {**call, "function": {**function, **kept}}
    return {"index": number, "function": kept} if kept else {}


class Replay:
    """The tokens and texts that another engine has still to repeat, all of them and no others.

    pieces: number of tokens of each of its events so far.
    """

    def __init__(self, ids: Sequence[int], texts: Mapping[str, bytearray]) -> None:
        self._ids = list(ids)
        self._texts = {name: bytes(text) for name, text in texts.items() if text}
        self.pieces = array("i")

    @property
    def is_over(self) -> bool:
        return not self._ids

    @property
    def num_left(self) -> int:
        return len(self._ids)

    def new_ids(self, ids: list[int]) -> list[int]:
        count = min(len(ids), len(self._ids))
        if ids[:count] != self._ids[:count]:
            raise DiffersError
        del self._ids[:count]
        if ids:
            self.pieces.append(len(ids))
        return ids[count:]

    def new_text(self, name: str, text: str) -> str:
        raw, sent = text.encode(), self._texts.get(name, b"")
        count = min(len(raw), len(sent))
        if raw[:count] != sent[:count]:
            raise DiffersError
        self._texts[name] = sent[count:]
        return raw[count:].decode()

    def end_event(self, *, has_new_ids: bool, has_new_text: bool) -> None:
        """Expect new text with new tokens alone, and none to be left where these begin."""
        if has_new_text and not has_new_ids or self.is_over and any(self._texts.values()):
            raise DiffersError
