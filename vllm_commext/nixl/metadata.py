"""Messages between the connector's scheduler side and worker side, in vLLM's envelopes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_commext.anonymous_memory import Offer
from vllm_commext.nixl.requests import Chunk, FailedLoad, Hold, Load, Restart, Wait


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A worker's encoded ``WorkerDescription``, on its way to the side channel, and where its
    blocks' generations are, None where it offers no blocks."""

    description: bytes
    generations: Offer | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step.

    Attributes:
        waits: requests whose blocks must be kept by their prefill engines until their loads begin.
        holds: finished prefills whose blocks wait for readers.
        saves: blocks, a list a group, to be copied to the host at the end of the step; used where
            peers read from a copy there.
        fence_key: what the fences' nonces follow from, in the engine's first step only, so that all
            workers have it before a prefill has finished; see ``fence``.
        wakeup: the address that workers notify when a transfer has ended, in the engine's first
            step only; see ``wakeup``.
        renews: whether leases are renewed from now on, None for as before.
    """

    loads: list[Load] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    saves: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    fence_key: bytes = b""
    wakeup: str = ""
    renews: bool | None = None


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step where there is something to say.  A request that does not
    end as it should is one event, whatever the number of ranks: the scheduler side counts it once.

    Attributes:
        settled: given-up loads, each with the number of workers on which nothing of it is under
            way.
        unread: failed loads of which vLLM is not told, see ``Load.recomputes``.
        gauges: what stands at each worker, of those where it has changed.
    """

    late: set[str] = field(default_factory=set)
    settled: dict[str, int] = field(default_factory=dict)
    failed: dict[str, FailedLoad] = field(default_factory=dict[str, FailedLoad])
    expired: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        if not isinstance(other, WorkerMetadata):
            raise TypeError(f"expected WorkerMetadata, got {type(other).__name__}")
        self.late |= other.late
        self.unread |= other.unread
        self.expired |= other.expired
        for request_id, one in other.failed.items():
            known = self.failed.get(request_id, one)
            self.failed[request_id] = FailedLoad(known.reason, min(known.num_read, one.num_read))
        self.gauges.update(other.gauges)
        for request_id, count in other.settled.items():
            self.settled[request_id] = self.settled.get(request_id, 0) + count
        return self
