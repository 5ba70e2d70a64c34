"""The prefill side's record of finished requests whose blocks wait for their readers.

A request's blocks are free when all its consumers have released them or its lease has run out,
whichever comes first.  A reader's heartbeat renews the lease, up to a greatest age.
"""

import math
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import CompletionQueue, Hold
from vllm_commext.nixl.stream.progress import WorkerTables
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire.messages import Released, decode_notification, short_id

MAX_EARLY_RELEASES = 4096
"""Releases kept that came before the scheduler said that the request had finished."""
MAX_EARLY_CONSUMERS = 16384  # consumers kept of all of them


@dataclass
class _Lease:
    begun: float
    duration: float
    deadline: float
    released_by: set[str] = field(default_factory=set)


class LeaseLedger:
    """Leases by request id; all times are of one monotonic clock, in seconds.

    Attributes:
        counts: by ``recorder.COUNTERS``, since they were last taken: releases of an unknown or
            ended request that were given up for lack of room or time, and heartbeats.
    """

    def __init__(self, max_age: float = math.inf) -> None:
        self.counts = Counter[str]()
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
        is_new = consumer not in lease.released_by
        lease.released_by.add(consumer)
        if not is_new or len(lease.released_by) < num_consumers:
            return False
        del self._leases[request_id]
        return True

    def drop(self, request_id: str) -> bool:
        return self._leases.pop(request_id, None) is not None

    def extend(self, request_id: str, consumer: str, now: float) -> bool:
        """Renew a lease for a reader that has not released it."""
        lease = self._leases.get(request_id)
        if lease is None or consumer in lease.released_by:
            self.counts["ignored_heartbeats"] += 1
            return False
        latest = lease.begun + self._max_age
        lease.deadline = max(lease.deadline, min(now + lease.duration, latest))
        self.counts["heartbeats"] += 1
        return True

    def expire(self, now: float, early_seconds: float) -> dict[str, float]:
        """End the leases that ran out, and forget early releases older than ``early_seconds``.

        Returns the seconds that each of those leases has lasted, by request id.
        """
        ended = self._take_ended(now) if self._next_end <= now else {}
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

    def take_counts(self) -> Counter[str]:
        taken, self.counts = self.counts, Counter[str]()
        return taken

    def _note_early(self, request_id: str, consumer: str, num_consumers: int, now: float) -> None:
        since, consumers, _ = self._early.get(request_id, (now, set[str](), num_consumers))
        self._num_early_consumers += consumer not in consumers
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
        self.counts["unmatched_notifications"] += 1


EARLY_RELEASE_SECONDS = 60.0
"""How long a release may come before the scheduler's word that the request has finished."""


class LeaseManager:
    """Keeps one worker's finished prefills.  Owned by one thread."""

    def __init__(
        self,
        agent: NixlAgent,
        tables: WorkerTables,
        config: ConnectorConfig,
        recorder: TransferRecorder,
        outcomes: CompletionQueue,
    ) -> None:
        self._agent = agent
        self._tables = tables
        self._config = config
        self._recorder = recorder
        self._outcomes = outcomes
        # By what notifications call the requests.
        self._leases = LeaseLedger(config.kv_lease_max_duration)
        self._holds: dict[str, Hold] = {}
        self._expired: set[str] = set()
        # Ended, and not reported yet: an error in the midst of that must not keep their blocks.
        self._unsent: list[str] = []
        self._log = RateLimitedLog()

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, hold: Hold) -> None:
        name = short_id(hold.request_id)
        self._holds[name] = hold
        is_read = hold.lease_seconds > 0
        now = time.monotonic()
        if not is_read or self._leases.hold(name, now, hold.lease_seconds):
            self._report_sent(name)

    def release(self, request_id: str) -> None:
        if self._leases.drop(request_id):
            self._report_sent(request_id)

    def take_notifications(self) -> None:
        """Take in readers' notifications; one that fails is lost alone."""
        now = time.monotonic()
        for message in self._agent.notifications():
            try:
                self._take(message, now)
            except Exception:  # noqa: BLE001 one message's error is no other's
                self._log.exception(
                    "take", "a NIXL notification was lost; the lease frees the blocks"
                )

    def _take(self, message: bytes, now: float) -> None:
        try:
            notification = decode_notification(message)
        except ProtocolError as error:
            self._recorder.count(unmatched_notifications=1)
            self._log.warning("notification", f"ignored a NIXL notification: {error}")
            return
        if isinstance(notification, Released):
            self._release(notification, now)
        else:
            for request_id in notification.request_ids:
                self._leases.extend(request_id, notification.consumer, now)

    def _release(self, released: Released, now: float) -> None:
        request_id = released.request_id
        if self._leases.release(request_id, released.consumer, released.num_consumers, now):
            self._report_sent(request_id)

    def end_leases(self) -> None:
        self._report_unsent()
        ended = self._leases.expire(time.monotonic(), EARLY_RELEASE_SECONDS)
        for request_id, seconds in ended.items():
            self._expired.add(request_id)
            self._report_sent(request_id)
            self._log.warning(
                "lease",
                f"request {request_id}: its blocks were kept for {seconds:.3g} s and not read by "
                "all consumers; freed. Was the decode request sent, and is its engine up?",
            )
        self._recorder.count(**self._leases.take_counts())

    def _report_sent(self, request_id: str) -> None:
        self._unsent.append(request_id)
        self._report_unsent()

    def _report_unsent(self) -> None:
        for name in list(self._unsent):
            hold = self._holds[name]
            try:
                self._tables.end(hold)
            except Exception:  # noqa: BLE001 one request's error is no other's
                self._log.exception("report", f"request {name}: its fence was not changed yet")
                continue
            self._unsent.remove(name)
            del self._holds[name]
            kinds = ("sent", "expired") if name in self._expired else ("sent",)
            self._expired.discard(name)
            self._outcomes.note(hold.request_id, *kinds)
