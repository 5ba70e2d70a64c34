"""Compares what another engine answers with what the client has: tokens and texts. Pure."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class DiffersError(Exception):
    """Another engine has answered otherwise."""


class UnknownError(Exception):
    """A part of an answer that is not known here."""


UNKNOWN = (UnknownError, AttributeError, TypeError, OverflowError)

_Edit = Callable[[str, str], str]


def edited(delta: Mapping[str, Any], edit: _Edit = lambda _, text: text) -> dict[str, Any]:
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


def _edited_call(call: Mapping[str, Any], edit: _Edit) -> dict[str, Any]:
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
        if has_new_text and not has_new_ids or not self._ids and any(self._texts.values()):
            raise DiffersError
