"""Which prompts that other engines have computed count here: none from before this engine had its
weights and caches."""

import time

CLOCK_SECONDS = 1.0
"""How far the clocks of two engines' hosts may be apart: what another one has computed by then
after new weights here is not used."""


class Trust:
    """Since when what other engines compute counts, and whether they still keep it.

    Args:
        lease_seconds: how long prefill engines keep blocks of which they hear nothing.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._trusted_from = 0
        self._paused_since: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._paused_since is not None

    def renounce(self) -> None:
        """Weights or caches have changed: what was computed before counts no more."""
        self._trusted_from = int(1000 * (time.time() + CLOCK_SECONDS))

    def admits(self, computed_at: int) -> bool:
        """Whether what was computed then, in milliseconds since 1970, counts."""
        return computed_at >= self._trusted_from

    def pause(self) -> None:
        """The engine is paused, and has nothing kept for it."""
        self._paused_since = time.monotonic()

    def resume(self) -> bool:
        """The pause is over; whether other engines still keep what they kept before it."""
        since, self._paused_since = self._paused_since, None
        return since is None or time.monotonic() - since <= self._lease_seconds / 2
