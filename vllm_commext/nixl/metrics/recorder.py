"""Counts and timings of one worker's transfers since they were last taken; safe for threads.

What happens to a request on each rank, its load's failure or its lease's end, is one event: a
worker notes it by request (``Ends``), and the scheduler side counts it once, when the last rank is
done."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

FAILURE_REASONS = (
    "configuration",
    "expired",
    "handshake",
    "internal",
    "request",
    "timeout",
    "transfer",
)
"""Every reason a load or a release can fail for; the label of the failures metric."""
FIRST_TOKENS = "first_tokens"
HANDOVERS = "handovers"
GAUGES = "gauges"


@dataclass
class Ends:
    """What a worker knows of requests that ended otherwise than they should.

    Attributes:
        failed: loads, each with one of ``FAILURE_REASONS``.
        expired: prefilled requests whose lease ran out.
    """

    failed: dict[str, str] = field(default_factory=dict[str, str])
    expired: set[str] = field(default_factory=set[str])

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.failed or self.expired)

    def add(self, other: Ends) -> None:
        """Another worker's or step's; the first reason of a request stays."""
        self.failed = {**other.failed, **self.failed}
        self.expired |= other.expired


def empty_data() -> dict[str, Any]:
    """What a recorder starts from; plain values, so that it can cross processes.

    Keys: those that end in ``_seconds``: one float an event; ``failures``: a sum a reason;
    ``first_tokens``: a sum a ``FirstToken``; ``handovers``: a sum a ``Handover``; ``gauges``: the
    last values of every source (the workers and the scheduler side), or nothing where none has
    changed; the others: sums.
    """
    return {
        "transfer_seconds": [],
        "post_seconds": [],
        "handshake_seconds": [],
        "queue_seconds": [],
        "handover_seconds": [],
        "lease_age_seconds": [],
        "bytes": 0,
        "hidden_bytes": 0,
        "mapped_bytes": 0,
        "blocks": 0,
        "descriptors": 0,
        "merged_descriptors": 0,
        "retries": 0,
        "expired_requests": 0,
        "released_requests": 0,
        "unknown_releases": 0,
        "unmatched_notifications": 0,
        "heartbeats": 0,
        "ignored_heartbeats": 0,
        "side_channel_rejects": 0,
        "reuse_lookups": 0,
        "reuse_blocks": 0,
        "reuse_recomputed_blocks": 0,
        "failures": {},
        FIRST_TOKENS: {},
        HANDOVERS: {},
        GAUGES: {},
    }


def is_empty(data: dict[str, Any]) -> bool:
    """Whether nothing was recorded."""
    return not any(data.values())


def merge(total: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Add one record to another, in place; returns it."""
    for key, value in more.items():
        if key == GAUGES:
            total[key].update(value)
        elif isinstance(value, dict):
            for reason, count in value.items():
                total[key][reason] = total[key].get(reason, 0) + count
        else:
            total[key] = total[key] + value
    return total


class TransferRecorder:
    """Records events from the transfer thread; the engine's thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = empty_data()
        self._ends = Ends()
        self._gauges: dict[str, dict[str, float]] = {}
        self._has_new_gauges = False

    def gauges(self, source: str, values: dict[str, float]) -> None:
        """What stands now at a worker or the scheduler side."""
        with self._lock:
            if self._gauges.get(source) != values:
                self._gauges[source] = values
                self._has_new_gauges = True

    def take_gauges(self) -> dict[str, dict[str, float]]:
        """The last values of every source where one has changed since the last call, else none.

        All of them, since vLLM gives each record to one of its API servers: what that one shows of
        the engine must not lack what another one was given.
        """
        with self._lock:
            taken = dict(self._gauges) if self._has_new_gauges else {}
            self._has_new_gauges = False
        return taken

    def handshake(self, seconds: float) -> None:
        """A peer became ready."""
        with self._lock:
            self._data["handshake_seconds"].append(seconds)

    def transfer(
        self,
        *,
        seconds: float,
        post_seconds: float,
        num_bytes: int,
        num_descriptors: int,
        num_merged: int,
        is_hidden: bool = False,
        is_mapped: bool = False,
    ) -> None:
        """A read ended well; *hidden* where it began before its prompt was computed, *mapped* where
        it went through a mapping of the peer's memory."""
        with self._lock:
            self._data["transfer_seconds"].append(seconds)
            self._data["post_seconds"].append(post_seconds)
            self._data["bytes"] += num_bytes
            self._data["hidden_bytes"] += num_bytes * is_hidden
            self._data["mapped_bytes"] += num_bytes * is_mapped
            self._data["descriptors"] += num_descriptors
            self._data["merged_descriptors"] += num_merged

    def handed_over(self, seconds: float) -> None:
        """A whole prompt's blocks are here, so long after its request has come in."""
        with self._lock:
            self._data["handover_seconds"].append(seconds)

    def loaded(self, num_blocks: int) -> None:
        """A load ended well on all ranks."""
        with self._lock:
            self._data["blocks"] += num_blocks

    def reuse(self, *, lookups: int = 0, blocks: int = 0, recomputed: int = 0) -> None:
        """Other engines are asked for blocks, blocks of theirs were read and proven, or read in
        vain."""
        with self._lock:
            self._data["reuse_lookups"] += lookups
            self._data["reuse_blocks"] += blocks
            self._data["reuse_recomputed_blocks"] += recomputed

    def queued(self, seconds: float) -> None:
        """A read is posted, so long after its load began."""
        with self._lock:
            self._data["queue_seconds"].append(seconds)

    def retry(self) -> None:
        """A read is tried again over a new connection."""
        with self._lock:
            self._data["retries"] += 1

    def lease_ended(self, seconds: float, *, expired: bool) -> None:
        """A request's blocks may be freed on all ranks, so long after its lease began."""
        with self._lock:
            self._data["lease_age_seconds"].append(seconds)
            self._data["expired_requests"] += expired

    def released(self, known: int, named: int) -> None:
        """A router has released the prefills that are known of those that it has named."""
        with self._lock:
            self._data["released_requests"] += known
            self._data["unknown_releases"] += named - known

    def side_channel_rejects(self, count: int) -> None:
        """The side channel refused frames."""
        with self._lock:
            self._data["side_channel_rejects"] += count

    def note_failure(self, request_id: str, reason: str) -> None:
        """A load failed on this worker for one of ``FAILURE_REASONS``."""
        with self._lock:
            self._ends.failed.setdefault(request_id, reason)

    def note_expired(self, request_id: str) -> None:
        """A prefilled request's lease ran out on this worker."""
        with self._lock:
            self._ends.expired.add(request_id)

    def take_ends(self) -> Ends:
        """What was noted since the last call."""
        with self._lock:
            taken, self._ends = self._ends, Ends()
        return taken

    def failure(self, reason: str) -> None:
        """A load failed on some rank for one of ``FAILURE_REASONS``."""
        with self._lock:
            failures = self._data["failures"]
            failures[reason] = failures.get(reason, 0) + 1

    def first_token(self, way: str) -> None:
        """A loading request gets its first token from there, a ``FirstToken``."""
        with self._lock:
            ways = self._data[FIRST_TOKENS]
            ways[str(way)] = ways.get(str(way), 0) + 1

    def stream(self, way: str) -> None:
        """A request is handed over so, a ``Handover``."""
        with self._lock:
            ways = self._data[HANDOVERS]
            ways[str(way)] = ways.get(str(way), 0) + 1

    def leases(
        self, *, unmatched: int = 0, heartbeats: int = 0, ignored_heartbeats: int = 0
    ) -> None:
        """Releases fitted no request, heartbeats extended leases or were ignored."""
        with self._lock:
            self._data["unmatched_notifications"] += unmatched
            self._data["heartbeats"] += heartbeats
            self._data["ignored_heartbeats"] += ignored_heartbeats

    def take(self) -> dict[str, Any] | None:
        """The record since the last call, None where it is empty."""
        with self._lock:
            if is_empty(self._data):
                return None
            taken, self._data = self._data, empty_data()
        return taken
