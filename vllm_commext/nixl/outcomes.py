"""Outcomes on their way from the transfer thread to the engine's thread."""

from __future__ import annotations

import threading

from vllm_commext.nixl.requests import Outcomes


class OutcomeBox:
    """Collects outcomes until they are taken; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes = Outcomes()

    def received(self, request_id: str, *, failed: bool) -> None:
        """A load has ended."""
        with self._lock:
            self._outcomes.received.add(request_id)
            if failed:
                self._outcomes.failed.add(request_id)

    def late(self, request_id: str) -> None:
        """A load is past its deadline and still under way."""
        with self._lock:
            self._outcomes.late.add(request_id)

    def settled(self, request_id: str) -> None:
        """A formerly late load is under way no longer."""
        with self._lock:
            self._outcomes.settled.add(request_id)

    def sent(self, request_id: str) -> None:
        """A prefill's blocks may be freed."""
        with self._lock:
            self._outcomes.sent.add(request_id)

    def take(self) -> Outcomes:
        """What has ended since the last call."""
        with self._lock:
            taken, self._outcomes = self._outcomes, Outcomes()
        return taken
