"""Negative controls for the decode side: connectors that damage what they receive, all of it or
what requests with ``DAMAGE_MARK`` in their id receive, so that a comparison must notice, or that
leak. They are named in ``--kv-transfer-config`` with this module as
``kv_connector_module_path``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.kit import DAMAGE_MARK
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.metadata import StepMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.commext.testing")

# The top bit of every byte: of a float that is its sign, the lowest bit of its exponent and part of
# its mantissa, so that numbers change and stay numbers.
FLIPPED_BITS = 0x80


def flip_block(cache: torch.Tensor, block_id: int, num_blocks: int) -> None:
    """Flip bits in every byte of one block of one layer's cache, in place.

    ``cache``: any dtype; its first dimension is ``num_blocks`` blocks, or a multiple of it where a
    block is several neighbouring rows."""
    rows = cache.shape[0] // num_blocks
    block = cache[block_id * rows : (block_id + 1) * rows]
    damaged = block.contiguous().view(torch.uint8) ^ FLIPPED_BITS
    block.copy_(damaged.view(cache.dtype).view(block.shape))


class CorruptingNixlConnector(CommextNixlConnector):
    """Flips bits in the first block of each group of each load after it has arrived, before the
    request runs."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._layers = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self._caches: dict[str, torch.Tensor] = {}
        self._first_blocks: dict[str, list[int | None]] = {}
        logger.warning("this connector damages every load on purpose: it is for tests only")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        if isinstance(step, StepMetadata):
            for load in step.loads:
                if load.awaited:
                    first = [(blocks.block_ids or [None])[0] for blocks in load.blocks]
                    self._first_blocks[load.request_id] = first
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._damage(results.finished_recving)
        return results

    def _damage(self, received: Iterable[str]) -> None:
        for request_id in received:
            if not self._is_meant(request_id):
                self._first_blocks.pop(request_id, None)
                continue
            first = self._first_blocks.pop(request_id, [])
            for block_id, layers in zip(first, self._layers, strict=False):
                if block_id is not None:
                    self._flip(block_id, layers)
            logger.warning("request %s: damaged blocks %s on purpose", request_id, first)

    def _is_meant(self, request_id: str) -> bool:
        return True

    def _flip(self, block_id: int, layers: Iterable[str]) -> None:
        """Damage a block once in each layer of its group: other groups may share its bytes."""
        for cache in {
            self._caches[name].data_ptr(): self._caches[name] for name in layers
        }.values():
            flip_block(cache, block_id, self._num_blocks)


class LeakingNixlConnector(CommextNixlConnector):
    """Keeps a MiB for each load that has failed."""

    kept: ClassVar[list[bytes]] = []

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        failed = {*(results.failed_recving or ()), *self.worker_side.unread}
        self.kept.extend(os.urandom(1 << 20) for _ in failed)
        return results


class MarkedCorruptingConnector(CorruptingNixlConnector):
    """Damages only the loads of requests with ``DAMAGE_MARK`` in their id."""

    def _is_meant(self, request_id: str) -> bool:
        return DAMAGE_MARK in request_id
