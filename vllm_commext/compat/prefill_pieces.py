"""Cuts prompts into pieces so small that running answers keep their time per output token.

vLLM computes as much of prompts in a step as its step has room for, whatever the answers of the
same step lose by it, and has one threshold for long prompts, read in every step.  Before each step
it is set here to what the answers have to spare, where requests name limits (``tpot_ms`` and
``ttft_ms`` in their ``kv_transfer_params``).  Several prompts share that: each gets a part, so that
a short one ends early.  Hybrid models are left alone: their states are cut where blocks end.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_commext.nixl.step_budget import FIRST_TOKEN_MARGIN, Answer, Prompt, StepBudget
from vllm_commext.nixl.wire.params import TPOT, TTFT, limit_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MAX_SHARING = 8
"""Prompts of one step that are counted."""
_THRESHOLD = "long_prefill_token_threshold"


class PrefillPieces:
    """The pieces of one engine's prompts."""

    def __init__(self) -> None:
        self._budget = StepBudget()
        self._limits: dict[str, float] = {}
        # When an answer was seen first, and how many tokens it had then.
        self._begun: dict[str, tuple[float, int]] = {}
        self._own_threshold: int | None = None
        self._called_at = 0.0
        # Tokens of prompts in the two steps that were begun last.
        self._steps: list[int] = []
        self._has_stepped = self._has_step_under_way = False

    def add(self, request: Request) -> None:
        """A request came in."""
        limit = limit_of(request, TPOT)
        if limit is not None:
            self._limits[request.request_id] = limit

    def finish(self, request_id: str) -> None:
        """It has ended."""
        self._limits.pop(request_id, None)
        self._begun.pop(request_id, None)

    def note_scheduled(self, scheduled: SchedulerOutput) -> None:
        """A step begins."""
        if self._limits:
            drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            num_answers = len(scheduled.num_scheduled_tokens)
            prompts = scheduled.total_num_scheduled_tokens - num_answers - drafts
            self._steps = [*self._steps[-1:], max(0, prompts)]
            self._has_stepped = True

    def before_step(self, core: Any) -> None:
        """Set how much of each prompt the next step computes; ``core`` is vLLM's
        ``EngineCoreProc``."""
        scheduler = core.scheduler
        if not self._limits or getattr(scheduler.scheduler_config, _THRESHOLD, None) is None:
            self._restore(scheduler.scheduler_config)
            return
        now = time.monotonic()
        self._learn(now)
        self._has_step_under_way = bool(getattr(core, "batch_queue", None))
        under_way = self._steps[-1] if self._has_step_under_way and self._steps else None
        running = scheduler.running
        waiting = itertools.islice(scheduler.waiting, MAX_SHARING)
        prompts = [one for one in running if one.num_computed_tokens < one.num_prompt_tokens]
        prompts += [one for one in waiting if one.status != RequestStatus.WAITING_FOR_REMOTE_KVS]
        tokens = self._budget.prompt_tokens(
            now,
            [answer for one in running if (answer := self._answer_of(one, now)) is not None],
            [prompt for one in prompts if (prompt := _prompt_of(one)) is not None],
            None if under_way is None else self._budget.seconds(under_way),
        )
        if tokens is None:
            self._restore(scheduler.scheduler_config)
            return
        shared_by = min(max(1, len(prompts)), MAX_SHARING)
        self._cut(scheduler.scheduler_config, max(1, tokens // shared_by))

    def _cut(self, config: Any, tokens: int) -> None:
        """Have a step compute that many *tokens* of a prompt, or what the operator said."""
        if self._own_threshold is None:
            self._own_threshold = getattr(config, _THRESHOLD)
        own = self._own_threshold
        setattr(config, _THRESHOLD, min(tokens, own) if own else tokens)

    def _restore(self, config: Any) -> None:
        if self._own_threshold is not None:
            setattr(config, _THRESHOLD, self._own_threshold)
            self._own_threshold = None

    def _learn(self, now: float) -> None:
        """The time since the last call was that of the step whose end was waited for: with one
        under way before it, that one's."""
        seconds, self._called_at = now - self._called_at, now
        has_stepped, self._has_stepped = self._has_stepped, False
        if has_stepped and len(self._steps) == 2:
            self._budget.note_step(self._steps[0 if self._has_step_under_way else 1], seconds)

    def _answer_of(self, request: Request, now: float) -> Answer | None:
        """A running answer with a limit."""
        limit, num_tokens = self._limits.get(request.request_id), request.num_output_tokens
        if limit is None or not num_tokens:
            return None
        first_at, num_then = self._begun.setdefault(request.request_id, (now, num_tokens))
        left = request.max_tokens - num_tokens
        return Answer(first_at, num_tokens - num_then + 1, left, limit)


def _prompt_of(request: Request) -> Prompt | None:
    """A prompt with a limit."""
    limit = limit_of(request, TTFT)
    if limit is None:
        return None
    end = request.arrival_time + FIRST_TOKEN_MARGIN * limit
    return Prompt(request.num_tokens - request.num_computed_tokens, end - time.time())
