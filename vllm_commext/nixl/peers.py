"""The prefill engines that a decode worker knows: asked once, checked, and kept until a read
fails."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import zmq

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl import wire
from vllm_commext.nixl.agent import NixlAgent
from vllm_commext.nixl.compatibility import check_facts, digest
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.descriptors import UInt64Array
from vllm_commext.nixl.layout import CacheLayout
from vllm_commext.nixl.loads import Part
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.plan import ReadPlan
from vllm_commext.nixl.planner import plan_read
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.seal import read_secret
from vllm_commext.nixl.side_channel import Inquiry


@dataclass(frozen=True)
class LocalSide:
    """This worker, as far as a handshake compares it with a peer.

    Attributes:
        engine_id: this engine's id.
        facts: this engine's configuration facts.
        layout: this worker's cache.
        memory_type: NIXL memory type of the cache, "DRAM" or "VRAM".
        device_id: device of the cache.
    """

    engine_id: str
    facts: dict[str, str]
    layout: CacheLayout
    memory_type: str = "DRAM"
    device_id: int = 0

    @property
    def consumer(self) -> str:
        """How a prefill worker tells this reader from others."""
        return f"{self.engine_id}/{self.layout.tp_rank}"


PeerKey = tuple[str, str, int, int]
"""Engine id, host and port of its side channel, rank."""


@dataclass
class Peer:
    """A prefill worker that can be read from.

    Attributes:
        key: engine id, host, port and rank it was asked under.
        incarnation: the start of its engine.
        agent_name: name of its NIXL agent.
        plan: how to read from it.
        local_list: prepared list of this worker's side of the plan.
        remote_list: prepared list of its side.
        memory_type: NIXL memory type of its cache.
        device_id: device of its cache.
        fence_list: prepared list of its epochs, None where it has none.
        num_fence_slots: how many there are.
        num_reads: reads under way; it may be removed at 0 only.
        forgotten: not to be used for further reads.
        removed: NIXL has been told.
    """

    key: PeerKey
    incarnation: str
    agent_name: str
    plan: ReadPlan
    local_list: Any
    remote_list: Any
    memory_type: str
    device_id: int
    fence_list: Any = None
    num_fence_slots: int = 0
    num_reads: int = 0
    forgotten: bool = False
    removed: bool = False

    def serves(self, remote: RemoteRequest) -> bool:
        """Whether the request was prefilled since the engine's last start."""
        return remote.incarnation in ("", self.incarnation)


@dataclass
class _Handshake:
    inquiry: Inquiry
    started: float
    parts: list[Part] = field(default_factory=list)


def peer_key(part: Part) -> PeerKey:
    """What tells one prefill worker from another."""
    remote = part.remote
    return remote.engine_id, remote.host, remote.port, part.source


class PeerTable:
    """Known peers, and parts of loads that wait for one to become known.  Owned by one thread."""

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalSide,
        recorder: TransferRecorder,
    ) -> None:
        self._agent = agent
        self._config = config
        self._local = local
        self._recorder = recorder
        self._context = zmq.Context()
        self._secret = read_secret(config.side_channel_secret_file)
        self._peers: dict[PeerKey, Peer] = {}
        self._handshakes: dict[PeerKey, _Handshake] = {}
        # A forgotten peer whose reads go on, and the same one asked anew, share NIXL's agent.
        self._num_agent_users: Counter[str] = Counter()
        # Peers of one tensor-parallel size share this worker's side of their plans.
        self._local_lists: dict[bytes, Any] = {}

    @property
    def num_pending(self) -> int:
        """Handshakes under way."""
        return len(self._handshakes)

    def find(self, part: Part) -> Peer | None:
        """The peer to read from, if it is known and has not been restarted since."""
        peer = self._peers.get(peer_key(part))
        return peer if peer is not None and peer.serves(part.remote) else None

    def ask(self, part: Part) -> None:
        """Queue a part until its peer is known.

        Raises:
            CommextError: the peer cannot be asked.
        """
        key, remote = peer_key(part), part.remote
        if key not in self._handshakes:
            request = wire.DescribeRequest(
                engine_id=remote.engine_id,
                tp_rank=part.source,
                consumer=self._local.consumer,
                configuration=digest(self._local.facts),
            )
            inquiry = Inquiry(self._context, remote.host, remote.port, request, self._secret)
            self._handshakes[key] = _Handshake(inquiry, time.monotonic())
        self._handshakes[key].parts.append(part)

    def withdraw(self, request_id: str) -> list[Part]:
        """Take back the parts of a load that wait for their peers."""
        taken: list[Part] = []
        for handshake in self._handshakes.values():
            waiting = handshake.parts
            taken += [part for part in waiting if part.load.request_id == request_id]
            handshake.parts = [part for part in waiting if part.load.request_id != request_id]
        return taken

    def poll(self) -> list[tuple[list[Part], Peer | CommextError]]:
        """Handshakes that ended: what waited for them, and the peer or the reason why there is
        none."""
        ended: list[tuple[list[Part], Peer | CommextError]] = []
        for key, handshake in list(self._handshakes.items()):
            outcome = self._advance(key, handshake)
            if outcome is not None:
                handshake.inquiry.close()
                del self._handshakes[key]
                ended.append((handshake.parts, outcome))
        return ended

    def forget(self, peer: Peer) -> None:
        """Use a peer no more, and remove it once none of its reads is under way."""
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        peer.forgotten = True
        self.remove_if_unused(peer)

    def remove_if_unused(self, peer: Peer) -> None:
        """Take a forgotten peer out of NIXL where nothing is under way with it."""
        if not peer.forgotten or peer.num_reads or peer.removed:
            return
        peer.removed = True
        self._num_agent_users[peer.agent_name] -= 1
        try:
            for prepared in (peer.remote_list, peer.fence_list):
                if prepared is not None:
                    self._agent.release_list(prepared)
            self._remove_agent_if_unused(peer.agent_name)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer may be gone already
            logger.warning("NIXL did not remove peer %s cleanly: %s", peer.key, error)

    def _remove_agent_if_unused(self, name: str) -> None:
        if not self._num_agent_users[name]:
            del self._num_agent_users[name]
            self._agent.remove_peer(name)

    def close(self) -> None:
        """Forget all peers and give up all handshakes."""
        for handshake in self._handshakes.values():
            handshake.inquiry.close()
        self._handshakes.clear()
        for peer in list(self._peers.values()):
            self.forget(peer)
        while self._local_lists:
            self._agent.release_list(self._local_lists.popitem()[1])
        self._context.destroy(linger=0)

    def _advance(self, key: PeerKey, handshake: _Handshake) -> Peer | CommextError | None:
        waited = time.monotonic() - handshake.started
        try:
            reply = handshake.inquiry.poll()
            if reply is not None:
                return self._admit(key, reply, waited)
        except CommextError as error:
            return error
        except Exception as error:  # noqa: BLE001 NIXL raises many types on metadata it cannot use
            return ProtocolError(
                f"NIXL cannot use the metadata of {handshake.inquiry.address}: {error}"
            )
        if waited < self._config.handshake_timeout:
            return None
        return CommextTimeoutError(
            f"no answer from the prefill engine's side channel {handshake.inquiry.address} within "
            f"{self._config.handshake_timeout:g} s: is it up, and can this host reach it? Its "
            "VLLM_NIXL_SIDE_CHANNEL_HOST must be an address that decode engines reach"
        )

    def _admit(self, key: PeerKey, reply: wire.Described, waited: float) -> Peer:
        described = wire.open_description(reply)
        found = (described.engine_id, described.layout.tp_rank)
        if found != (key[0], key[3]):
            raise ProtocolError(
                f"asked for rank {key[3]} of engine {key[0]!r}, got rank {found[1]} of engine "
                f"{found[0]!r}"
            )
        known = self._peers.get(key)
        if known is not None:
            if known.incarnation == reply.incarnation:
                return known
            self.forget(known)
        enforce = self._config.enforce_handshake_compat
        tolerated = check_facts(self._local.facts, described.facts, enforce=enforce)
        plan = plan_read(
            self._local.layout,
            described.layout,
            local_device=self._local.device_id,
            remote_device=described.device_id,
        )
        peer = self._connect(key, reply.incarnation, described, plan)
        self._peers[key] = peer
        self._recorder.handshake(waited)
        self._log_ready(peer, described, str(tolerated) if tolerated else "")
        return peer

    def _log_ready(self, peer: Peer, described: wire.WorkerDescription, tolerated: str) -> None:
        engine_id, host, port, rank = peer.key
        lengths = peer.plan.local_rows[:, 1]
        logger.info(
            "prefill engine %s at %s:%d is ready: rank %d of %d, %d blocks; %d descriptors of "
            "%d to %d bytes for each cell of tokens or state%s",
            engine_id,
            host,
            port,
            rank,
            described.layout.tp_size,
            described.layout.num_blocks,
            sum(section.num_lanes for section in peer.plan.sections),
            lengths.min(initial=1 << 62) if len(lengths) else 0,
            lengths.max(initial=0),
            f"; tolerated differences: {tolerated}" if tolerated else "",
        )

    def _connect(
        self, key: PeerKey, incarnation: str, described: wire.WorkerDescription, plan: ReadPlan
    ) -> Peer:
        name = self._agent.add_peer(described.agent_metadata)
        num_slots = described.num_fence_slots
        try:
            local = self._prepare_local(plan.local_rows)
            remote = None
            if len(plan.remote_rows):
                remote = self._agent.prepare(name, plan.remote_rows, described.memory_type)
            fences = None
            if num_slots:
                fences = self._agent.prepare_fences(name, described.fence_address, num_slots)
        except Exception:
            self._remove_agent_if_unused(name)
            raise
        self._num_agent_users[name] += 1
        where = (described.memory_type, described.device_id)
        return Peer(key, incarnation, name, plan, local, remote, *where, fences, num_slots)

    def _prepare_local(self, rows: UInt64Array) -> Any:
        key = rows.tobytes()
        if len(rows) and key not in self._local_lists:
            self._local_lists[key] = self._agent.prepare("", rows, self._local.memory_type)
        return self._local_lists.get(key)
