"""What another engine repeats of a stream, and the client is not told again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class DiffersError(Exception):
    """Another engine has answered otherwise."""


class UnknownError(Exception):
    """A part of an answer that is not known here."""


UNKNOWN = (UnknownError, AttributeError, TypeError, OverflowError)


Edit = Callable[[str, str], str]
"""Gives what is to stay of the text of a field."""


def edited(delta: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """A part of a chat without its role, each text of it as *edit* leaves it."""
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
    """A part of a call; one that the client knows is told by its number alone."""
    number, function = call.get("index"), call.get("function") or {}
    kept: dict[str, str] = {}
    for name in ("name", "arguments"):
        if text := edit(f"{number} {name}", function.get(name) or ""):
            kept[name] = text
    if "name" in kept:
        return {**call, "function": {**function, **kept}}
    return {"index": number, "function": kept} if kept else {}


class Replay:
    """What another engine has still to repeat of what the client has."""

    def __init__(self, ids: Sequence[int], texts: Mapping[str, bytearray]) -> None:
        self._ids = list(ids)
        self._texts = {name: bytes(text) for name, text in texts.items()}

    @property
    def is_over(self) -> bool:
        return not self._ids and not any(self._texts.values())

    @property
    def num_left(self) -> int:
        """Tokens."""
        return len(self._ids)

    def new_ids(self, ids: list[int]) -> list[int]:
        """Those of *ids* that the client has not."""
        count = min(len(ids), len(self._ids))
        if ids[:count] != self._ids[:count]:
            raise DiffersError
        del self._ids[:count]
        return ids[count:]

    def new_text(self, name: str, text: str) -> str:
        """The part of a field's *text* that the client has not."""
        raw, sent = text.encode(), self._texts.get(name, b"")
        count = min(len(raw), len(sent))
        if raw[:count] != sent[:count]:
            raise DiffersError
        self._texts[name] = sent[count:]
        return raw[count:].decode()
