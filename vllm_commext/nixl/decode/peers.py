"""The prefill workers that a decode worker knows: each asked once, checked, and kept until it is
lost, restarted, or not needed for long."""

from __future__ import annotations

import time
from collections import Counter

import zmq

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.heartbeats import PeerKey
from vllm_commext.nixl.decode.loads import Part
from vllm_commext.nixl.decode.peer import LocalSide, Peer, peer_key
from vllm_commext.nixl.decode.peer_entry import PeerEntry
from vllm_commext.nixl.decode.peer_links import PeerLinks, log_ready
from vllm_commext.nixl.decode.peer_states import PeerEvent, PeerState
from vllm_commext.nixl.geometry.plan import plan_read
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.compatibility import check_facts, digest
from vllm_commext.nixl.wire.inquiry import Inquiry
from vllm_commext.nixl.wire.seal import read_secret

CHECK_SECONDS = 0.1
"""Between two looks at connections and at what is not needed any more."""


class PeerTable:
    """Known peers, and parts of loads that wait for one to become known.  Owned by one thread."""

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalSide,
        recorder: TransferRecorder,
    ) -> None:
        self._config = config
        self._local = local
        self._recorder = recorder
        self._context = zmq.Context()
        self._secret = read_secret(config.side_channel_secret_file)
        self._links = PeerLinks(agent, config, local)
        self._entries: dict[PeerKey, PeerEntry] = {}
        self._next_check = 0.0
        self._log = RateLimitedLog()

    @property
    def num_pending(self) -> int:
        """Handshakes under way."""
        return sum(entry.state == PeerState.HANDSHAKING for entry in self._entries.values())

    def count_states(self) -> dict[str, int]:
        """Peers by state, every state named; retired ones are those whose reads go on."""
        counts = Counter(entry.state for entry in self._entries.values())
        counts[PeerState.RETIRED] += self._links.num_retired
        return {state.value: counts[state] for state in PeerState}

    def find(self, key: PeerKey, incarnation: str = "") -> Peer | None:
        """The peer to read from, if it is ready and has not been restarted since."""
        entry = self._entries.get(key)
        if entry is None or entry.state != PeerState.READY or entry.peer is None:
            return None
        entry.last_used = time.monotonic()
        return entry.peer if entry.peer.serves(incarnation) else None

    def ask(self, part: Part) -> None:
        """Queue a part until its peer is ready.

        Raises:
            CommextError: the peer cannot be asked, or could not be a moment ago.
        """
        self._need(peer_key(part), part.remote.incarnation).parts.append(part)

    def prepare(self, key: PeerKey, incarnation: str = "") -> None:
        """Make a peer ready that will be needed.

        Raises:
            CommextError: as for ``ask``.
        """
        if self.find(key, incarnation) is None:
            self._need(key, incarnation)

    def withdraw(self, request_id: str) -> list[Part]:
        """Take back the parts of a load that wait for their peers."""
        taken: list[Part] = []
        for entry in self._entries.values():
            taken += [part for part in entry.parts if part.load.request_id == request_id]
            entry.parts = [part for part in entry.parts if part.load.request_id != request_id]
        return taken

    def poll(self) -> list[tuple[list[Part], Peer | CommextError]]:
        """Handshakes that ended: what waited for them, and the peer or the reason why there is
        none."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._check_connections()
            self._retire_unused(now)
        ended: list[tuple[list[Part], Peer | CommextError]] = []
        for entry in list(self._entries.values()):
            if entry.state != PeerState.HANDSHAKING:
                continue
            outcome = self._advance(entry, now)
            if outcome is not None:
                parts, entry.parts = entry.parts, []
                ended.append((parts, outcome))
        return ended

    def doubt(self, peer: Peer, *, broken: bool) -> None:
        """A read failed (``broken``: the connection is not used again) or is late: ask the peer
        before the next one."""
        entry = self._entries.get(peer.key)
        if entry is not None and entry.peer is peer:
            entry.apply(PeerEvent.DOUBTED)
            entry.peer = None if broken else peer
        if broken:
            self._links.retire(peer)

    def remove_if_unused(self, peer: Peer) -> None:
        """A read has ended: take a retired peer out of NIXL if that was its last one."""
        self._links.remove_if_unused(peer)

    @property
    def is_sweeping(self) -> bool:
        """Whether a peer is read on behalf of removed ones."""
        return self._links.is_sweeping

    @property
    def has_sweeps_due(self) -> bool:
        """Whether a peer is to be read on behalf of removed ones."""
        return self._links.has_sweeps_due

    def sweep(self) -> None:
        """Let NIXL go on with what removals of peers have begun."""
        broken = self._links.sweep()
        if broken is not None:
            self.doubt(broken, broken=True)

    def close(self) -> None:
        """Retire all peers and give up all handshakes."""
        for entry in list(self._entries.values()):
            self._retire(entry)
        self._context.destroy(linger=0)

    def _need(self, key: PeerKey, incarnation: str) -> PeerEntry:
        """The entry of a peer that is being asked.

        Raises:
            CommextError: it cannot be asked, or was in vain and its time has not come again.  A
                request of a start of its engine that was not yet asked for shows that it is back.
        """
        now = time.monotonic()
        entry = self._entries.get(key) or self._add(key)
        entry.last_used = now
        if entry.state == PeerState.HANDSHAKING:
            return entry
        is_news = incarnation not in ("", entry.wanted_incarnation)
        if entry.state == PeerState.LOST and now < entry.retry_at and not is_news:
            raise type(entry.error)(
                f"{entry.error}; it is asked again in {entry.retry_at - now:.1g} s"
            ) from entry.error
        entry.apply(PeerEvent.DOUBTED)
        entry.apply(PeerEvent.NEEDED)
        entry.wanted_incarnation = incarnation
        entry.asked = now
        entry.close_inquiry()
        try:
            entry.inquiry = self._inquire(key)
        except CommextError as error:
            self._fail(entry, error, now)
            raise
        return entry

    def _inquire(self, key: PeerKey) -> Inquiry:
        engine_id, host, port, rank = key
        request = wire.DescribeRequest(
            engine_id=engine_id,
            tp_rank=rank,
            consumer=self._local.consumer,
            configuration=digest(self._local.facts),
        )
        return Inquiry(self._context, host, port, request, self._secret)

    def _add(self, key: PeerKey) -> PeerEntry:
        if len(self._entries) >= self._config.max_peers:
            idle = [entry for entry in self._entries.values() if entry.is_idle]
            if not idle:
                raise ProtocolError(
                    f"expected at most {self._config.max_peers} prefill workers in use at a time, "
                    "got one more: raise max_peers in kv_connector_extra_config"
                )
            self._retire(min(idle, key=lambda entry: entry.last_used))
        return self._entries.setdefault(key, PeerEntry(key))

    def _advance(self, entry: PeerEntry, now: float) -> Peer | CommextError | None:
        assert entry.inquiry is not None  # open during a handshake
        address = entry.inquiry.address
        error: CommextError
        try:
            reply = entry.inquiry.poll()
            if reply is not None:
                return self._admit(entry, reply, now)
            if now - entry.asked < self._config.handshake_timeout:
                return None
            error = CommextTimeoutError(
                f"no answer from the prefill engine's side channel {address} within "
                f"{self._config.handshake_timeout:g} s: is it up, and can this host reach it? Its "
                "VLLM_NIXL_SIDE_CHANNEL_HOST must be an address that decode engines reach"
            )
        except CommextError as refusal:
            error = refusal
        except Exception as failure:  # noqa: BLE001 NIXL raises many types on metadata it cannot use
            error = ProtocolError(f"NIXL cannot use the metadata of {address}: {failure}")
        self._fail(entry, error, now)
        return error

    def _fail(self, entry: PeerEntry, error: CommextError, now: float) -> None:
        entry.fail(error, now)
        self._lose(entry)

    def _admit(self, entry: PeerEntry, reply: wire.Described, now: float) -> Peer:
        described = wire.open_description(reply)
        key = entry.key
        found = (described.engine_id, described.layout.tp_rank)
        if found != (key[0], key[3]):
            raise ProtocolError(
                f"asked for rank {key[3]} of engine {key[0]!r}, got rank {found[1]} of engine "
                f"{found[0]!r}"
            )
        if entry.peer is None or entry.peer.incarnation != reply.incarnation:
            self._lose(entry)
            entry.peer = self._connect(entry, described, reply.incarnation)
        entry.apply(PeerEvent.ANSWERED)
        entry.num_failures = 0
        self._recorder.handshake(now - entry.asked)
        return entry.peer

    def _connect(
        self, entry: PeerEntry, described: wire.WorkerDescription, incarnation: str
    ) -> Peer:
        enforce = self._config.enforce_handshake_compat
        tolerated = check_facts(self._local.facts, described.facts, enforce=enforce)
        plan = plan_read(
            self._local.layout,
            described.layout,
            local_device=self._local.device_id,
            remote_device=described.device_id,
        )
        peer = self._links.connect(entry.key, incarnation, described, plan)
        log_ready(peer, described, str(tolerated) if tolerated else "")
        return peer

    def _lose(self, entry: PeerEntry) -> None:
        """The engine that was behind the entry is gone, as far as can be told."""
        self._drop(entry)
        self._links.mark_lost(entry.key)

    def _drop(self, entry: PeerEntry) -> None:
        if entry.peer is not None:
            self._links.retire(entry.peer)
            entry.peer = None

    def _check_connections(self) -> None:
        for entry in self._entries.values():
            if entry.state != PeerState.READY or entry.inquiry is None:
                continue
            if entry.inquiry.is_connected():
                continue
            entry.apply(PeerEvent.DOUBTED)
            self._log.warning(
                "connection", f"the connection to prefill engine {entry.key} has closed"
            )
            entry.close_inquiry()
            if entry.is_idle:
                self._drop(entry)  # its process has ended, as far as can be told
            elif entry.peer is not None:
                self._prove(entry.key, entry.peer.incarnation)

    def _prove(self, key: PeerKey, incarnation: str) -> None:
        """Reads are under way: find out now whether their peer lives."""
        try:
            self._need(key, incarnation)
        except CommextError as error:
            logger.info("prefill engine %s cannot be asked: %s", key, error)

    def _retire_unused(self, now: float) -> None:
        limit = self._config.peer_idle_timeout
        for entry in list(self._entries.values()):
            if entry.is_idle and now - entry.last_used >= limit:
                logger.info(
                    "prefill engine %s was not needed for %g s; forgotten", entry.key, limit
                )
                self._retire(entry)

    def _retire(self, entry: PeerEntry) -> None:
        entry.apply(PeerEvent.UNUSED)
        entry.close_inquiry()
        self._drop(entry)
        del self._entries[entry.key]
