"""What NIXL holds for peers: their agents and prepared lists, given back when nothing uses them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.heartbeats import PeerKey
from vllm_commext.nixl.decode.peer import LocalSide, Peer
from vllm_commext.nixl.geometry.descriptors import UInt64Array
from vllm_commext.nixl.geometry.plan import ReadPlan
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.sweep import Sweeper, num_descriptors
from vllm_commext.nixl.wire import messages as wire


class PeerLinks:
    """Makes and removes the connections to peers.  Owned by one thread."""

    def __init__(self, agent: NixlAgent, config: ConnectorConfig, local: LocalSide) -> None:
        self._agent = agent
        self._local = local
        self._sweeper = Sweeper(agent, num_descriptors(config))
        self._live: list[Peer] = []
        self._retired: list[Peer] = []
        # A retired peer whose reads go on, and the same one connected anew, share NIXL's agent.
        self._num_agent_users: Counter[str] = Counter()
        # Peers of one tensor-parallel size share this worker's side of their plans.
        self._local_lists: dict[bytes, Any] = {}
        self._num_list_users: Counter[bytes] = Counter()

    @property
    def num_retired(self) -> int:
        """Retired peers whose reads go on."""
        return len(self._retired)

    @property
    def is_sweeping(self) -> bool:
        """Whether a read of the sweeper's is under way."""
        return self._sweeper.is_reading

    @property
    def has_sweeps_due(self) -> bool:
        """Whether the sweeper is to read, from a peer that there is."""
        return self._sweeper.is_due and bool(self._live)

    def connect(
        self, key: PeerKey, incarnation: str, described: wire.WorkerDescription, plan: ReadPlan
    ) -> Peer:
        """Connect to a worker that has described itself.

        Raises:
            Exception: NIXL cannot use the description; nothing of it is kept then.
        """
        name = self._agent.add_peer(described.agent_metadata)
        remote = fences = None
        try:
            local = self._prepare_local(plan.local_rows)
            if len(plan.remote_rows):
                remote = self._agent.prepare(name, plan.remote_rows, described.memory_type)
            num_slots = described.num_fence_slots
            if num_slots:
                fences = self._agent.prepare_fences(name, described.fence_address, num_slots)
        except Exception:
            self._release_lists(remote)
            self._drop_unused_local_list(plan.local_rows.tobytes())
            self._remove_agent_if_unused(name)
            raise
        self._num_agent_users[name] += 1
        self._num_list_users[plan.local_rows.tobytes()] += 1
        peer = Peer(
            key=key,
            incarnation=incarnation,
            agent_name=name,
            plan=plan,
            local_list=local,
            remote_list=remote,
            memory_type=described.memory_type,
            device_id=described.device_id,
            fence_list=fences,
            num_fence_slots=num_slots,
            lease_seconds=described.lease_seconds,
        )
        self._live.append(peer)
        return peer

    def retire(self, peer: Peer) -> None:
        """Use a peer no more, and remove it once none of its reads is under way."""
        if not peer.retired:
            peer.retired = True
            self._live.remove(peer)
            self._retired.append(peer)
        self.remove_if_unused(peer)

    def remove_if_unused(self, peer: Peer) -> None:
        """Take a retired peer out of NIXL where nothing is under way with it."""
        if not peer.retired or peer.num_reads or peer not in self._retired:
            return
        self._retired.remove(peer)
        self._num_agent_users[peer.agent_name] -= 1
        rows = peer.plan.local_rows.tobytes()
        self._num_list_users[rows] -= 1
        try:
            self._release_lists(peer.remote_list, peer.fence_list)
            self._drop_unused_local_list(rows)
            self._remove_agent_if_unused(peer.agent_name)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer may be gone already
            logger.warning("NIXL did not remove peer %s cleanly: %s", peer.key, error)

    def sweep(self) -> Peer | None:
        """Let NIXL go on with what removals have begun; a peer that could not be read for that."""
        ended = self._sweeper.poll(self._live)
        if ended is None:
            return None
        peer, error = ended
        self.remove_if_unused(peer)
        return peer if error else None

    def mark_lost(self, key: PeerKey) -> None:
        """The engine behind a key is gone: what is read from it has no prospect."""
        for peer in self._retired:
            if peer.key == key:
                peer.lost = True

    def _prepare_local(self, rows: UInt64Array) -> Any:
        key = rows.tobytes()
        if len(rows) and key not in self._local_lists:
            self._local_lists[key] = self._agent.prepare("", rows, self._local.memory_type)
        return self._local_lists.get(key)

    def _release_lists(self, *lists: Any) -> None:
        for prepared in lists:
            if prepared is not None:
                self._agent.release_list(prepared)

    def _drop_unused_local_list(self, rows: bytes) -> None:
        if not self._num_list_users[rows]:
            del self._num_list_users[rows]
            self._release_lists(self._local_lists.pop(rows, None))

    def _remove_agent_if_unused(self, name: str) -> None:
        if not self._num_agent_users[name]:
            del self._num_agent_users[name]
            self._agent.remove_peer(name)
            self._sweeper.note_removal()


def log_ready(peer: Peer, described: wire.WorkerDescription, tolerated: str) -> None:
    """Say once how a peer will be read."""
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
