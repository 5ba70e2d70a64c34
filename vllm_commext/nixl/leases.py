"""The prefill side's record of finished requests whose blocks wait for their readers.

Pure: the caller brings the time.  A request's blocks are free when all its consumers have released
them or its lease has run out, whichever comes first; each request ends exactly once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_EARLY_RELEASES = 4096
"""Releases kept that came before the scheduler said that the request had finished."""


@dataclass
class _Lease:
    deadline: float
    released_by: set[str] = field(default_factory=set)


@dataclass
class LeaseCounts:
    """What happened that a person may want to know; the caller resets it by taking it.

    Attributes:
        expired: requests whose lease ran out.
        unmatched: releases of a request that is unknown or had ended, given up for lack of room or
            after a while.
        repeated: releases by a consumer that had released the request before.
    """

    expired: int = 0
    unmatched: int = 0
    repeated: int = 0


class LeaseLedger:
    """Leases by request id; all times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.counts = LeaseCounts()
        self._leases: dict[str, _Lease] = {}
        self._early: OrderedDict[str, tuple[float, set[str], int]] = OrderedDict()

    def __len__(self) -> int:
        """Requests whose blocks are held."""
        return len(self._leases)

    def hold(self, request_id: str, now: float, duration: float) -> bool:
        """Start a lease; True where its readers were quicker and nothing is left to wait for."""
        early = self._early.pop(request_id, None)
        if early is None:
            self._leases[request_id] = _Lease(deadline=now + duration)
            return False
        _, consumers, num_consumers = early
        if len(consumers) >= num_consumers:
            return True
        self._leases[request_id] = _Lease(deadline=now + duration, released_by=consumers)
        return False

    def release(self, request_id: str, consumer: str, num_consumers: int, now: float) -> bool:
        """Note that one consumer is done; True where it was the last one."""
        lease = self._leases.get(request_id)
        if lease is None:
            self._note_early(request_id, consumer, num_consumers, now)
            return False
        if consumer in lease.released_by:
            self.counts.repeated += 1
            return False
        lease.released_by.add(consumer)
        if len(lease.released_by) < num_consumers:
            return False
        del self._leases[request_id]
        return True

    def expire(self, now: float, early_seconds: float) -> list[str]:
        """End the leases that ran out, and forget early releases older than ``early_seconds``."""
        ended = [name for name, lease in self._leases.items() if lease.deadline <= now]
        for name in ended:
            del self._leases[name]
        self.counts.expired += len(ended)
        while self._early and next(iter(self._early.values()))[0] + early_seconds <= now:
            self._early.popitem(last=False)
            self.counts.unmatched += 1
        return ended

    def take_counts(self) -> LeaseCounts:
        """The counts since the last call."""
        taken, self.counts = self.counts, LeaseCounts()
        return taken

    def _note_early(self, request_id: str, consumer: str, num_consumers: int, now: float) -> None:
        since, consumers, _ = self._early.get(request_id, (now, set[str](), num_consumers))
        if consumer in consumers:
            self.counts.repeated += 1
        consumers.add(consumer)
        self._early[request_id] = (since, consumers, num_consumers)
        if len(self._early) > MAX_EARLY_RELEASES:
            self._early.popitem(last=False)
            self.counts.unmatched += 1
