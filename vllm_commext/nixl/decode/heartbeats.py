"""The decode side's record of requests whose blocks prefill workers must keep: they wait here, or
are being read.

Pure: the caller brings the time and sends what is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

PARTS_OF_LEASE = 6
"""Heartbeats within one lease."""
MAX_IDS = 256
MAX_IDS_BYTES = 32 * 1024
"""Request ids in one message: their number, and their bytes."""

PeerKey = tuple[str, str, int, int]
"""A prefill worker: engine id, host and port of its side channel, rank."""


def interval_of(lease_seconds: float) -> float:
    """Seconds between two heartbeats to a peer that keeps blocks for ``lease_seconds``."""
    return lease_seconds / PARTS_OF_LEASE


def batches(request_ids: Iterable[str]) -> Iterator[list[str]]:
    """The ids in messages of bounded length, each id once."""
    batch: list[str] = []
    num_bytes = 0
    for request_id in dict.fromkeys(request_ids):
        size = len(request_id.encode())
        if batch and (len(batch) == MAX_IDS or num_bytes + size > MAX_IDS_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(request_id)
        num_bytes += size
    if batch:
        yield batch


def can_be_sent(request_id: str) -> bool:
    """Whether an id, which a router may have made up, fits a message."""
    try:
        return len(request_id.encode()) <= MAX_IDS_BYTES
    except UnicodeEncodeError:
        return False


class Heartbeats:
    """Watched requests by peer, and when each peer is to hear of its own next."""

    def __init__(self) -> None:
        self._watched: dict[PeerKey, dict[str, str]] = {}
        self._next: dict[PeerKey, float] = {}

    def __len__(self) -> int:
        """Pairs of a request and a peer that keeps blocks for it."""
        return sum(map(len, self._watched.values()))

    def watch(self, request_id: str, peer: PeerKey, remote_id: str, due: float) -> None:
        """Keep a request alive at a peer, where it is called ``remote_id``, from ``due`` on."""
        if not can_be_sent(remote_id):
            return
        self._watched.setdefault(peer, {})[request_id] = remote_id
        self._next[peer] = min(self._next.get(peer, due), due)

    def drop(self, request_id: str, peer: PeerKey) -> None:
        """The peer need not keep the request any more."""
        watched = self._watched.get(peer, {})
        watched.pop(request_id, None)
        if not watched:
            self._watched.pop(peer, None)
            self._next.pop(peer, None)

    def drop_everywhere(self, request_id: str) -> None:
        """No peer need keep the request any more."""
        for peer in list(self._watched):
            self.drop(request_id, peer)

    def due(self, now: float) -> list[PeerKey]:
        """Peers that are to hear of their requests."""
        return [peer for peer, when in self._next.items() if when <= now]

    def take(self, peer: PeerKey, next_due: float) -> list[str]:
        """What the peer calls its requests; it is due again at ``next_due``."""
        self._next[peer] = next_due
        return list(self._watched[peer].values())
