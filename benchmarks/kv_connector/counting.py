"""How many descriptors NIXL moves for a read: its own count, after it has joined neighbours."""

import os
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from kv_connector import in_tree
from kv_connector.shapes import Caches
from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.geometry.plan import Blocks, plan_read
from vllm_commext.nixl.transport.agent import DONE

PREFILL = "prefill"
Groups = list[list[int]]


class Counter:
    """Both variants' lists on the agent of vLLM's worker, which counts descriptors.

    A second worker of vLLM's plays the prefill side.
    """

    def __init__(
        self,
        model: Path,
        cache_config: KVCacheConfig,
        caches: tuple[Caches, Caches],
        layouts: tuple[CacheLayout, CacheLayout],
    ) -> None:
        self._prefill = in_tree.make_worker(model, caches[1], cache_config)
        self._worker = in_tree.make_worker(model, caches[0], cache_config)
        metadata = in_tree.own_metadata(self._prefill)
        metadata.engine_id = PREFILL
        in_tree.add_peer(self._worker, metadata)
        self._plan = plan_read(*layouts, local_device=0, remote_device=0)
        self._api = self._worker.nixl_wrapper
        name = self._worker._remote_agents[PREFILL][(0, 0)]
        self._local = self._api.prep_xfer_dlist("", self._plan.local_rows, "DRAM")
        self._remote = self._api.prep_xfer_dlist(name, self._plan.remote_rows, "DRAM")

    def ours(self, local: list[Blocks], remote: Groups, num_tokens: int) -> int:
        """Descriptors by our plan."""
        pairs = self._plan.pairs(local, remote, num_tokens=num_tokens, num_remote_tokens=num_tokens)
        return self._count(self._local, pairs.local, self._remote, pairs.remote)

    def vllm(self, local: Groups, remote: Groups) -> int:
        """Descriptors in the order of vLLM's worker."""
        worker = self._worker
        return self._count(
            worker.src_xfer_handles_by_block_size[worker.block_size],
            in_tree.descriptor_ids(worker, in_tree.DECODE, local),
            worker.dst_xfer_side_handles[PREFILL][0],
            in_tree.descriptor_ids(worker, PREFILL, remote),
        )

    def _count(self, local: Any, local_ids: Any, remote: Any, remote_ids: Any) -> int:
        read = self._api.make_prepped_xfer("READ", local, local_ids, remote, remote_ids)
        state = self._api.transfer(read)
        while state != DONE:
            os.sched_yield()
            state = self._api.check_xfer_state(read)
        found = self._api.get_xfer_telemetry(read).descCount
        self._api.release_xfer_handle(read)
        return found
