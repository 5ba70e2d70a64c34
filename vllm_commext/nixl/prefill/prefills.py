"""The prefill engine's scheduler side: prompts that are computed for other engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_commext.compat.kv_connector import drop_last_prompt_token, end_after_one_token
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.first_token import offer
from vllm_commext.nixl.geometry.plan import blocks_to_offer, is_complete, keeps_every_token
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.prefill.fence import FenceSlots
from vllm_commext.nixl.prefill.prefill_state import (
    PrefillKeys,
    PrefillPhase,
    PrefillState,
    completes,
    prefill_key_of,
    progress_in,
)
from vllm_commext.nixl.requests import Hold, Listed, RemoteRequest
from vllm_commext.nixl.stream.producer import StreamDirectory, StreamProducer
from vllm_commext.nixl.wire.params import TransferParams, write_params
from vllm_commext.nixl.wire.prompt import digests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Prefills:
    """Prompts of one engine that others read; ``num_held`` are kept for their readers."""

    def __init__(self, engine: EngineContext) -> None:
        self.directory = StreamDirectory()
        self.num_held = 0
        self._engine = engine
        self._fences = FenceSlots(engine.fence_key)
        self._leaves_last_token = not keeps_every_token(engine.groups)
        self._producer = StreamProducer(
            self._fences, self.directory, engine.streaming, engine.identity
        )
        self._keys = PrefillKeys()
        self._states: dict[str, PrefillState] = {}
        self._log = RateLimitedLog()

    def add(self, request: Request) -> str:
        """A prompt is to be computed for another engine: cut it where a state or a window is to be
        handed over.  Returns how its KV cache is handed over, a ``Handover``.

        The decode engine has to compute the last token for its logits.  A state cannot be taken
        back by a token, and after the last token a window no longer holds all that this one attends
        to: the prefill engine must stop one token early.
        """
        state = self._states[request.request_id] = PrefillState(request)
        key = prefill_key_of(request.kv_transfer_params)
        if key:
            end_after_one_token(request)
            self._keys.add(key, state)
        state.is_cut = self._can_be_cut(request)
        if state.is_cut:
            drop_last_prompt_token(request)
        return self._producer.add(state, ends_well=state.is_cut or not self._leaves_last_token)

    def _can_be_cut(self, request: Request) -> bool:
        sampling = request.sampling_params
        wants_all_logprobs = sampling is not None and sampling.prompt_logprobs is not None
        return self._leaves_last_token and request.num_prompt_tokens > 1 and not wants_all_logprobs

    def release(self, keys: Sequence[str]) -> int:
        found = [state for key in keys if (state := self._keys.release(key)) is not None]
        self._release(found)
        return len(found)

    def release_all(self) -> None:
        held = [one for one in self._states.values() if one.phase is PrefillPhase.HELD]
        for state in held:
            self._producer.withdraw(state)
        self._release(held)

    def forget_computed(self, is_concerned: Callable[[Request], bool]) -> None:
        """Hand over nothing of prompts whose computation has begun."""
        for state in self._states.values():
            has_begun = state.slot >= 0 or state.request.num_computed_tokens > 0
            if has_begun and is_concerned(state.request) and state.move(PrefillPhase.UNWANTED):
                self._producer.withdraw(state)

    def _release(self, states: Iterable[PrefillState]) -> None:
        kept = (state.request_id for state in states if state.renounce())
        self._engine.step.releases += kept

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...], *, is_computed: bool = True
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take a request's end: whether its blocks must be kept, and its parameters."""
        state = self._states.get(request.request_id)
        if state is None:
            return False, None
        self._producer.note_finish(state)
        params = self._offer(state, block_ids) if is_computed else None
        if params is not None:
            return True, params
        if state.row < 0:
            self._remove(state)
            return False, None
        # Its blocks may be under reads: they are free when all workers have replaced the nonce.
        self._keys.forget(state)
        state.move(PrefillPhase.RELEASED)
        self._hold(state, 0.0)
        return True, None

    def _remove(self, state: PrefillState) -> None:
        state.move(PrefillPhase.FREE)
        self._keys.forget(state)
        del self._states[state.request_id]

    def _offer(
        self, state: PrefillState, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        request = state.request
        if request.status not in FINISHED or state.phase is PrefillPhase.UNWANTED:
            return None
        if self._leaves_last_token and not state.is_cut:
            return None
        # What was generated after the prompt is in no prompt that the offer could be compared with.
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        offered = blocks_to_offer(self._engine.groups, block_ids, num_tokens)
        if not is_complete(self._engine.groups, offered):
            return None
        if state.slot < 0:
            state.slot, _ = self._fences.take() or (-1, 0)
        if state.slot < 0:
            self._log.warning(
                "fences",
                f"request {state.request_id}: all prefill slots wait for their readers, its blocks "
                "are not kept; the decode engine will recompute",
            )
            return None
        state.move(PrefillPhase.HELD)
        state.held_since = time.monotonic()
        self.num_held += 1
        rest = self._producer.rest_of(state, offered)
        self._hold(state, self._engine.config.kv_lease_duration, rest)
        return self._describe(state, offered, num_tokens)

    def _hold(self, state: PrefillState, lease_seconds: float, rest: Listed = ()) -> None:
        nonce = self._fences.nonce_in(state.slot)
        hold = Hold(state.request_id, lease_seconds, state.slot, nonce, state.row, rest)
        self._engine.step.holds.append(hold)

    def _describe(
        self, state: PrefillState, offered: tuple[tuple[int, ...], ...], num_tokens: int
    ) -> dict[str, Any]:
        request, engine = state.request, self._engine
        remote = RemoteRequest(
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            host=engine.config.side_channel_host,
            port=engine.port,
            tp_size=engine.tp_size,
            pp_size=engine.pp_size,
            request_id=state.request_id,
            block_ids=offered,
            num_tokens=num_tokens,
            fence_slot=state.slot,
            fence_nonce=self._fences.nonce_in(state.slot),
        )
        token, sampling = (-1, "")
        if num_tokens == request.num_prompt_tokens and not self._leaves_last_token:
            token, sampling = offer(engine.sampler, request)
        if token >= 0:
            self._producer.tell_token(state, token, sampling)
        now = int(1000 * time.time())
        prompt = digests(engine.identity.prompt_of(request), num_tokens)
        transfer_params = TransferParams(remote, prompt, token, sampling, now)
        chunk_tokens = engine.streaming.chunk_tokens
        return write_params(transfer_params, engine.secret, chunk_tokens=chunk_tokens)

    def fill_step(self, taken: StepMetadata, scheduled: SchedulerOutput) -> None:
        if not self._engine.streaming.refusal:
            taken.chunks, taken.restarts = self._producer.take_step(self._states, scheduled)
        if taken.restarts:  # also of requests that were preempted and ended between two steps
            taken.holds = [
                replace(one, fence_nonce=self._fences.nonce_in(one.fence_slot))
                for one in taken.holds
            ]
        if self._engine.saves:
            taken.saves = [
                blocks_to_offer(
                    self._engine.groups, state.block_ids, state.request.num_prompt_tokens
                )
                for progress in progress_in(scheduled)
                if (state := self._states.get(progress.request_id)) is not None
                and completes(state, progress)
            ]

    def note_outcomes(self, sent: Iterable[str], expired: Iterable[str]) -> None:
        for request_id in expired:
            if (state := self._states.get(request_id)) is not None:
                state.has_expired = True
        for request_id in sent:
            if (state := self._states.get(request_id)) is not None:
                self._fences.give_back(state.slot)
                self._producer.give_back(state)
                self._remove(state)
                self._count_lease(state)

    def _count_lease(self, state: PrefillState) -> None:
        if state.held_since is not None:  # else it was kept until its readers were told of its end
            self.num_held -= 1
            seconds = time.monotonic() - state.held_since
            self._engine.recorder.observe(lease_age_seconds=seconds)
            self._engine.recorder.count(expired_requests=state.has_expired)
