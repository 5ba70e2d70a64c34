"""The decode engine's first tokens that other engines have drawn: which can be sent, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_commext.nixl.decode.askers import StreamAsker
from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState, Source, TokenPhase
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.first_token import FirstToken, refusal_of, source_of
from vllm_commext.nixl.recorder import FIRST_TOKENS
from vllm_commext.nixl.wire.params import TELLS, answer_of, params_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

TOKEN_SECONDS = 0.005
"""That an engine with nothing to compute waits for the first token after a prompt that is here: a
prefill engine knows it a few milliseconds after the last chunk's end, and computing it would take a
step."""


class RemoteTokens:
    """First tokens of one engine's requests, until they are sent or computed here. marks: what
    computes the requests that have come since the last step, where routers ask."""

    def __init__(self, engine: EngineContext, asker: StreamAsker) -> None:
        self._engine = engine
        self._asker = asker
        self._ready: list[LoadState] = []
        self._loaded: list[LoadState] = []
        self._resumed: list[tuple[Request, list[int]]] = []
        self.marks: list[tuple[Request, int]] = []

    def resume(self, request: Request) -> list[int]:
        """A request came in; the answer that another decode engine has begun, if it goes on with
        one. An answer whose draws are not all known here is drawn again from its beginning."""
        sampler, params = self._engine.sampler, params_of(request) or {}
        if params.get(TELLS):
            self.marks.append((request, self._engine.identity.mark_of(request)))
        answer = answer_of(params, sampler.num_tokens, request.max_tokens)
        if not answer or refusal_of(sampler, request):
            return []
        self._resumed.append((request, answer))
        return answer

    def offer(self, state: LoadState, token: int, sampling: str) -> None:
        """A prefill engine offers a request's first token, drawn by this: the answer begins with it
        if it is drawn as this engine would draw it, after the prompt that the request has here."""
        if state.token_phase is not TokenPhase.AWAITED:
            return
        sampler = self._engine.sampler
        offered = replace(state.params, first_token=token, sampling=sampling)
        way = source_of(sampler, offered, state.request)
        if way == FirstToken.PREFILL and token >= sampler.num_tokens:
            way = FirstToken.DIFFERS
        if way != FirstToken.PREFILL:
            self.refuse(state, way)
        else:
            self._end_waiting(state, TokenPhase.READY)
            state.first_token = token
            self._ready.append(state)

    def refuse(self, state: LoadState, reason: FirstToken) -> None:
        if self._end_waiting(state, TokenPhase.COMPUTED):
            self._engine.recorder.count_reason(FIRST_TOKENS, reason)

    def give_up(self, state: LoadState) -> None:
        if state.token_phase is TokenPhase.AWAITED:
            self.refuse(state, FirstToken.NOT_OFFERED)

    def _end_waiting(self, state: LoadState, phase: TokenPhase) -> bool:
        has_moved = state.move(phase)
        is_asked = state.phase is LoadPhase.ASKED  # for its blocks, too
        if has_moved and state.source is Source.STREAMED and not is_asked:
            self._asker.forget(state.request_id)
        return has_moved

    def note_loaded(self, state: LoadState) -> None:
        if state.token_phase is TokenPhase.AWAITED:
            self._loaded.append(state)

    def take(
        self, find: Callable[[str], LoadState | None], *, is_idle: bool
    ) -> list[tuple[Request, list[int], FirstToken]]:
        """Requests whose first tokens have come since the last call, each with these, asked before
        each step.

        Args:
            find: gives a request's state, once it is known where its prompt is.
            is_idle: the engine has nothing to compute, and waits for those about to come.
        """
        loaded, self._loaded = self._loaded, []
        for state in loaded:
            if state.token_phase is TokenPhase.AWAITED:
                self._asker.wait_for_token(state.request_id, TOKEN_SECONDS if is_idle else 0.0)
        for request_id, told in self._asker.take_tokens().items():
            state = find(request_id)
            if state is not None:
                self.offer(state, *told)
        for state in loaded:
            self.give_up(state)
        ready, self._ready = self._ready, []
        still = (state for state in ready if state.token_phase is TokenPhase.READY)
        resumed, self._resumed = self._resumed, []
        return [
            *((request, answer, FirstToken.RESUMED) for request, answer in resumed),
            *((state.request, [state.first_token], FirstToken.PREFILL) for state in still),
        ]
