"""Heartbeats to prefill workers that must keep the blocks of requests that wait here, or are being
read: ``Heartbeats`` says which are due, and ``KeepAlive`` sends them."""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator

from vllm_commext.errors import CommextError
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.decode.peers import PeerTable
from vllm_commext.nixl.decode.transfers import Use
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.requests import PeerKey
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.messages import short_id

PARTS_OF_LEASE = 6
"""Heartbeats within one lease."""
RETRY_SECONDS = 0.1
"""Until a peer that is not ready is looked at again."""
MAX_IDS = 256
MAX_IDS_BYTES = 32 * 1024
"""Request ids in one message: their number, and their bytes."""


def interval_of(lease_seconds: float) -> float:
    """Seconds between two heartbeats to a peer that keeps blocks for ``lease_seconds``."""
    return lease_seconds / PARTS_OF_LEASE


def batches(request_ids: Iterable[str]) -> Iterator[list[str]]:
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
    """A router may have made the id up."""
    try:
        return len(request_id.encode()) <= MAX_IDS_BYTES
    except UnicodeEncodeError:
        return False


class Heartbeats:
    """Watched requests by peer, and when each peer is to hear of its own next.

    Pure: the caller brings the time.
    """

    def __init__(self) -> None:
        self._watched: dict[PeerKey, dict[str, str]] = {}
        self._next: dict[PeerKey, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._watched.values()))

    def watch(self, request_id: str, peer: PeerKey, remote_id: str, due: float) -> None:
        """Keep a request alive at a peer, where it is called ``remote_id``, from ``due`` on."""
        if not can_be_sent(remote_id):
            return
        self._watched.setdefault(peer, {})[request_id] = remote_id
        self._next[peer] = min(self._next.get(peer, due), due)

    def drop(self, request_id: str, peer: PeerKey) -> None:
        watched = self._watched.get(peer, {})
        watched.pop(request_id, None)
        if not watched:
            self._watched.pop(peer, None)
            self._next.pop(peer, None)

    def drop_everywhere(self, request_id: str) -> None:
        for peer in list(self._watched):
            self.drop(request_id, peer)

    def due(self, now: float) -> list[PeerKey]:
        return [peer for peer, when in self._next.items() if when <= now]

    def take(self, peer: PeerKey, next_due: float) -> list[str]:
        """The peer's ids of its requests; it is due again at ``next_due``."""
        self._next[peer] = next_due
        return list(self._watched[peer].values())


class KeepAlive:
    """Keeps requests alive at the prefill workers that hold them.  Owned by one thread."""

    def __init__(self, agent: NixlAgent, consumer: str, peers: PeerTable) -> None:
        self._agent = agent
        self._consumer = short_id(consumer)
        self._peers = peers
        self.watched = Heartbeats()
        self._sequence = itertools.count(1)
        self.is_on = True

    def watch(self, use: Use) -> None:
        """A request waits for its load, so its lease may have begun long ago, or is about to be
        read, which most often has ended before the first heartbeat is due."""
        if not use.transfer.remote.is_kept:
            return
        now = time.monotonic()
        remote_id = short_id(use.transfer.remote.request_id)
        for worker in use.workers:
            key = use.transfer.sources[worker].key
            link = self._peers.find(key) if use.load is not None else None
            delay = 0.0 if use.load is None else _interval(link)
            self.watched.watch(use.request_id, key, remote_id, now + delay)

    def send_due(self) -> None:
        if not self.is_on:
            return
        now = time.monotonic()
        for key in self.watched.due(now):
            link = self._ready(key)
            request_ids = self.watched.take(key, now + _interval(link))
            if link is not None and link.lease_seconds:
                self._send(link, request_ids)

    def _ready(self, key: PeerKey) -> Link | None:
        with contextlib.suppress(CommextError):  # else the load will fail with the reason
            self._peers.prepare(key)
        return self._peers.find(key)

    def _send(self, link: Link, request_ids: list[str]) -> None:
        try:
            for batch in batches(request_ids):
                message = wire.KeepAlive(
                    consumer=self._consumer,
                    sender=self._agent.name,
                    sequence=next(self._sequence),
                    request_ids=batch,
                )
                self._agent.notify(link.agent_name, wire.encode(message))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer is asked anew
            logger.info("prefill engine %s takes no heartbeats: %s", link.key, error)
            self._peers.doubt(link, broken=True)


def _interval(link: Link | None) -> float:
    return (interval_of(link.lease_seconds) if link is not None else 0.0) or RETRY_SECONDS
