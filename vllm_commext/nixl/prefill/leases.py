"""The prefill side's record of finished requests whose blocks wait for their readers.

Pure: the caller brings the time, which is the prefill worker's own.  A request's blocks are free
when all its consumers have released them or its lease has run out, whichever comes first; each
request ends exactly once.  A reader's heartbeat begins the lease anew, up to a greatest age.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_EARLY_RELEASES = 4096
"""Releases kept that came before the scheduler said that the request had finished."""
MAX_EARLY_CONSUMERS = 16384
"""Consumers kept of all of them."""
MAX_SENDERS = 64
"""Senders of heartbeats known for one request; further ones are ignored."""


@dataclass
class _Lease:
    begun: float
    duration: float
    deadline: float
    released_by: set[str] = field(default_factory=set)
    last_beats: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    """Where a heartbeat comes from.

    Attributes:
        sender: differs at every start of the reader.
        sequence: grows with each heartbeat of the sender.
    """

    consumer: str
    sender: str
    sequence: int


@dataclass
class LeaseCounts:
    """Counts since they were last taken.

    Attributes:
        unmatched: releases of an unknown or ended request, given up for lack of room or time.
        repeated: releases by a consumer that had released the request before.
        ignored_beats: heartbeats of an unknown or ended request, repeated or out of order, or of a
            consumer that had released the request.
    """

    expired: int = 0
    unmatched: int = 0
    repeated: int = 0
    extended: int = 0
    ignored_beats: int = 0

    def __bool__(self) -> bool:
        return any(vars(self).values())


class LeaseLedger:
    """Leases by request id; all times are of one monotonic clock, in seconds.

    Args:
        max_age: no lease is extended beyond this many seconds after its beginning.
    """

    def __init__(self, max_age: float = math.inf) -> None:
        self.counts = LeaseCounts()
        self._max_age = max_age
        self._leases: dict[str, _Lease] = {}
        self._early: OrderedDict[str, tuple[float, set[str], int]] = OrderedDict()
        self._num_early_consumers = 0
        # No lease ends before this; the leases are looked through only then.
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, request_id: str, now: float, duration: float) -> bool:
        """Start a lease; True where its readers were quicker and nothing is left to wait for."""
        lease = _Lease(now, duration, deadline=now + duration)
        if request_id in self._early:
            lease.released_by, num_consumers = self._take_early(request_id)
            if len(lease.released_by) >= num_consumers:
                return True
        self._leases[request_id] = lease
        self._next_end = min(self._next_end, lease.deadline)
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

    def drop(self, request_id: str) -> bool:
        """End a lease, whoever has not released it; False where there is none."""
        return self._leases.pop(request_id, None) is not None

    def extend(self, request_id: str, beat: Beat, now: float) -> bool:
        """Begin a lease anew; False where the heartbeat is to be ignored."""
        lease = self._leases.get(request_id)
        if lease is None or not self._is_new(lease, beat):
            self.counts.ignored_beats += 1
            return False
        lease.last_beats[beat.sender] = beat.sequence
        latest = lease.begun + self._max_age
        lease.deadline = max(lease.deadline, min(now + lease.duration, latest))
        self.counts.extended += 1
        return True

    @staticmethod
    def _is_new(lease: _Lease, beat: Beat) -> bool:
        last = lease.last_beats.get(beat.sender)
        if last is None and len(lease.last_beats) >= MAX_SENDERS:
            return False
        return beat.consumer not in lease.released_by and (last is None or beat.sequence > last)

    def expire(self, now: float, early_seconds: float) -> dict[str, float]:
        """End the leases that ran out, and forget early releases older than ``early_seconds``.

        Returns the seconds that each of those leases has lasted, by request id.
        """
        ended = self._take_ended(now) if self._next_end <= now else {}
        self.counts.expired += len(ended)
        while self._early and next(iter(self._early.values()))[0] + early_seconds <= now:
            self._forget_early()
        return ended

    def _take_ended(self, now: float) -> dict[str, float]:
        ended = {
            name: now - lease.begun for name, lease in self._leases.items() if lease.deadline <= now
        }
        for name in ended:
            del self._leases[name]
        self._next_end = min((lease.deadline for lease in self._leases.values()), default=math.inf)
        return ended

    def take_counts(self) -> LeaseCounts:
        taken, self.counts = self.counts, LeaseCounts()
        return taken

    def _note_early(self, request_id: str, consumer: str, num_consumers: int, now: float) -> None:
        since, consumers, _ = self._early.get(request_id, (now, set[str](), num_consumers))
        if consumer in consumers:
            self.counts.repeated += 1
        else:
            self._num_early_consumers += 1
            consumers.add(consumer)
        self._early[request_id] = (since, consumers, num_consumers)
        while (
            len(self._early) > MAX_EARLY_RELEASES or self._num_early_consumers > MAX_EARLY_CONSUMERS
        ):
            self._forget_early()

    def _take_early(self, request_id: str) -> tuple[set[str], int]:
        _, consumers, num_consumers = self._early.pop(request_id)
        self._num_early_consumers -= len(consumers)
        return consumers, num_consumers

    def _forget_early(self) -> None:
        self._take_early(next(iter(self._early)))
        self.counts.unmatched += 1
