"""Which prompts that other engines have computed count here: none from before this engine had its
weights and caches."""

import time
from collections.abc import Iterable

CLOCK_SECONDS = 1.0
"""How far the clocks of two engines' hosts may be apart: what another one has computed by then
after new weights here is not used."""


class Trust:
    """Requests here whose blocks elsewhere, or loads under way, count no more.

    Args:
        lease_seconds: how long prefill engines keep blocks of which they hear nothing.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._void: set[str] = set()
        self._trusted_from = 0
        self._paused_since: float | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id not in self._void

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._paused_since is not None

    def renounce(self, request_ids: Iterable[str]) -> None:
        """Weights or caches have changed: what these requests have elsewhere counts no more."""
        self._trusted_from = int(1000 * (time.time() + CLOCK_SECONDS))
        self._void.update(request_ids)

    def admit(self, request_id: str, computed_at: int) -> bool:
        """Whether what was computed for a new request then, in milliseconds since 1970, counts."""
        if computed_at < self._trusted_from:
            self._void.add(request_id)
        return request_id in self

    def note_pause(self, *, is_paused: bool, request_ids: Iterable[str]) -> bool:
        """Whether the engine is paused, which keeps nothing of these requests elsewhere; whether
        that is new."""
        if is_paused == self.is_paused:
            return False
        now, since = time.monotonic(), self._paused_since
        if since is not None and now - since > self._lease_seconds / 2:
            self._void.update(request_ids)
        self._paused_since = now if is_paused else None
        return True

    def take_void(self, ended: set[str]) -> set[str]:
        """Those of ended loads that count no more."""
        void = self._void & ended
        self._void -= ended
        return void

    def forget(self, request_id: str) -> None:
        """The request has ended, or is computed here."""
        self._void.discard(request_id)
