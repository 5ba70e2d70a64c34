"""The prefill workers that a decode worker knows: each asked once, checked, and kept until it is
lost, restarted, or not needed for long."""

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import Link, Links, LocalWorker, log_ready
from vllm_commext.nixl.decode.reads import Sweeper, num_descriptors
from vllm_commext.nixl.decode.transfers import RemotePrefill, ShardRead, SourceWorker, Use
from vllm_commext.nixl.geometry.plan import plan_read
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import PeerKey
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import BackOff, SideChannel, SideChannelClient
from vllm_commext.nixl.wire.description import WorkerDescription, check_facts, open_description


class PeerState(StrEnum):
    """The states of a peer.

    UNKNOWN: not asked for yet.
    HANDSHAKING: it has been asked for its description.
    READY: it has described itself and fits: it is read from.
    SUSPECT: a read failed or is late, its connection closed, or it may have been restarted: it is
        asked again before the next read.
    LOST: it did not answer, refused, or does not fit; it is asked again after a while.
    """

    UNKNOWN = "unknown"
    HANDSHAKING = "handshaking"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(eq=False)
class Peer:
    """One prefill worker.

    Attributes:
        link: the connection to read from; kept while suspect, until it is known to have ended.
        waiting: shards of loads that wait for it to be ready, or for room among its reads; first
            come, first served.
        releases: remote requests that it is to be released from as soon as it is ready.
        wanted_incarnation: start of its engine that the last request was of, "" for any.
        drains: it has said that it takes no new requests, and will go; until it answers again.
    """

    key: PeerKey
    channel: SideChannel
    state: PeerState = PeerState.UNKNOWN
    link: Link | None = None
    asked: float = 0.0
    waiting: deque[ShardRead] = field(default_factory=deque[ShardRead])
    releases: list[tuple[RemotePrefill, SourceWorker]] = field(
        default_factory=list[tuple[RemotePrefill, SourceWorker]]
    )
    wanted_incarnation: str = ""
    last_used: float = 0.0
    drains: bool = False

    @property
    def ready_link(self) -> Link | None:
        return self.link if self.state == PeerState.READY else None

    @property
    def has_closed(self) -> bool:
        """True if its connection has closed since it was asked, most likely with its process."""
        return self.state == PeerState.SUSPECT and not self.channel.is_open

    @property
    def is_idle(self) -> bool:
        has_reads = self.link is not None and self.link.num_users > 1
        is_wanted = has_reads or bool(self.waiting) or bool(self.releases)
        return self.state != PeerState.HANDSHAKING and not is_wanted

    def doubt(self) -> None:
        if self.state == PeerState.READY:
            self.state = PeerState.SUSPECT


MAX_PEERS = 128
"""Prefill workers that are known at a time; the one that was needed least recently makes room."""
IDLE_SECONDS = 1800.0  # a prefill worker that no request has needed for this long is forgotten
RETIRE_SECONDS = 0.1  # between two looks for peers that are not needed any more
BACK_OFF = BackOff(first_seconds=0.1, most_seconds=1.0)
DRAINING, RETIRED = "draining", "retired"
"""Counted beside the states: peers that have said that they drain, also after their ends, and
links whose last reads go on."""


class PeerTable:
    """Known peers, with the shards of loads that wait for each.  Owned by one thread."""

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalWorker,
        recorder: TransferRecorder,
        client: SideChannelClient,
    ) -> None:
        self._config = config
        self._local = local
        self._recorder = recorder
        self._client = client
        self.sweeper = Sweeper(agent, num_descriptors(config))
        self._links = Links(agent, local, self.sweeper.note_removal)
        self._peers: dict[PeerKey, Peer] = {}
        self._ended: list[Peer] = []
        self._log = RateLimitedLog()
        self._retire_unused()

    @property
    def is_wanted(self) -> bool:
        return any(
            peer.waiting or peer.state == PeerState.HANDSHAKING for peer in self._peers.values()
        )

    def count_states(self) -> dict[str, int]:
        peers = self._peers.values()
        counts = Counter(DRAINING if one.drains else one.state for one in peers)
        counts[RETIRED] = self._links.num_retired
        return {state: counts[state] for state in (*PeerState, DRAINING, RETIRED)}

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    def find(self, key: PeerKey, incarnation: str = "") -> Link | None:
        peer = self._peers.get(key)
        if peer is None or peer.ready_link is None:
            return None
        peer.last_used = time.monotonic()
        return peer.ready_link if peer.ready_link.serves(incarnation) else None

    def prepare(self, key: PeerKey, incarnation: str = "") -> Peer:
        """A peer that is ready, or that has been asked for its description; raises CommextError."""
        if self.find(key, incarnation) is None:
            return self._need(key, incarnation)
        return self._peers[key]

    def waiting(self) -> list[Peer]:
        return [
            peer
            for peer in self._peers.values()
            if peer.waiting and peer.state != PeerState.HANDSHAKING
        ]

    def withdraw(self, use: Use) -> list[ShardRead]:
        taken: list[ShardRead] = []
        for peer in self._peers.values():
            taken += [shard for shard in peer.waiting if shard.use is use]
            peer.waiting = deque(shard for shard in peer.waiting if shard.use is not use)
        return taken

    def poll(self) -> list[Peer]:
        ended, self._ended = self._ended, []
        return ended

    def doubt(self, link: Link, *, broken: bool) -> None:
        peer = self._peers.get(link.key)
        if peer is not None and peer.link is link:
            peer.doubt()
            peer.link = None if broken else link
        if broken:
            self._links.retire(link)
            self.forget(link.agent_name)

    def forget(self, agent_name: str) -> None:
        self._links.forget(agent_name)

    @property
    def has_sweeps_due(self) -> bool:
        return self.sweeper.is_due and bool(self._links.live())

    def sweep(self) -> None:
        broken = self.sweeper.poll(self._links.live())
        if broken is not None:
            self.doubt(broken, broken=True)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._retire(peer)

    def _need(self, key: PeerKey, incarnation: str) -> Peer:
        """A peer that is being asked; raises CommextError."""
        now = time.monotonic()
        peer = self._peers.get(key) or self._add(key)
        peer.last_used = now
        if peer.state == PeerState.HANDSHAKING:
            return peer
        if incarnation not in ("", peer.wanted_incarnation):  # its engine is back
            peer.channel.retry_at = now
        peer.channel.close()
        peer.channel.ask(
            wire.DescribeRequest(engine_id=key[0], tp_rank=key[3]),
            self._config.handshake_timeout,
            partial(self._admit, peer),
            partial(self._fail, peer),
        )
        peer.state = PeerState.HANDSHAKING
        peer.wanted_incarnation = incarnation
        peer.asked = now
        return peer

    def _add(self, key: PeerKey) -> Peer:
        if len(self._peers) >= MAX_PEERS:
            idle = [peer for peer in self._peers.values() if peer.is_idle]
            if not idle:
                raise ProtocolError(
                    f"expected at most {MAX_PEERS} prefill workers in use at a time, got one more: "
                    "have the router send fewer of them to this engine"
                )
            self._retire(min(idle, key=lambda peer: peer.last_used))
        channel = SideChannel(
            self._client,
            key[1:3],
            BACK_OFF,
            on_draining=partial(self._note_draining, key),
            on_closed=partial(self._note_closed, key),
        )
        return self._peers.setdefault(key, Peer(key, channel))

    def _fail(self, peer: Peer, error: CommextError) -> None:
        self._ended.append(peer)
        peer.state = PeerState.LOST
        self._close_links(peer, has_ended=isinstance(error, ProtocolError))

    def _admit(self, peer: Peer, reply: wire.Described) -> None:
        described = open_description(reply)
        key = peer.key
        found = (described.engine_id, described.layout.worker)
        if found != (key[0], key[3]):
            raise ProtocolError(
                f"asked for worker {key[3]} of engine {key[0]!r}, got worker {found[1]} of engine "
                f"{found[0]!r}"
            )
        if peer.link is None or peer.link.incarnation != reply.incarnation:
            self._close_links(peer, has_ended=False)
            self._connect(peer, described, reply.incarnation)
        self._recorder.observe(handshake_seconds=time.monotonic() - peer.asked)
        peer.state = PeerState.READY
        peer.drains = False  # it says so after each answer
        self._ended.append(peer)

    def _connect(self, peer: Peer, described: WorkerDescription, incarnation: str) -> None:
        enforce = self._config.enforce_handshake_compat
        tolerated = check_facts(self._local.facts, described.facts, enforce=enforce)
        plan = plan_read(
            self._local.layout,
            described.layout,
            local_device=self._local.device_id,
            remote_device=described.device_id,
        )
        try:
            # The peer's before anything else can fail: what it has is given back with it.
            peer.link = self._links.connect(peer.key, incarnation, described, plan)
        except Exception as error:
            raise ProtocolError(
                f"NIXL cannot use the metadata of {peer.key}: {error or type(error).__name__}"
            ) from error
        log_ready(peer.link, described, str(tolerated) if tolerated else "")

    def _close_links(self, peer: Peer, *, has_ended: bool) -> None:
        peer.link = None
        self._links.close(peer.key, has_ended=has_ended)

    def _note_closed(self, key: PeerKey, error: CommextError) -> None:
        peer = self._peers[key]
        if peer.state != PeerState.READY:
            return
        is_idle = peer.is_idle
        peer.doubt()
        if peer.drains and is_idle:
            logger.info("prefill engine %s shut down after draining", key)
        else:
            text = f"the connection to prefill engine {key} closed: {error}"
            self._log.warning("connection", text)
        # Not all that are idle at once: it may have closed them as it has too many.
        wait = random.uniform(0.0, BACK_OFF.most_seconds) if is_idle else 0.0
        self._client.after(wait, partial(self._prove, peer))

    def _note_draining(self, key: PeerKey, drains: bool) -> None:
        peer = self._peers[key]
        if drains != peer.drains:
            peer.drains = drains
            what = "drains: it goes when its blocks are read" if drains else "drains no more"
            logger.info("prefill engine %s %s", key, what)

    def _prove(self, peer: Peer) -> None:
        if self._peers.get(peer.key) is not peer or not peer.has_closed:
            return
        try:
            self._need(peer.key, peer.wanted_incarnation)
        except CommextError as error:
            logger.info("prefill engine %s cannot be asked: %s", peer.key, error)

    def _retire_unused(self) -> None:
        self._client.after(RETIRE_SECONDS, self._retire_unused)
        now, limit = time.monotonic(), IDLE_SECONDS
        for peer in list(self._peers.values()):
            if peer.is_idle and now - peer.last_used >= limit:
                logger.info("prefill engine %s was not needed for %g s; forgotten", peer.key, limit)
                self._retire(peer)

    def _retire(self, peer: Peer) -> None:
        del self._peers[peer.key]
        self._close_links(peer, has_ended=peer.state == PeerState.LOST)
        peer.channel.close()
