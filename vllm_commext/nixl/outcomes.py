"""Outcomes on their way from the transfer thread to the engine's thread."""

import threading
from collections.abc import Callable

from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.requests import Outcomes


class CompletionQueue:
    """Collects outcomes until they are taken; safe for threads.

    Attributes: ``on_first``: called when there is something to take and there was nothing before;
        where it raises, the outcome is taken at the next look.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._outcomes = Outcomes()
        self._log = RateLimitedLog()

    def received(self, request_id: str, *, failed: bool) -> None:
        """A load has ended."""
        self._add(request_id, *(("received", "failed") if failed else ("received",)))

    def late(self, request_id: str) -> None:
        """A load is past its deadline and still under way."""
        self._add(request_id, "late")

    def settled(self, request_id: str) -> None:
        """A formerly late load is under way no longer."""
        self._add(request_id, "settled")

    def sent(self, request_id: str) -> None:
        """A prefill's blocks may be freed."""
        self._add(request_id, "sent")

    def take(self) -> Outcomes:
        """What has ended since the last call."""
        with self._lock:
            taken, self._outcomes = self._outcomes, Outcomes()
        return taken

    def _add(self, request_id: str, *kinds: str) -> None:
        with self._lock:
            is_first = self._outcomes == Outcomes()
            for kind in kinds:
                getattr(self._outcomes, kind).add(request_id)
        if not is_first:
            return
        try:
            self.on_first()
        except Exception as error:  # noqa: BLE001 who reports an outcome has to go on after it
            self._log.warning("ring", f"the engine was not woken up for an outcome: {error!r}")
