"""Which step computes the last token of each prompt, and which blocks the prompt then has.

The scheduler tells workers of a request's blocks as they are added; only where a copy of the cache
is kept on the host, or where prompts are read while they are computed, does the connector have to
follow that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.nixl.prefill.prefill_state import PrefillState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class Progress:
    """What a step does for one request.

    Attributes:
        request_id: the request.
        begins: ``block_ids`` are all of its blocks; otherwise they come behind those it has.
        block_ids: by group and position.
        num_computed: tokens that have been computed before the step.
        end: the same after the step.
    """

    request_id: str
    begins: bool
    block_ids: Sequence[Sequence[int]]
    num_computed: int
    end: int


def progress_in(step: SchedulerOutput) -> Iterator[Progress]:
    """What a step does for each of its requests."""
    counts = step.num_scheduled_tokens
    for new in step.scheduled_new_reqs:
        end = new.num_computed_tokens + counts.get(new.req_id, 0)
        yield Progress(new.req_id, True, new.block_ids, new.num_computed_tokens, end)
    cached = step.scheduled_cached_reqs
    columns = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)
    for request_id, block_ids, num_computed in zip(*columns, strict=True):
        end = num_computed + counts.get(request_id, 0)
        begins = request_id in cached.resumed_req_ids
        yield Progress(request_id, begins, block_ids or (), num_computed, end)


def completes(state: PrefillState, progress: Progress) -> bool:
    """Whether a step completes a prompt, whose blocks are followed."""
    if progress.begins:
        state.block_ids = []
    if progress.block_ids:
        state.block_ids = state.block_ids or [[] for _ in progress.block_ids]
        for known, added in zip(state.block_ids, progress.block_ids, strict=True):
            known += added
    return progress.num_computed < state.request.num_prompt_tokens <= progress.end
