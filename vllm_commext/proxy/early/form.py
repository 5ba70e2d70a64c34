"""How a decode engine writes the first events of a stream, learnt from a stream of its own. Pure.

Versions of vLLM write different members, and options of a server add some. So nothing of that is
known here: what a decode engine has written is taken apart, and counts as learnt only if putting it
together again from the prefill engine's answer gives the same bytes. That proves as well that the
decode engine answered with the prefill engine's token.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_commext.proxy.early.rule import FirstToken, only_choice

MAX_FORMS = 256
MAX_REFUSALS = 2
_DATA = b"data: "
_END = b"\n\n"


class NotAnEventError(ValueError):
    """Bytes are no event with a JSON object."""


def read_event(event: bytes) -> dict[str, Any]:
    """The object of one event, its end left out. Raises `NotAnEventError`."""
    if not event.startswith(_DATA):
        raise NotAnEventError(f"expected an event that begins with {_DATA!r}, got {event[:40]!r}")
    try:
        content = json.loads(event[len(_DATA) :])
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"expected a JSON object, got {event[:80]!r}") from error
    if not isinstance(content, dict):
        raise NotAnEventError(f"expected a JSON object, got {event[:80]!r}")
    return content


def write_event(content: Mapping[str, Any]) -> bytes:
    """As vLLM writes it. Raises `UnicodeEncodeError` for text that no server could have sent."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return _DATA + text.encode() + _END


def text_of(choice: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """What holds the text of an event's choice, and the name that it has there."""
    delta = choice.get("delta")
    return (delta, "content") if isinstance(delta, dict) else (choice, "text")


@dataclass(frozen=True)
class Form:
    """The first events of a decode engine's streams of one kind.

    id_prefix: what stands before the request's id. events: as they were learnt; a chat has two,
    the first of which tells the role alone. content_type: the header.
    """

    id_prefix: str
    events: Sequence[Mapping[str, Any]]
    content_type: str

    def fill(self, request_id: str, created: int, first: FirstToken) -> list[dict[str, Any]] | None:
        """The events of another request; None if they cannot be told from these."""
        filled = [_filled(event, first) for event in self.events]
        if any(event.get("model") != first.model for event in filled):
            return None
        own = {"id": self.id_prefix + request_id, "created": created}
        return [{**event, **own} for event in filled]


def learn(opening: bytes, content_type: str, request_id: str, first: FirstToken) -> Form | None:
    """The form of a decode engine's first events, None if they are not just *first*."""
    num_events = 2 if first.role else 1
    raw = opening.split(_END)[:num_events]
    try:
        events = [read_event(event) for event in raw]
    except NotAnEventError:
        return None
    name, created = events[0].get("id"), events[0].get("created")
    if not isinstance(name, str) or not name.endswith(request_id) or not isinstance(created, int):
        return None
    form = Form(name.removesuffix(request_id), events, content_type)
    filled = form.fill(request_id, created, first)
    try:
        same = filled is not None and [write_event(event) for event in filled]
    except UnicodeEncodeError:
        return None
    return form if same == [event + _END for event in raw] else None


def _filled(event: Mapping[str, Any], first: FirstToken) -> dict[str, Any]:
    filled = dict(event)
    choice = only_choice(event)
    has_text = choice is not None and bool(choice.get("text") or text_of(choice)[0].get("content"))
    if choice is not None:
        filled["choices"] = [_filled_choice(choice, first, has_text)]
    if filled.get("prompt_token_ids") is not None:
        filled["prompt_token_ids"] = first.prompt_token_ids
    if isinstance(usage := filled.get("usage"), dict):
        count = int(has_text)
        filled["usage"] = {
            **usage,
            "prompt_tokens": first.num_prompt_tokens,
            "total_tokens": first.num_prompt_tokens + count,
            "completion_tokens": count,
        }
    return filled


def _filled_choice(
    choice: Mapping[str, Any], first: FirstToken, has_text: bool
) -> Mapping[str, Any]:
    filled = dict(choice)
    holder, name = text_of(choice)
    if not has_text:
        if holder.get("role") is not None:
            filled["delta"] = {**holder, "role": first.role}
        return filled
    if holder is choice:
        filled[name] = first.text
    else:
        filled["delta"] = {**holder, name: first.text}
    if filled.get("token_ids") is not None:
        filled["token_ids"] = [first.token]
    if filled.get("prompt_token_ids") is not None:
        filled["prompt_token_ids"] = first.prompt_token_ids
    return filled


class Forms:
    """What one decode engine's streams look like, by kind.

    is_refuted: the engine has answered with another token than was sent; no form of it counts
    until it was away, and perhaps is another engine.
    """

    def __init__(self) -> None:
        self._forms: OrderedDict[str, Form] = OrderedDict()
        self._num_refusals: OrderedDict[str, int] = OrderedDict()
        self.is_refuted = False

    def get(self, kind: str) -> Form | None:
        """The form of streams of *kind*, if it is known."""
        return self._forms.get(kind)

    def note(self, kind: str, form: Form) -> None:
        """Remember a form; the oldest one makes room."""
        if self.is_refused(kind):
            return
        self._num_refusals.pop(kind, None)
        self._forms[kind] = form
        if len(self._forms) > MAX_FORMS:
            self._forms.popitem(last=False)

    def refuse(self, kind: str) -> None:
        """The engine has failed a request of *kind* that was to begin with a token that it was
        given. If that is no accident, it does so again; then the form counts no more."""
        self._num_refusals[kind] = self._num_refusals.pop(kind, 0) + 1
        if self.is_refused(kind):
            self._forms.pop(kind, None)
        if len(self._num_refusals) > MAX_FORMS:
            self._num_refusals.popitem(last=False)

    def is_refused(self, kind: str) -> bool:
        """Whether the engine begins streams of *kind* with tokens of its own."""
        return self.is_refuted or self._num_refusals.get(kind, 0) >= MAX_REFUSALS

    def refute(self) -> None:
        """No form counts any more."""
        self._forms.clear()
        self.is_refuted = True

    def clear(self) -> None:
        """The engine is away: what comes back may be another."""
        self._forms.clear()
        self._num_refusals.clear()
        self.is_refuted = False
