"""Log lines that cannot flood the log."""

import logging
import sys
import time
from collections import deque
from typing import Any


def on_one_line(text: str) -> str:
    """Escape what cannot be printed: a peer's names and errors must not look like lines of this
    process, or break a handler."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


class RateLimitedLog:
    """Warnings, at most ``burst`` a period for each key; the next one tells how many were left out.
    Each is one line, whatever a peer's text in it holds. Keys are names in the code, never text
    from the network.
    """

    def __init__(
        self, logger: logging.Logger, prefix: str = "", burst: int = 5, period_seconds: float = 10.0
    ) -> None:
        self._logger, self._prefix = logger, prefix
        self._burst, self._period_seconds = burst, period_seconds
        self._recent: dict[str, deque[float]] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, key: str, message: str) -> None:
        """Log the message unless enough of the same key were logged within the period."""
        self._log(logging.WARNING, key, message)

    def exception(self, key: str, message: str) -> None:
        """Log the message as an error with the trace of the exception that is being handled."""
        self._log(logging.ERROR, key, message, exc_info=sys.exc_info())

    def _log(self, level: int, key: str, message: str, **more: Any) -> None:
        suffix = self._suffix(key)
        if suffix is not None:
            said = (self._prefix, on_one_line(message), suffix)
            self._logger.log(level, "%s%s%s", *said, stacklevel=3, **more)

    def _suffix(self, key: str) -> str | None:
        """The words about messages left out before this one; None to leave it out too."""
        now = time.monotonic()
        recent = self._recent.setdefault(key, deque(maxlen=self._burst))
        if len(recent) == self._burst and now - recent[0] < self._period_seconds:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return None
        recent.append(now)
        left_out = self._left_out.pop(key, 0)
        return f" ({left_out} more like this were left out)" if left_out else ""
