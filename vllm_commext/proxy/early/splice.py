"""A decode engine's stream without the events that the client has already. Pure.

vLLM may write several tokens into one event, so what was sent is taken away by its text: of the
first event that has any, the rest goes on, or nothing if nothing is left.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_commext.proxy.early.form import NotAnEventError, read_event, text_of, write_event
from vllm_commext.proxy.early.rule import only_choice

_END = b"\n\n"


class FirstTokenDiffersError(Exception):
    """A decode engine's stream does not begin with what the client has. Says nothing of either
    text, which belongs into no log."""


class Splice:
    """Takes *sent* off the beginning of one stream.

    is_done: the stream has begun as it should; all that follows passes, under the time at which
    the client was told that its answer was created.
    """

    def __init__(self, sent: Sequence[Mapping[str, Any]]) -> None:
        self._awaited = list(sent)
        self._created: tuple[bytes, bytes] | None = None
        self.is_done = False

    def feed(self, events: bytes) -> bytes:
        """What of whole *events* goes to the client. Raises `FirstTokenDiffersError`."""
        ready = b""
        while events and not self.is_done:
            event, end, events = events.partition(_END)
            ready += self._begin(event, end)
        return ready + self._under_our_time(events)

    def end(self) -> None:
        """The stream has ended. Raises `FirstTokenDiffersError` if it had not begun."""
        if not self.is_done:
            raise FirstTokenDiffersError("it ended before its first token")

    def _begin(self, event: bytes, end: bytes) -> bytes:
        """What is left of one of the first events."""
        try:
            came = read_event(event)
        except NotAnEventError as error:
            raise FirstTokenDiffersError("its first event is no JSON object") from error
        if "error" in came:
            self.is_done = True
            return event + end
        sent = self._awaited.pop(0)
        self._note_created(came.get("created"), sent.get("created"))
        came["created"] = sent.get("created")
        self.is_done = not self._awaited
        if came == sent:
            return b""
        if not self.is_done:
            raise FirstTokenDiffersError("its first event is another")
        return write_event(_without(came, sent))

    def _note_created(self, theirs: Any, ours: Any) -> None:
        if not isinstance(theirs, int):
            raise FirstTokenDiffersError("its first event has no time")
        if theirs != ours:
            # Neither can be part of a text, where quotes are escaped.
            self._created = b'"created":%d,' % theirs, b'"created":%d,' % ours

    def _under_our_time(self, events: bytes) -> bytes:
        return events.replace(*self._created) if self._created and events else events


def _without(came: dict[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """An event of several tokens, or of an answer's end, without the token that was *sent*."""
    theirs, ours = only_choice(came), only_choice(sent)
    if theirs is None or ours is None or any(came.get(key) != sent[key] for key in ("id", "model")):
        raise FirstTokenDiffersError("its first event is another")
    (holder, name), (sent_holder, sent_name) = text_of(theirs), text_of(ours)
    text, first = holder.get(name), sent_holder[sent_name]
    if name != sent_name or not isinstance(text, str) or not text.startswith(first):
        raise FirstTokenDiffersError("its text begins otherwise")
    rest: dict[str, Any] = {**theirs, name: text[len(first) :]}
    if holder is not theirs:
        rest = {**theirs, "delta": {**holder, name: text[len(first) :]}}
    if ours.get("token_ids") is not None:
        tokens, sent_tokens = theirs.get("token_ids"), ours["token_ids"]
        if not isinstance(tokens, list) or tokens[: len(sent_tokens)] != sent_tokens:
            raise FirstTokenDiffersError("its token ids begin otherwise")
        rest["token_ids"] = tokens[len(sent_tokens) :]
    if ours.get("prompt_token_ids") is not None:
        rest["prompt_token_ids"] = None
    return {**came, "choices": [rest]}
