"""Times of a streamed completion, read off its events in one pass.  Pure."""

import json
import re

_CHOICES = re.compile(rb'"choices":\s*\[\s*\{')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_FIELD = b"data:"
_DONE = b"[DONE]"


class Events:
    """Events of one answer, as its bytes come.

    first, last: instants of the first and the last event with a part of the answer; gap: the
    longest time between two of them; num_tokens: what the server counts, or events with a part
    where it does not; error: what it told of, or empty; done: whether it has ended the stream.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.last = 0.0
        self.gap = 0.0
        self.error = ""
        self.done = False
        self._num_events = 0
        self._counted = 0
        self._held = b""

    @property
    def num_tokens(self) -> int:
        return self._counted or self._num_events

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that came at an instant."""
        *lines, self._held = (self._held + data).split(b"\n")
        num_events = self._num_events
        for line in lines:
            if line.startswith(_FIELD):
                self._take(line)
        if self._num_events == num_events:
            return
        if num_events:
            self.gap = max(self.gap, now - self.last)
        else:
            self.first = now
        self.last = now

    def _take(self, line: bytes) -> None:
        if b'"completion_tokens"' in line and (found := _COMPLETION.search(line)):
            self._counted = int(found[1])
        if _CHOICES.search(line):
            self._num_events += 1
        elif b'"error"' in line:
            self.error = self.error or _message(line[len(_FIELD) :])
        elif line[len(_FIELD) :].strip() == _DONE:
            self.done = True


def _message(text: bytes) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError, RecursionError):
        return text.decode(errors="replace").strip()
