"""The decode engine's scheduler side: requests whose prompts other engines have, from their arrival
until their blocks are here, and what workers must know of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.decode.askers import StreamAsker
from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState, Quarantine, Source, TokenPhase
from vllm_commext.nixl.decode.prompt_match import PromptMatch, Trust
from vllm_commext.nixl.decode.remote_tokens import RemoteTokens
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.first_token import FirstToken, refusal_of
from vllm_commext.nixl.geometry.plan import blocks_to_fill, is_at_block_boundary
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.metadata import WorkerMetadata
from vllm_commext.nixl.recorder import FAILURES, FIRST_TOKENS, HANDOVERS
from vllm_commext.nixl.requests import Load, Wait
from vllm_commext.nixl.reuse import ReuseSide
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.wire.params import (
    TransferParams,
    asks_for_stream,
    is_for_prefill,
    key_of,
    params_of,
    place_of_stream,
    read_params,
)
from vllm_commext.nixl.wire.prompt import OtherPromptError, OtherWeightsError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class RemotePrompts:
    """Prompts of other engines that this one reads; ``quarantine`` has the loads under way."""

    def __init__(self, engine: EngineContext, reuse: ReuseSide) -> None:
        config = engine.config
        limits = config.stream_begin_timeout, config.handshake_timeout
        self.quarantine = Quarantine(engine.tp_size * engine.pp_size)
        self._engine = engine
        self._reuse = reuse
        self._asker = StreamAsker(engine.client, *limits, engine.wakeup.notify)
        self.tokens = RemoteTokens(engine, self._asker)
        self._match = PromptMatch(engine.groups, engine.sampler, engine.identity)
        self._trust = Trust(config.kv_lease_duration)
        self._states: dict[str, LoadState] = {}
        self._unread: list[LoadState] = []
        self._keep_blocks: Callable[[Request, int], None] = lambda request, num_tokens: None
        self._log = RateLimitedLog()

    def add(self, request: Request) -> None:
        """A request came in whose prompt another engine computes: have its blocks kept where they
        are until there is room for them here, and look whether the first token is there."""
        is_streamed = asks_for_stream(params_of(request))
        source = Source.STREAMED if is_streamed else Source.GIVEN
        phase = TokenPhase.READY if self.tokens.resume(request) else TokenPhase.AWAITED
        state = LoadState(request, source, token_phase=phase)
        self._states[request.request_id] = state
        if is_streamed:
            self._ask(state)
        else:
            self._read(state)

    def search(self, request: Request) -> None:
        """A request came in whose prompt is computed here: look for what another engine has of it
        that has begun its answer."""
        is_step_one = is_for_prefill(params_of(request))
        answer = [] if is_step_one else self.tokens.resume(request)
        if self._reuse.search(request, answer):
            state = LoadState(request, Source.REUSED, token_phase=TokenPhase.COMPUTED)
            self._states[request.request_id] = state

    def _ask(self, state: LoadState) -> None:
        params, engine = params_of(state.request) or {}, self._engine
        no_token, no_stream = refusal_of(engine.sampler, state.request), engine.streaming.refusal
        if no_token:
            self.tokens.refuse(state, no_token)
        if no_stream:
            text = f"the request is to be read while it is computed, which {no_stream.meaning}"
            self._note_answer(state, ProtocolError(text))
            return
        try:
            place = place_of_stream(params, engine.secret)
        except ProtocolError as error:
            self._note_answer(state, error)
        else:
            awaits_token = state.token_phase is TokenPhase.AWAITED
            self._asker.watch(state.request_id, key_of(params), place, awaits_token=awaits_token)

    def _note_answer(self, state: LoadState, answer: TransferParams | CommextError) -> None:
        state.move(LoadPhase.KNOWN)
        self._asker.settle(state.request_id)
        try:
            if isinstance(answer, TransferParams):
                self._match.check(state.request, answer)
        except ProtocolError as error:
            answer = error
        state.answer = answer
        if not isinstance(answer, TransferParams):
            self.tokens.give_up(state)
            reason = self._engine.streaming.refusal or Handover.NOT_FOUND
            self._engine.recorder.count_reason(HANDOVERS, reason)
            return
        self._engine.step.waits.append(Wait(state.request_id, answer.remote))
        self._engine.recorder.count_reason(HANDOVERS, Handover.STREAMED)

    def _read(self, state: LoadState) -> None:
        state.move(LoadPhase.KNOWN)
        is_awaited = state.token_phase is TokenPhase.AWAITED
        self._engine.recorder.count_reason(HANDOVERS, Handover.NO_KEY)
        try:
            found = read_params(params_of(state.request) or {}, self._engine.secret)
            self._match.check(state.request, found)
        except ProtocolError as error:
            state.answer = error
            if is_awaited and isinstance(error, OtherPromptError):
                self.tokens.refuse(state, FirstToken.DIFFERS)
            self.tokens.give_up(state)
            return
        state.answer, state.arrived = found, time.monotonic()
        state.is_void = not self._trust.admits(found.computed_at)
        if state.is_void and is_awaited:
            self.tokens.refuse(state, FirstToken.DIFFERS)
        elif not state.is_void:
            self._engine.step.waits.append(Wait(state.request_id, found.remote))
            self.tokens.offer(state, found.first_token, found.sampling)

    def is_loading(self, request_id: str) -> bool:
        """True if a request waits for blocks that the workers load, or for an answer, which ends
        with a notification; with one it can still wait for something else, such as its grammar."""
        state = self._states.get(request_id)
        if state is None or state.phase is not LoadPhase.ASKED:
            return state is not None and state.phase is LoadPhase.LOADING
        if state.source is Source.REUSED:
            return not self._reuse.is_answered(request_id)
        return self._asker.answer(request_id) is None

    def _is_answered(self, state: LoadState) -> bool:
        if state.phase is LoadPhase.ASKED:
            answer = self._asker.answer(state.request_id)
            if answer is None:
                return False
            self._note_answer(state, answer)
        return True

    def note_step(self, scheduler: Any) -> None:
        """The engine is going to take a step."""
        # Gives the blocks of a request's first tokens, which it still holds, to the prefix cache.
        self._keep_blocks = scheduler.kv_cache_manager.cache_blocks
        self._reuse.note_step(scheduler)

    def take_first_tokens(
        self, *, is_idle: bool = False
    ) -> list[tuple[Request, list[int], FirstToken]]:
        return self.tokens.take(self._find_answered, is_idle=is_idle)

    def _find_answered(self, request_id: str) -> LoadState | None:
        state = self._states.get(request_id)
        return state if state is not None and self._is_answered(state) else None

    def note_first_token(self, request: Request, way: FirstToken) -> None:
        self._engine.recorder.count_reason(FIRST_TOKENS, way)
        if (state := self._states.get(request.request_id)) is not None:
            is_sent = way in (FirstToken.PREFILL, FirstToken.RESUMED)
            state.move(TokenPhase.SENT if is_sent else TokenPhase.COMPUTED)

    def take_unread(self) -> list[tuple[str, bool]]:
        taken, self._unread = self._unread, []
        return [(state.request_id, state.must_compute) for state in taken]

    def num_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        if state.source is Source.REUSED:
            return self._reuse.num_tokens(state, num_computed_tokens)
        if not self._is_answered(state):
            return None
        if state.phase is not LoadPhase.KNOWN or state.is_void:
            return 0
        if request.skip_reading_prefix_cache:
            return 0  # the logprobs of the prompt's tokens come of computing them
        if not is_at_block_boundary(self._engine.groups, num_computed_tokens):
            return 0  # a shared block is being copied for this request: compute the rest here
        try:
            num_tokens = self._match.num_tokens(request, state.params.remote)
        except OtherPromptError:
            return 0  # as routers do with the second of a request's prompts: compute it here
        except CommextError:
            # The load fails with the reason, so that vLLM's policy decides between error and
            # recomputation.
            num_tokens = self._match.most_tokens(request)
        return max(0, num_tokens - num_computed_tokens)

    def plan(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        state = self._states.get(request.request_id)
        if state is None or state.phase is not LoadPhase.KNOWN:
            return
        load = Load(state.request_id, None, awaited=num_external_tokens > 0)
        if state.source is Source.REUSED:
            load.remote = self._reuse.take(state, num_external_tokens)
            load.num_tokens = load.remote.num_tokens if load.remote is not None else 0
        else:
            self._describe(state, load)
            if not self._reuse.has_steps:  # nothing sends a first token before the engine's steps
                self.tokens.refuse(state, FirstToken.ENGINE)
        load.recomputes = self._reuse.has_steps
        if state.token_phase is not TokenPhase.AWAITED:
            state.answer = None  # as long as the prompt
        if load.awaited:
            self._begin(state, load, blocks, num_external_tokens)
        else:
            state.move(LoadPhase.DONE)
        if load.awaited or state.source is not Source.REUSED:
            self._engine.step.loads.append(load)

    def _describe(self, state: LoadState, load: Load) -> None:
        try:
            load.num_tokens = self._match.num_tokens(state.request, state.params.remote)
            load.remote = state.params.remote
        except CommextError as error:
            # Nothing is sent to a host that untrusted parameters name, nothing of theirs released.
            load.refusal = str(error)
            load.num_tokens = self._match.most_tokens(state.request)
            if isinstance(error, OtherWeightsError):
                load.remote = error.remote
            if isinstance(error, OtherPromptError):
                if load.remote is None:
                    self._engine.recorder.count_reason(FAILURES, "request")
                text = f"request {state.request_id}: KV cache not loaded, computed here: {error}"
                self._log.warning("prompt", text)

    def _begin(
        self, state: LoadState, load: Load, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        load.blocks = blocks_to_fill(
            self._engine.groups,
            [[block.block_id for block in group] for group in blocks.blocks],
            num_local_tokens=load.num_tokens - num_external_tokens,
            num_tokens=load.num_tokens,
        )
        state.num_missing = len(load.block_ids)
        every = (block for group in blocks.blocks for block in group if not block.is_null)
        state.blocks = tuple(every)
        self.quarantine.begin(state)

    def finish(self, request: Request) -> bool:
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        self._reuse.forget(state)
        is_unread = state.phase in (LoadPhase.ASKED, LoadPhase.KNOWN)
        is_known = is_unread and self._is_answered(state)  # else its lease frees the blocks
        if is_known and isinstance(state.answer, TransferParams | OtherWeightsError):
            load = Load(state.request_id, state.answer.remote, awaited=False)
            self._engine.step.loads.append(load)
        self.tokens.give_up(state)
        state.move(TokenPhase.COMPUTED)
        self._asker.forget(request.request_id)
        return is_unread

    def note_outcomes(self, received: Iterable[str], worker: WorkerMetadata) -> None:
        """Loads ended or are late on the workers; ``received`` holds what has ended on all of them:
        each request is counted once."""
        for request_id, (reason, num_read) in worker.failed.items():
            if (state := self.quarantine.find(request_id)) is not None:
                state.num_read = min(state.num_read, num_read) if state.failure else num_read
                state.failure = state.failure or reason  # the first one of all ranks
        for request_id in worker.unread:
            if (state := self.quarantine.find(request_id)) is not None:
                state.is_unread = True
        for request_id in received:
            if (state := self.quarantine.end(request_id)) is not None:
                self._note_end(state)
        self._engine.step.given_up += self.quarantine.note_late(worker.late)
        self.quarantine.note_settled(worker.settled)

    def _note_end(self, state: LoadState) -> None:
        recorder = self._engine.recorder
        is_here = self._states.get(state.request_id) is state
        is_unread = is_here and (state.is_unread or (state.is_void and self._reuse.has_steps))
        if is_unread:
            self._unread.append(state)
        if is_unread or state.failure:
            self.tokens.give_up(state)
        else:
            self.tokens.note_loaded(state)
        if state.source is Source.REUSED:
            has_failed = is_unread or bool(state.failure)
            name = "reuse_recomputed_blocks" if has_failed else "reuse_blocks"
            recorder.count(**{name: state.num_missing})
        if state.failure:
            recorder.count_reason(FAILURES, state.failure)
            if state.num_read and not state.is_void:
                self._keep_blocks(state.request, state.num_read)
            return
        recorder.count(blocks=state.num_missing)
        if is_here and state.arrived is not None:
            recorder.observe(handover_seconds=time.monotonic() - state.arrived)

    def forget_computed(self) -> None:
        """Weights or caches have changed: what other engines have computed for requests that are
        here counts no more.  These are computed here, also those whose loads are under way."""
        self._trust.renounce()
        self._forget(self._states.values())

    def forget_adapter(self, is_concerned: Callable[[Request], bool]) -> None:
        self._forget([one for one in self._states.values() if is_concerned(one.request)])

    def _forget(self, states: Iterable[LoadState]) -> None:
        under_way = (LoadPhase.LOADING, LoadPhase.LATE) if self._reuse.has_steps else ()
        for state in states:
            state.is_void = state.is_void or state.phase in (LoadPhase.KNOWN, *under_way)
            self._reuse.forget(state)
            if state.answer is not None or state.token_phase is TokenPhase.READY:
                self.tokens.refuse(state, FirstToken.DIFFERS)

    def note_pause(self, *, is_paused: bool) -> None:
        """A paused engine has nothing kept.  After a pause in which leases may have ended, requests
        are computed here."""
        if is_paused == self._trust.is_paused:
            return
        self._engine.step.renews = not is_paused
        if is_paused:
            self._trust.pause()
        elif not self._trust.resume():
            for state in self._states.values():
                is_kept = state.source is not Source.REUSED
                state.is_void = state.is_void or (is_kept and state.phase is LoadPhase.KNOWN)

    @property
    def is_at_rest(self) -> bool:
        return self._trust.is_paused and not self.quarantine.has_loads
