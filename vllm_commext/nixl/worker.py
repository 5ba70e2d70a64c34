"""The connector's worker side: registers the cache, and passes commands to the transfer thread and
outcomes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl import wire
from vllm_commext.nixl.agent import NixlAgent
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.fence import NUM_SLOTS
from vllm_commext.nixl.io_thread import GiveUp, TransferThread
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from vllm_commext.nixl.peers import LocalSide
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.regions import Region, region_of_cache
from vllm_commext.nixl.requests import Outcomes
from vllm_commext.nixl.topology import RankShape

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class CacheMemory:
    """A worker's cache tensors as memory.

    Attributes:
        regions: a region a layer, ordered by name.
        ranges: (address, bytes) of each allocation.
        memory_type: NIXL's name of the kind of memory.
        device_id: device index, 0 for host memory.
    """

    regions: tuple[Region, ...]
    ranges: tuple[tuple[int, int], ...]
    memory_type: str
    device_id: int


def cache_memory(caches: Mapping[str, torch.Tensor], num_blocks: int) -> CacheMemory:
    """Describe cache tensors, one for each layer.

    Raises:
        UnsupportedError: the tensors are on several devices, or a block is not one run of bytes.
    """
    devices = {cache.device for cache in caches.values()}
    if len(devices) != 1:
        raise UnsupportedError(
            f"expected the KV cache on one device, got {sorted(map(str, devices))}"
        )
    device = devices.pop()
    regions = [
        region_of_cache(
            name,
            address=cache.data_ptr(),
            shape=tuple(cache.shape),
            strides=cache.stride(),
            item_bytes=cache.element_size(),
            num_blocks=num_blocks,
        )
        for name, cache in sorted(caches.items())
    ]
    storages = [cache.untyped_storage() for cache in caches.values()]
    return CacheMemory(
        regions=tuple(regions),
        ranges=tuple(sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})),
        memory_type="DRAM" if device.type == "cpu" else "VRAM",
        device_id=device.index or 0,
    )


class WorkerSide:
    """One worker's transfers, as the model runner sees them.

    Args:
        engine_id: this engine's id.
        config: the connector's settings.
        shape: this rank's place in its engine.
        facts: this engine's configuration facts.
        num_blocks: blocks of the KV cache.
    """

    def __init__(
        self,
        engine_id: str,
        config: ConnectorConfig,
        shape: RankShape,
        facts: dict[str, str],
        num_blocks: int,
    ) -> None:
        self.recorder = TransferRecorder()
        self.handshake: HandshakeMetadata | None = None
        self._engine_id = engine_id
        self._config = config
        self._shape = shape
        self._facts = facts
        self._num_blocks = num_blocks
        self._agent = NixlAgent(config)
        self._thread: TransferThread | None = None
        self._local_blocks: dict[str, list[int]] = {}
        self._outcomes = Outcomes()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Make the cache readable and start the transfer thread."""
        memory = cache_memory(caches, self._num_blocks)
        self._agent.register(memory.ranges, memory.regions, memory.memory_type, memory.device_id)
        self.handshake = HandshakeMetadata(wire.encode_description(self._describe(memory)))
        local = LocalSide(self._engine_id, self._shape, self._facts, memory.regions)
        self._thread = TransferThread(
            self._agent, self._config, local, self.recorder, lambda: self._select_device(memory)
        )
        self._thread.start()
        logger.info(
            "rank %d of engine %s: %d regions of %d blocks registered, %d bytes a block in all, "
            "%s, backends %s",
            self._shape.tp_rank,
            self._engine_id,
            len(memory.regions),
            self._num_blocks,
            sum(region.block_bytes for region in memory.regions),
            memory.memory_type,
            "+".join(self._config.backends),
        )

    def start_step(self, step: StepMetadata) -> None:
        """Pass on what the scheduler side asks for in this step."""
        thread = self._require_thread()
        for load in step.loads:
            if load.awaited:
                self._local_blocks[load.request_id] = load.local_block_ids
            thread.submit(load)
        for hold in step.holds:
            thread.submit(hold)
        for request_id in step.given_up:
            thread.submit(GiveUp(request_id))

    def take_outcomes(self) -> Outcomes:
        """What ended since the last call; the late and settled loads are kept for
        ``take_metadata``."""
        self._outcomes = self._require_thread().take_outcomes()
        return self._outcomes

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the loads that the last outcomes say have failed."""
        failed = self._outcomes.failed
        return {block for name in failed for block in self._local_blocks.get(name, ())}

    def take_metadata(self) -> WorkerMetadata | None:
        """What the scheduler side must know beyond the outcomes; call it last in a step."""
        outcomes, self._outcomes = self._outcomes, Outcomes()
        for request_id in outcomes.received:
            self._local_blocks.pop(request_id, None)
        if not outcomes.late and not outcomes.settled:
            return None
        return WorkerMetadata(outcomes.late, dict.fromkeys(outcomes.settled, 1))

    def close(self) -> None:
        """End the transfer thread; bounded."""
        if self._thread is not None:
            self._thread.stop()

    def _describe(self, memory: CacheMemory) -> wire.WorkerDescription:
        return wire.WorkerDescription(
            engine_id=self._engine_id,
            tp_rank=self._shape.tp_rank,
            tp_size=self._shape.tp_size,
            facts=self._facts,
            agent_name=self._agent.name,
            agent_metadata=self._agent.metadata(),
            memory_type=memory.memory_type,
            device_id=memory.device_id,
            num_blocks=self._num_blocks,
            region_names=[region.name for region in memory.regions],
            base_addresses=[region.base_address for region in memory.regions],
            stride_bytes=[region.stride_bytes for region in memory.regions],
            block_bytes=[region.block_bytes for region in memory.regions],
            fence_address=self._agent.board.epochs.ctypes.data,
            num_fence_slots=NUM_SLOTS,
        )

    def _require_thread(self) -> TransferThread:
        if self._thread is None:
            raise UnsupportedError("the KV cache was not registered before its first use")
        return self._thread

    @staticmethod
    def _select_device(memory: CacheMemory) -> None:
        if memory.memory_type == "VRAM":
            torch.accelerator.set_device_index(memory.device_id)


def metadata_of(value: Any) -> StepMetadata:
    """The step's metadata, checked."""
    if not isinstance(value, StepMetadata):
        raise TypeError(f"expected StepMetadata, got {type(value).__name__}")
    return value
