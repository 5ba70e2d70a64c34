"""Sends prefill workers the heartbeats of requests that wait here or are being read."""

from __future__ import annotations

import itertools
import time

from vllm_commext.errors import CommextError
from vllm_commext.nixl.decode.heartbeats import Heartbeats, PeerKey, batches, interval_of
from vllm_commext.nixl.decode.loads import Part
from vllm_commext.nixl.decode.peer import Peer, peer_key
from vllm_commext.nixl.decode.peers import PeerTable
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire

RETRY_SECONDS = 0.1
"""Until a peer that is not ready is looked at again."""


class KeepAlive:
    """Keeps requests alive at the prefill workers that hold them.  Owned by one thread.

    Args:
        agent: whose notifications are sent.
        consumer: this reader, as in its releases.
        peers: the known prefill workers.
    """

    def __init__(self, agent: NixlAgent, consumer: str, peers: PeerTable) -> None:
        self._agent = agent
        self._consumer = consumer
        self._peers = peers
        self._heartbeats = Heartbeats()
        self._sequence = itertools.count(1)

    def __len__(self) -> int:
        """Pairs of a request and a prefill worker that keeps blocks for it."""
        return len(self._heartbeats)

    def begin_wait(self, part: Part) -> None:
        """A request waits for its load: its lease may have begun long ago."""
        self._watch(part, time.monotonic())

    def begin_load(self, part: Part) -> None:
        """A part is about to be read; most parts have ended before the first heartbeat is due."""
        peer = self._peers.find(peer_key(part))
        self._watch(part, time.monotonic() + (_interval(peer) if peer else RETRY_SECONDS))

    def end(self, part: Part) -> None:
        """A part has ended."""
        self._heartbeats.drop(part.load.request_id, peer_key(part))

    def end_wait(self, request_id: str) -> None:
        """A request waits no longer."""
        self._heartbeats.drop_everywhere(request_id)

    def send_due(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        for key in self._heartbeats.due(now):
            peer = self._ready(key)
            if peer is None:
                self._heartbeats.take(key, now + RETRY_SECONDS)
            else:
                self._send(peer, self._heartbeats.take(key, now + _interval(peer)))

    def _watch(self, part: Part, due: float) -> None:
        remote_id = part.remote.request_id
        self._heartbeats.watch(part.load.request_id, peer_key(part), remote_id, due)

    def _ready(self, key: PeerKey) -> Peer | None:
        try:
            self._peers.prepare(key)
        except CommextError:
            return None  # the load will fail with the reason
        return self._peers.find(key)

    def _send(self, peer: Peer, request_ids: list[str]) -> None:
        if not peer.lease_seconds:
            return
        try:
            for batch in batches(request_ids):
                message = wire.KeepAlive(
                    consumer=self._consumer,
                    sender=self._agent.name,
                    sequence=next(self._sequence),
                    request_ids=batch,
                )
                self._agent.notify(peer.agent_name, wire.encode(message))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer is asked anew
            logger.info("prefill engine %s takes no heartbeats: %s", peer.key, error)
            self._peers.doubt(peer, broken=True)


def _interval(peer: Peer) -> float:
    return interval_of(peer.lease_seconds) or RETRY_SECONDS
