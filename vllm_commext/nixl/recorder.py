"""The connector's metrics: counts and timings of a worker since they were taken; thread-safe."""

from __future__ import annotations

import threading
from typing import Any

FAILURE_REASONS = (
    *("configuration", "expired", "handshake", "internal", "request", "timeout", "transfer"),
)
"""Every reason a load or a release can fail for; the label of the failures metric."""
FAILURES = "failures"
FIRST_TOKENS = "first_tokens"
HANDOVERS = "handovers"
GAUGES = "gauges"
STREAMS = "streams"
HISTOGRAM, COUNTER, GAUGE = "histogram", "counter", "gauge"
METRICS = {
    HISTOGRAM: {
        "transfer_seconds": "Time from posting a read of KV blocks to its end.",
        "post_seconds": "Time to describe and post a read of KV blocks.",
        "handshake_seconds": "Time from asking a new prefill engine to its answer.",
        "queue_seconds": "Time from KV load start to posting the read, handshake included.",
        "handover_seconds": "Time from request arrival at the decode engine to KV blocks ready "
        "(whole-prompt transfers).",
        "lease_age_seconds": "Age of a request's lease when its readers released it or it ran out.",
    },
    COUNTER: {
        "bytes": "Bytes of KV cache read from prefill engines.",
        "hidden_bytes": "KV bytes whose read started before the prompt was computed.",
        "mapped_bytes": "KV bytes read through CUDA IPC mappings instead of NIXL.",
        "blocks": "Blocks of this engine's KV cache that were read from prefill engines.",
        "descriptors": "Descriptors of the reads, before NIXL merges neighbours.",
        "retries": "Reads that were tried again over a new connection.",
        "expired_requests": "Prefilled requests whose lease expired before the blocks were read.",
        "released_requests": "Prefilled requests that a router released unread.",
        "unknown_releases": "Releases by a router of prefills that are not known, or no more.",
        "unmatched_notifications": "Notifications that fitted no request or were not valid.",
        "heartbeats": "Leases of prefilled requests that a decode engine's heartbeat extended.",
        "ignored_heartbeats": "Heartbeats that fitted no lease.",
        "side_channel_rejects": "Frames that the side channel refused.",
        "reuse_lookups": "Requests for which other engines were asked which blocks they have.",
        "reuse_blocks": "Blocks that other engines had on offer, read and proven.",
        "reuse_recomputed_blocks": "Blocks on offer that were overwritten or lost, and recomputed.",
        FAILURES: "Loads of KV blocks that failed.",
        FIRST_TOKENS: "Requests with a remote prefill, by where their first token comes from.",
        HANDOVERS: "Requests that are handed over, by chunks or whole, by why.",
    },
    GAUGE: {
        "transfers_in_flight": "Reads of KV blocks under way.",
        "held_requests": "Prefilled requests whose blocks wait for their readers.",
        "quarantined_blocks": "Blocks kept out of use as a late read may still write to them.",
        STREAMS: "1 where prompts are read while they are computed, 0 where this model's are not, "
        "which is known from the first step on.",
        "peers": "Prefill workers that this engine's workers know, by state.",
        "info": "Side channels, and whether prompts are read while they are computed (streams), "
        "blocks are on offer (reuse) and prefills are known by keys (releases); always 1.",
    },
}
"""Each metric's help, by kind and name."""
LABELS = {
    FAILURES: ("reason",),
    FIRST_TOKENS: ("way",),
    HANDOVERS: ("way",),
    "peers": ("state",),
    "info": ("host", "port", "seal", STREAMS, "reuse", "releases"),
}
"""Labels beside vLLM's."""


def empty_data() -> dict[str, Any]:
    """A record of nothing; plain values, so that it can cross processes.

    Of a histogram one float an event; of a counter a sum, or one by the value of its label;
    ``gauges``: the last values of every source (the workers and the scheduler side), or nothing
    where none has changed.
    """
    seconds = {name: list[float]() for name in METRICS[HISTOGRAM]}
    counts = {name: {} if name in LABELS else 0 for name in METRICS[COUNTER]}
    return {**seconds, **counts, GAUGES: {}}


def is_empty(data: dict[str, Any]) -> bool:
    return not any(data.values())


def merge(total: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
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
        self._gauges: dict[str, dict[str, float]] = {}
        self._has_new_gauges = False

    def gauges(self, source: str, values: dict[str, float]) -> None:
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

    def observe(self, **seconds: float) -> None:
        with self._lock:
            for name, value in seconds.items():
                self._data[name].append(value)

    def count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                self._data[name] += number

    def count_reason(self, name: str, reason: str) -> None:
        with self._lock:
            counts = self._data[name]
            counts[str(reason)] = counts.get(str(reason), 0) + 1

    def take(self) -> dict[str, Any] | None:
        with self._lock:
            if is_empty(self._data):
                return None
            taken, self._data = self._data, empty_data()
        return taken
