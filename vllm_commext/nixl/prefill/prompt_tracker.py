"""Which step computes the last token of each prompt, and which blocks the prompt then has.

The scheduler tells workers of a request's blocks as they are added; only where a copy of the cache
is kept on the host does the connector have to follow that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class _Prompt:
    num_tokens: int
    block_ids: list[list[int]] = field(default_factory=list)


class PromptTracker:
    """Prompts that are being computed for other engines."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def add(self, request_id: str, num_tokens: int) -> None:
        """Follow a request whose prompt has ``num_tokens`` tokens."""
        self._prompts[request_id] = _Prompt(num_tokens)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._prompts.pop(request_id, None)

    def completed(self, step: SchedulerOutput) -> Iterator[tuple[int, list[list[int]]]]:
        """Prompts that this step completes: their tokens, and their blocks by group and
        position."""
        for request_id, num_computed in self._note_blocks(step):
            prompt = self._prompts[request_id]
            end = num_computed + step.num_scheduled_tokens.get(request_id, 0)
            if num_computed < prompt.num_tokens <= end:
                yield prompt.num_tokens, prompt.block_ids

    def _note_blocks(self, step: SchedulerOutput) -> Iterator[tuple[str, int]]:
        """Take in the step's blocks; gives the followed requests and their computed tokens."""
        for new in step.scheduled_new_reqs:
            if new.req_id in self._prompts:
                self._prompts[new.req_id].block_ids = [list(ids) for ids in new.block_ids]
                yield new.req_id, new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        columns = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)
        for request_id, block_ids, num_computed in zip(*columns, strict=True):
            if request_id not in self._prompts:
                continue
            prompt = self._prompts[request_id]
            if request_id in cached.resumed_req_ids:
                prompt.block_ids = []
            if block_ids is not None:
                prompt.block_ids = prompt.block_ids or [[] for _ in block_ids]
                for known, added in zip(prompt.block_ids, block_ids, strict=True):
                    known += added
            yield request_id, num_computed
