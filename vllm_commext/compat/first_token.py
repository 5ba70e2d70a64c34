"""Answers requests with the first tokens that prefill engines have sampled, before their KV caches
are loaded, and with those of answers that other decode engines have begun.

vLLM has no way to give a request a token that the engine did not compute. Before a step the token
is therefore sent to the client through the engine's queue of outputs, and becomes the last token of
the request's prompt with one token fewer to generate. The scheduler then asks the connector for the
prompt, as always, and computes this token's position when the blocks are there. The same happens
with all tokens of an answer that is resumed here, which `resumed_answers` hands out one by one.
vLLM's own function decides whether the last token ends the answer.

vLLM's policy for failed loads does not apply to a request whose client has its first token, nor to
a prompt that is read while it is computed, as the token may come before the last block: they are
computed here, like after a preemption. The worker side keeps such failures from vLLM."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_commext.nixl.first_token import FirstToken, Sampler, facts_digest
from vllm_commext.nixl.wire.params import COMPUTED_BY, is_for_decode, params_of, pieces_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from vllm_commext.nixl.decode.remote_prompts import RemotePrompts

_LOGITS_PROCESSORS = "vllm.logits_processors"


def sampler_of(
    vllm_config: VllmConfig, facts: Callable[[], Mapping[str, str]], *, is_on: bool
) -> Sampler:
    """Facts that first tokens follow from here, beside the prompt and a request's parameters.

    Args:
        vllm_config: the engine's configuration.
        facts: gives what peers compare of it; called where a token can be used.
        is_on: the user lets first tokens come from prefill engines.
    """
    if not is_on:
        return Sampler(refusal=FirstToken.OFF)
    if _samples_otherwise(vllm_config):
        return Sampler(refusal=FirstToken.ENGINE)
    num_tokens = vllm_config.model_config.get_vocab_size()
    return Sampler(digest=facts_digest(facts()), num_tokens=num_tokens, refusal=None)


def _samples_otherwise(vllm_config: VllmConfig) -> bool:
    """True where more than vLLM's own sampler, or more than a token a step, makes an answer."""
    model: Any = vllm_config.model_config
    return bool(
        model is None
        or vllm_config.speculative_config is not None
        or getattr(vllm_config, "watermark_config", None) is not None
        or getattr(vllm_config, "diffusion_config", None) is not None
        or getattr(model, "return_sampling_mask", False)
        or getattr(model, "enable_return_routed_experts", False)
        or model.logits_processors
        or _has_logits_processors()
    )


@cache
def _has_logits_processors() -> bool:
    """Look for a package that brings some; reads a file of every package."""
    return bool(importlib.metadata.entry_points(group=_LOGITS_PROCESSORS))


class FirstTokens:
    def __init__(self, source: RemotePrompts) -> None:
        self._source = source

    def before_step(self, core: Any) -> None:
        """Send what first tokens there are; ``core`` is vLLM's ``EngineCoreProc``."""
        scheduler = core.scheduler
        self._source.note_step(scheduler)
        marks = self._source.tokens.marks
        while marks:
            request, mark = marks.pop()
            told = EngineCoreOutput(request.request_id, [], kv_transfer_params={COMPUTED_BY: mark})
            core.output_queue.put_nowait((request.client_index, EngineCoreOutputs(outputs=[told])))
        for request_id, must_compute in self._source.take_unread():
            _end_load(core, request_id, must_compute=must_compute)
        is_idle = not scheduler.running
        for request, tokens, way in self._source.take_first_tokens(is_idle=is_idle):
            can_send = _may_begin(scheduler, request)
            self._source.note_first_token(request, way if can_send else FirstToken.ENGINE)
            if can_send:
                send(core, request, tokens)


def _may_begin(scheduler: Any, request: Request) -> bool:
    """True for a request as it came in, or whose whole prompt is being loaded and no more is done,
    while the engine is not paused."""
    return (
        scheduler.requests.get(request.request_id) is request
        and (_is_new(request) or _is_loading(scheduler, request))
        and request.num_output_tokens == 0
        and scheduler.pause_state == PauseState.UNPAUSED
        and getattr(scheduler, "aux_output_connector", None) is None
    )


def _is_new(request: Request) -> bool:
    return request.status == RequestStatus.WAITING and request.num_computed_tokens == 0


def _is_loading(scheduler: Any, request: Request) -> bool:
    """True from the start of a whole prompt's load until the scheduler goes on with it."""
    return (
        request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        and request.request_id not in scheduler.failed_recving_kv_req_ids
        and request.num_computed_tokens == request.num_prompt_tokens
        and request.num_preemptions == 0
    )


def send(core: Any, request: Request, tokens: list[int]) -> None:
    """Let a request that may begin have generated ``tokens``, at least one, and tell its client."""
    scheduler, before = core.scheduler, request.status
    request.append_output_token_ids(tokens)
    has_ended = check_stop(request, scheduler.max_model_len)
    if scheduler.log_stats:
        request.record_event(EngineCoreEventType.SCHEDULED)
    stats = request.take_prefill_stats()
    if stats is not None and not request.num_computed_tokens:
        num_prompt = request.num_prompt_tokens
        num_read = num_prompt if is_for_decode(params_of(request)) else 0
        stats.set(num_prompt, num_local_cached_tokens=0, num_external_cached_tokens=num_read)
        if hasattr(stats, "finalize"):  # from vLLM 0.33 on
            stats.finalize(_num_to_cache(scheduler, request))
    if has_ended:
        # The scheduler ends what it does not know to have ended.
        status, request.status = request.status, before
        scheduler.finish_requests(request.request_id, status)
    else:
        _continue_prompt(request)
    _tell(core, request, pieces_of(params_of(request), tokens), stats)


def _num_to_cache(scheduler: Any, request: Request) -> int:
    """Tokens of a prompt that will be in the prefix cache once it is computed."""
    block_size = scheduler.block_size
    return request.num_prompt_tokens // block_size * block_size if request.block_hashes else 0


def _refuse(core: Any, request: Request) -> None:
    core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    _tell(core, request, [[]])


def _tell(core: Any, request: Request, pieces: list[list[int]], stats: Any = None) -> None:
    """Send a request's client what vLLM would send after a step for each of the pieces."""
    told = [EngineCoreOutput(request_id=request.request_id, new_token_ids=one) for one in pieces]
    first, last = told[0], told[-1]
    first.events, first.prefill_stats = request.take_events(), stats
    last.finish_reason, last.stop_reason = request.get_finished_reason(), request.stop_reason
    last.trace_headers = request.trace_headers
    outputs = {request.client_index: EngineCoreOutputs(outputs=told)}
    core._attach_weight_version(outputs)
    for pair in outputs.items():
        core.output_queue.put_nowait(pair)


def _continue_prompt(request: Any) -> None:
    generated = request._output_token_ids
    request.prompt_token_ids = [*request.prompt_token_ids, *generated]
    request.num_prompt_tokens += len(generated)
    request.max_tokens -= len(generated)
    generated.clear()


def _end_load(core: Any, request_id: str, *, must_compute: bool) -> None:
    """A load has failed: have its request computed where that *must* be or is vLLM's policy."""
    scheduler = core.scheduler
    request = scheduler.requests.get(request_id)
    if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        return
    if must_compute or scheduler.recompute_kv_load_failures:
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)
    else:
        _refuse(core, request)
