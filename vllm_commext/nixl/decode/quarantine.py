"""Blocks of reads that did not end in time are kept out of use until they do.

A read that NIXL was told to drop can still write its bytes later, so a late request's blocks must
not go to another request.  The scheduler side therefore takes one more reference on them, only
then lets the workers report the load as failed, and drops the reference when every worker says
that nothing is under way any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Quarantine:
    """Loads under way, and the blocks kept for those that are late.

    Without a block pool (the connector binds none before vLLM 0.30) a late load is not given up: it
    goes on until it ends.

    Args:
        num_workers: workers that must settle before blocks are given back.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: BlockPool | None = None
        self._loading: dict[str, Sequence[KVCacheBlock]] = {}
        self._kept: dict[str, Sequence[KVCacheBlock]] = {}
        self._unsettled: dict[str, int] = {}
        self._given_up: list[str] = []

    def bind(self, pool: BlockPool) -> None:
        """Learn of the pool that the blocks come from."""
        self._pool = pool

    def __len__(self) -> int:
        """Blocks that are kept out of use."""
        return sum(len(blocks) for blocks in self._kept.values())

    def note_load(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """A load into these blocks begins."""
        self._loading[request_id] = list(blocks)

    def note_end(self, request_id: str) -> None:
        """All workers have reported the load."""
        self._loading.pop(request_id, None)

    def is_loading(self, request_id: str) -> bool:
        """Whether a load has begun, and neither ended nor been given up."""
        return request_id in self._loading

    @property
    def has_loads(self) -> bool:
        """Whether a load has begun that has neither ended nor been given up."""
        return bool(self._loading)

    @property
    def has_given_up(self) -> bool:
        """Whether there are loads for ``take_given_up``."""
        return bool(self._given_up)

    def note_late(self, request_ids: Iterable[str]) -> None:
        """Workers say that loads are late: take their blocks out of use."""
        for request_id in request_ids:
            blocks = self._loading.pop(request_id, None)
            if self._pool is None or blocks is None:
                continue
            self._pool.touch(blocks)
            self._kept[request_id] = blocks
            self._unsettled[request_id] = self._num_workers
            self._given_up.append(request_id)

    def take_given_up(self) -> list[str]:
        """Loads whose blocks are now kept, and that the workers may report as failed."""
        taken, self._given_up = self._given_up, []
        return taken

    def note_settled(self, settled: Mapping[str, int]) -> None:
        """Workers say that nothing of these loads is under way; the last one frees the blocks."""
        for request_id, num_workers in settled.items():
            if request_id not in self._kept:
                continue
            self._unsettled[request_id] -= num_workers
            if self._unsettled[request_id] <= 0:
                del self._unsettled[request_id]
                self._free(self._kept.pop(request_id))

    def _free(self, blocks: Sequence[KVCacheBlock]) -> None:
        assert self._pool is not None  # blocks are only kept where there is a pool
        self._pool.free_blocks(reversed(blocks))
