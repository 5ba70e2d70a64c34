"""Loads that workers run, and blocks of reads that did not end in time, which are kept out of use
until they do.

A read that NIXL was told to drop can still write its bytes later, so a late request's blocks must
not go to another request.  The scheduler side therefore takes one more reference on them, only
then lets the workers report the load as failed, and drops the reference when every worker says
that nothing is under way any more.  So a load can outlive its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Quarantine:
    """Loads under way, and those that are late.

    Without a block pool (the connector binds none before vLLM 0.30) a late load is not given up: it
    goes on until it ends.

    Args:
        num_workers: workers that must settle before blocks are given back.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: BlockPool | None = None
        self._loading: dict[str, LoadState] = {}
        self._late: dict[str, LoadState] = {}

    def bind(self, pool: BlockPool) -> None:
        """Learn of the pool that the blocks come from."""
        self._pool = pool

    def __len__(self) -> int:
        """Blocks that are kept out of use."""
        return sum(len(state.blocks) for state in self._late.values())

    @property
    def has_loads(self) -> bool:
        """Whether a load has begun that has neither ended nor been given up."""
        return bool(self._loading)

    def find(self, request_id: str) -> LoadState | None:
        """The request's load, if it is under way or late."""
        return self._loading.get(request_id) or self._late.get(request_id)

    def begin(self, state: LoadState) -> None:
        """The workers are told to fill the request's blocks."""
        if state.move(LoadPhase.LOADING):
            self._loading[state.request_id] = state

    def end(self, request_id: str) -> LoadState | None:
        """All workers have reported the load, which is returned; if it is late, its blocks are kept
        nevertheless."""
        state = self._loading.pop(request_id, None)
        if state is None:
            return self._late.get(request_id)
        state.move(LoadPhase.DONE)
        state.blocks = ()
        return state

    def note_late(self, request_ids: Iterable[str]) -> list[str]:
        """Workers say that loads are late: take their blocks out of use.  Returns those that the
        workers may report as failed."""
        given_up: list[str] = []
        for request_id in request_ids:
            state = self._loading.get(request_id)
            if self._pool is None or state is None or not state.move(LoadPhase.LATE):
                continue
            state.num_unsettled = self._num_workers
            self._pool.touch(state.blocks)
            self._late[request_id] = self._loading.pop(request_id)
            given_up.append(request_id)
        return given_up

    def note_settled(self, settled: Mapping[str, int]) -> None:
        """Workers say that nothing of these loads is under way; the last one frees the blocks."""
        for request_id, num_workers in settled.items():
            state = self._late.get(request_id)
            if state is None:
                continue
            state.num_unsettled -= num_workers
            if state.num_unsettled <= 0 and state.move(LoadPhase.DONE):
                assert self._pool is not None  # blocks are only kept where there is a pool
                self._pool.free_blocks(reversed(self._late.pop(request_id).blocks))
