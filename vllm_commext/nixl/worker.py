"""The connector's worker side: registers the cache, and commands the transfer thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.cache_memory import HostBuffer, LastBlocks
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import Link, LocalWorker
from vllm_commext.nixl.geometry.layout import block_bytes, describe_place
from vllm_commext.nixl.geometry.topology import worker_number
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.mapped import Mapped
from vllm_commext.nixl.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from vllm_commext.nixl.prefill.fence import MIN_CELLS, GenerationTable
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import Load, Outcomes, Release
from vllm_commext.nixl.stream.progress import ProgressTable, Publisher, WorkerTables
from vllm_commext.nixl.transfer_thread import GiveUp, Look, Renew, TransferThread
from vllm_commext.nixl.transport import probe
from vllm_commext.nixl.transport.agent import NixlAgent, ucx_log
from vllm_commext.nixl.vllm_cache import (
    ONE_STAGE,
    ModelFacts,
    Pipeline,
    cache_layout,
    groups_of,
    needs_zeroed_blocks,
)
from vllm_commext.nixl.wakeup import notifier
from vllm_commext.nixl.wire.description import WorkerDescription, encode_description

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping

    from vllm.v1.kv_cache_interface import KVCacheConfig


def memory_type(device: torch.device) -> str:
    return "DRAM" if device.type == "cpu" else "VRAM"


def allocations(caches: Collection[torch.Tensor]) -> list[tuple[int, int]]:
    storages = [cache.untyped_storage() for cache in caches]
    return sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})


class WorkerSide:
    """One worker's transfers, as the model runner sees them.

    Args:
        stream_pieces: of a row of block ids, where prompts are read while they are computed, see
            ``stream.progress``; 0 where they are not.
        max_reuse_blocks: blocks of the longest prompt, where blocks of finished requests are reused
            across engines; 0 where they are not.
    """

    def __init__(
        self,
        engine_id: str,
        config: ConnectorConfig,
        facts: dict[str, str],
        kv_cache_config: KVCacheConfig,
        model: ModelFacts,
        *,
        keeps_host_copy: bool = False,
        pipeline: Pipeline = ONE_STAGE,
        stream_pieces: int = 0,
        max_reuse_blocks: int = 0,
    ) -> None:
        self.recorder = TransferRecorder()
        self.handshake: HandshakeMetadata | None = None
        self._engine_id = engine_id
        self._config = config
        self._facts = facts
        self._kv_cache_config = kv_cache_config
        self._model = model
        self._publisher: Publisher | None = None
        generations: GenerationTable | None = None
        if max_reuse_blocks:
            num_cells = max(MIN_CELLS, max_reuse_blocks)
            generations = GenerationTable(kv_cache_config.num_blocks, num_cells)
        progress = ProgressTable(stream_pieces) if stream_pieces else None
        self._tables = WorkerTables(progress, generations)
        self._agent = NixlAgent(config)
        self._mapped = Mapped(config)
        self._thread: TransferThread | None = None
        self._keeps_host_copy = keeps_host_copy
        self._pipeline = pipeline
        self._host: HostBuffer | None = None
        self._last_blocks: LastBlocks | None = None
        self._loads: dict[str, Load] = {}
        self._outcomes = Outcomes()
        self.unread: set[str] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        self._pipeline.check_caches(len(caches))
        layers = [group.layer_names for group in self._kv_cache_config.kv_cache_groups]
        if self._keeps_host_copy:
            self._host = HostBuffer(caches, self._kv_cache_config.num_blocks, layers)
            caches = self._host.views
        if needs_zeroed_blocks(self._kv_cache_config):
            groups = groups_of(self._kv_cache_config)
            num_blocks = self._kv_cache_config.num_blocks
            self._last_blocks = LastBlocks(caches, layers, groups, num_blocks)
        device = next(iter(caches.values())).device
        layout = cache_layout(caches, self._kv_cache_config, self._model)
        layout, splits = self._pipeline.place(layout)
        ranges = allocations(caches.values())
        self._mapped.prepare(ranges, is_on_gpu=device.type == "cuda")
        local = LocalWorker(
            self._engine_id,
            self._facts,
            layout,
            memory_type=memory_type(device),
            device_id=device.index or 0,
            other_splits=splits,
            mapper=self._mapped.mapper,
            tables=self._tables,
        )
        progress, fences = self._tables.progress, self._tables.fences
        if progress is not None:
            on_device = local.memory_type != "DRAM"
            self._publisher = Publisher(progress, fences, is_on_device=on_device)
        self._agent.register(ranges, local.memory_type, local.device_id)
        self._tables.register(self._agent)
        self.handshake = HandshakeMetadata(
            encode_description(self._describe(local)),
            None if self._tables.generations is None else self._tables.generations.offer,
        )
        self._thread = TransferThread(
            *(self._agent, self._config, local, self.recorder),
            lambda: self._select_device(local),
            (lambda peer: self._probe(device, peer)) if self._config.transport_probe else None,
            self._publisher,
        )
        self._thread.start()
        self._log_registered(local)

    def _log_registered(self, local: LocalWorker) -> None:
        layout = local.layout
        num_bytes = sum(block_bytes(layout, one) * len(one.names) for one in layout.families)
        logger.info(
            "registered the KV cache of engine %s, %s: %d layers in %d groups, %d blocks of %d "
            "bytes over all layers, %s, backends %s",
            *(self._engine_id, describe_place(layout), layout.num_regions, len(layout.groups)),
            *(layout.num_blocks, num_bytes, local.memory_type, "+".join(self._config.backends)),
        )

    def prepare_step(self, step: StepMetadata) -> None:
        if self._publisher is not None:
            self._publisher.prepare(step.chunks, step.restarts)

    def start_step(self, step: StepMetadata) -> None:
        thread = self._require_thread()
        if step.fence_key:
            self._tables.fences.arm(step.fence_key)
        if step.wakeup:
            number = worker_number(self._pipeline.index, self._model.rank)
            thread.outcomes.on_first = notifier(step.wakeup, number)
        if step.renews is not None:
            thread.submit(Renew(step.renews))
        for wait in step.waits:
            thread.submit(wait)
        for load in step.loads:
            if load.awaited:
                self._loads[load.request_id] = load
                if self._last_blocks is not None:
                    self._last_blocks.clear(load)
            thread.submit(load)
        if self._publisher is not None:
            self._publisher.ended(step.holds)
        for hold in step.holds:
            thread.submit(hold)
        for request_id in step.releases:
            thread.submit(Release(request_id))
        for request_id in step.given_up:
            thread.submit(GiveUp(request_id))

    def take_outcomes(self) -> Outcomes:
        """They are kept for ``take_metadata``; ``unread`` ones of the failed are not for vLLM."""
        outcomes = self._outcomes = self._require_thread().outcomes.take()
        if self._host is not None:
            for request_id in outcomes.received - outcomes.failed.keys():
                if request_id in self._loads:
                    blocks = self._loads[request_id].blocks
                    self._host.restore([one.block_ids for one in blocks])
        failed = (name for name in outcomes.failed if name in self._loads)
        self.unread = {name for name in failed if self._loads[name].recomputes}
        return outcomes

    def save(self, step: StepMetadata) -> None:
        if self._publisher is not None and step.chunks:
            self._publisher.launched(step.chunks)
            if len(self._publisher):
                self._require_thread().submit(Look())
        if self._host is not None:
            for block_ids in step.saves:
                self._host.save(block_ids)

    def take_metadata(self) -> WorkerMetadata | None:
        outcomes, self._outcomes = self._outcomes, Outcomes()
        unread, self.unread = self.unread, set()
        for request_id in outcomes.received:
            self._loads.pop(request_id, None)
        settled = dict.fromkeys(outcomes.settled, 1)
        ends, gauges = (outcomes.failed, outcomes.expired), self.recorder.take_gauges()
        told = WorkerMetadata(outcomes.late, settled, *ends, unread, gauges)
        return None if told == WorkerMetadata() else told

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        if self._tables.generations is not None:
            self._tables.generations.close()
        self._mapped.close()

    def _describe(self, local: LocalWorker) -> WorkerDescription:
        return WorkerDescription(
            engine_id=self._engine_id,
            facts=self._facts,
            agent_metadata=self._agent.metadata(),
            memory_type=local.memory_type,
            device_id=local.device_id,
            layout=local.layout,
            lease_seconds=self._config.kv_lease_duration,
            mapped=self._mapped.offer,
            tables=self._tables.places,
        )

    def _probe(self, device: torch.device, peer: Link) -> Generator[None]:
        scratch = torch.empty(probe.PROBE_BYTES[-1], dtype=torch.uint8, device=device)
        kind, index = memory_type(device), device.index or 0
        local = probe.Memory(scratch.data_ptr(), scratch.nbytes, kind, index, scratch)
        remote = probe.Memory(
            *probe.longest_run(peer.plan.remote), peer.memory_type, peer.device_id
        )
        with self._agent.registered((local.address, local.num_bytes, index), kind):
            speed = yield from probe.measure(self._agent, peer.agent_name, local, remote)
        if speed is None:
            logger.warning("self-probe: no read from %s ended in time", peer.key)
            return
        slow = kind == "VRAM" and speed.bytes_per_second < probe.SLOW_BYTES_PER_SECOND
        text = probe.describe(speed, ucx_log.transports())
        logger.log(
            logging.WARNING if slow else logging.INFO,
            "%s%s",
            text,
            "; expected NVLink, PCIe peer access or RDMA: check UCX_TLS" if slow else "",
        )

    def _require_thread(self) -> TransferThread:
        if self._thread is None:
            raise UnsupportedError("the KV cache was not registered before its first use")
        return self._thread

    @staticmethod
    def _select_device(local: LocalWorker) -> None:
        if local.memory_type == "VRAM":
            torch.accelerator.set_device_index(local.device_id)


def metadata_of(value: Any) -> StepMetadata:
    if not isinstance(value, StepMetadata):
        raise TypeError(f"expected StepMetadata, got {type(value).__name__}")
    return value
