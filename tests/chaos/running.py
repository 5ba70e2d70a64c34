"""Streams that run at a decode engine when it is lost, and what becomes of each, by their clients'
account."""

from __future__ import annotations

import threading
from collections import Counter


class Running:
    """Where streams run.

    Attributes:
        lost: those that had begun at an engine when it was lost, by how they ended.
    """

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        self._at: dict[int, str] = {}
        self._has_lost: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, client: int, engine: str) -> None:
        """A client's stream has begun at an engine."""
        with self._lock:
            self._at[client] = engine

    def end(self, client: int, how: str) -> None:
        with self._lock:
            self._at.pop(client, None)
            if client in self._has_lost:
                self._has_lost.discard(client)
                self.lost[how] += 1

    def leave(self, engine: str, other: str, *, lost: bool) -> int:
        """All streams at an engine go on at the other one, because it is lost or drains; how many
        they are."""
        with self._lock:
            leaving = {client for client, at in self._at.items() if at == engine}
            self._at.update(dict.fromkeys(leaving, other))
            if lost:
                self._has_lost |= leaving
            return len(leaving)
