"""The prefill engines that a decode worker knows: asked once, checked, and kept until a read
fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl import wire
from vllm_commext.nixl.agent import NixlAgent
from vllm_commext.nixl.compatibility import check_facts, digest
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.regions import Region
from vllm_commext.nixl.requests import Load, RemoteRequest
from vllm_commext.nixl.side_channel import Inquiry
from vllm_commext.nixl.topology import RankShape, source_rank


@dataclass(frozen=True)
class LocalSide:
    """This worker, as far as a handshake compares it with a peer.

    Attributes:
        engine_id: this engine's id.
        shape: this rank's place in it.
        facts: this engine's configuration facts.
        regions: this worker's regions, in the order of its descriptor list.
    """

    engine_id: str
    shape: RankShape
    facts: dict[str, str]
    regions: tuple[Region, ...]

    @property
    def consumer(self) -> str:
        """How a prefill worker tells this reader from others."""
        return f"{self.engine_id}/{self.shape.tp_rank}"


@dataclass
class Peer:
    """A prefill worker that can be read from.

    Attributes:
        key: engine id, host and port it was asked under.
        incarnation: the start of its engine.
        agent_name: name of its NIXL agent.
        remote_list: prepared list of its blocks.
        num_blocks: blocks in each of its regions.
        fence_list: prepared list of its epochs, None where it has none.
        num_fence_slots: how many there are.
        num_reads: reads under way; it may be removed at 0 only.
        forgotten: not to be used for further reads.
        removed: NIXL has been told.
    """

    key: tuple[str, str, int]
    incarnation: str
    agent_name: str
    remote_list: Any
    num_blocks: int
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
    loads: list[Load] = field(default_factory=list)


def peer_key(remote: RemoteRequest) -> tuple[str, str, int]:
    """What tells one prefill engine from another."""
    return remote.engine_id, remote.host, remote.port


def remote_regions(local: Sequence[Region], described: wire.WorkerDescription) -> list[Region]:
    """The peer's regions in the order of the local ones.

    Raises:
        ProtocolError: the peer lacks a layer, has one more, or has blocks of another size.
    """
    columns = zip(
        described.region_names,
        described.base_addresses,
        described.stride_bytes,
        described.block_bytes,
        strict=True,
    )
    found = {column[0]: Region(*column, described.num_blocks) for column in columns}
    names = [region.name for region in local]
    if set(found) != set(names):
        raise ProtocolError(
            f"the engines' layers differ: only in decode {sorted(set(names) - set(found))[:4]}, "
            f"only in prefill {sorted(set(found) - set(names))[:4]}: serve the same model on both"
        )
    for region in local:
        theirs = found[region.name].block_bytes
        if theirs != region.block_bytes:
            raise ProtocolError(
                f"layer {region.name}: a block has {region.block_bytes} bytes in the decode engine "
                f"and {theirs} in the prefill engine: start both with the same model, "
                "--kv-cache-dtype and --block-size"
            )
    return [found[name] for name in names]


class PeerTable:
    """Known peers, and loads that wait for one to become known.  Owned by one thread."""

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
        self._peers: dict[tuple[str, str, int], Peer] = {}
        self._handshakes: dict[tuple[str, str, int], _Handshake] = {}
        # A forgotten peer whose reads go on, and the same one asked anew, share NIXL's agent.
        self._num_agent_users: Counter[str] = Counter()

    @property
    def num_pending(self) -> int:
        """Handshakes under way."""
        return len(self._handshakes)

    def find(self, remote: RemoteRequest) -> Peer | None:
        """The peer to read from, if it is known and has not been restarted since."""
        peer = self._peers.get(peer_key(remote))
        return peer if peer is not None and peer.serves(remote) else None

    def ask(self, load: Load, remote: RemoteRequest, rank: int) -> None:
        """Queue a load until its peer, the prefill engine's worker ``rank``, is known.

        Raises:
            CommextError: the peer cannot be asked.
        """
        key = peer_key(remote)
        if key not in self._handshakes:
            request = wire.DescribeRequest(
                engine_id=remote.engine_id,
                tp_rank=rank,
                consumer=self._local.consumer,
                configuration=digest(self._local.facts),
            )
            inquiry = Inquiry(self._context, remote.host, remote.port, request)
            self._handshakes[key] = _Handshake(inquiry, time.monotonic())
        self._handshakes[key].loads.append(load)

    def withdraw(self, request_id: str) -> Load | None:
        """Take back a load that waits for its peer."""
        for handshake in self._handshakes.values():
            for load in handshake.loads:
                if load.request_id == request_id:
                    handshake.loads.remove(load)
                    return load
        return None

    def poll(self) -> list[tuple[list[Load], Peer | CommextError]]:
        """Handshakes that ended: their loads, and the peer or the reason why there is none."""
        ended: list[tuple[list[Load], Peer | CommextError]] = []
        for key, handshake in list(self._handshakes.items()):
            outcome = self._advance(key, handshake)
            if outcome is not None:
                handshake.inquiry.close()
                del self._handshakes[key]
                ended.append((handshake.loads, outcome))
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
        self._context.destroy(linger=0)

    def _advance(
        self, key: tuple[str, str, int], handshake: _Handshake
    ) -> Peer | CommextError | None:
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

    def _admit(self, key: tuple[str, str, int], reply: wire.Described, waited: float) -> Peer:
        described = wire.open_description(reply)
        rank = source_rank(self._local.shape, described.tp_size)
        if (described.engine_id, described.tp_rank) != (key[0], rank):
            raise ProtocolError(
                f"asked for rank {rank} of engine {key[0]!r}, got rank {described.tp_rank} of "
                f"engine {described.engine_id!r}"
            )
        known = self._peers.get(key)
        if known is not None:
            if known.incarnation == reply.incarnation:
                return known
            self.forget(known)
        enforce = self._config.enforce_handshake_compat
        tolerated = check_facts(self._local.facts, described.facts, enforce=enforce)
        regions = remote_regions(self._local.regions, described)
        peer = self._connect(key, reply.incarnation, described, regions)
        self._peers[key] = peer
        self._recorder.handshake(waited)
        logger.info(
            "prefill engine %s at %s:%d is ready: rank %d of %d, %d blocks%s",
            *key,
            described.tp_rank,
            described.tp_size,
            described.num_blocks,
            f"; tolerated differences: {tolerated}" if tolerated else "",
        )
        return peer

    def _connect(
        self,
        key: tuple[str, str, int],
        incarnation: str,
        described: wire.WorkerDescription,
        regions: list[Region],
    ) -> Peer:
        name = self._agent.add_peer(described.agent_metadata)
        num_slots = described.num_fence_slots
        try:
            prepared = self._agent.prepare_remote(
                name, regions, described.memory_type, described.device_id
            )
            fences = None
            if num_slots:
                fences = self._agent.prepare_fences(name, described.fence_address, num_slots)
        except Exception:
            self._remove_agent_if_unused(name)
            raise
        self._num_agent_users[name] += 1
        return Peer(key, incarnation, name, prepared, described.num_blocks, fences, num_slots)
