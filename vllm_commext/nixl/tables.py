"""What a worker has that peers read beside its cache."""

from __future__ import annotations

from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.reuse.offers import GenerationTable
from vllm_commext.nixl.stream.progress import ProgressTable
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire.description import described


class WorkerTables:
    """One worker's tables.

    Attributes:
        fences: the nonces of its finished prefills.
        progress: how far prompts are that are read while they are computed, None where none are.
        generations: of its blocks, None where none are reused.
        by_name: all of their tables.
    """

    def __init__(
        self, progress: ProgressTable | None = None, generations: GenerationTable | None = None
    ) -> None:
        self.fences = FenceTable()
        self.progress = progress
        self.generations = generations
        tables = [self.fences.table]
        tables += progress.tables if progress is not None else ()
        tables += [generations.table] if generations is not None else []
        self.by_name = {table.name: table for table in tables}

    def register(self, agent: NixlAgent) -> None:
        for table in self.by_name.values():
            table.register(agent)

    def described(self) -> dict[str, int]:
        return described({name: table.place for name, table in self.by_name.items()})

    def end(self, hold: Hold) -> None:
        """Tell readers that a request's blocks are about to be freed."""
        if hold.fence_slot >= 0:
            self.fences.end(hold.fence_slot, hold.fence_nonce)
        if hold.stream_row >= 0 and self.progress is not None:
            self.progress.end(hold.stream_row)
