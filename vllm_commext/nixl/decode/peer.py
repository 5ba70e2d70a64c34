"""A prefill worker that can be read from, and this worker as a handshake compares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_commext.nixl.decode.heartbeats import PeerKey
from vllm_commext.nixl.decode.loads import Part
from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.geometry.plan import ReadPlan


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


@dataclass(eq=False)
class Peer:
    """A connection to a prefill worker that can be read from.

    Attributes:
        key: engine id, host, port and rank it was asked under.
        incarnation: the start of its engine.
        agent_name: name of its NIXL agent.
        plan: how to read from it.
        local_list: prepared list of this worker's side of the plan.
        remote_list: prepared list of its side.
        memory_type: NIXL memory type of its cache.
        device_id: device of its cache.
        fence_list: prepared list of its fences' nonces, None where it has none.
        num_fence_slots: how many there are.
        lease_seconds: how long it keeps blocks after the last sign of a reader, 0 where it takes no
            heartbeats.
        num_reads: reads under way; it may be removed at 0 only.
        retired: not to be used for further reads.
        lost: its engine is gone, so that reads under way have no prospect.
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
    lease_seconds: float = 0.0
    num_reads: int = 0
    retired: bool = False
    lost: bool = False

    def serves(self, incarnation: str) -> bool:
        """Whether a request of this start of the engine, "" for any, is one of its own."""
        return incarnation in ("", self.incarnation)


def peer_key(part: Part) -> PeerKey:
    """The prefill worker that a part is read from."""
    remote = part.remote
    return remote.engine_id, remote.host, remote.port, part.source
