"""Answers requests with the first tokens that prefill engines have sampled, before their KV caches
are loaded, and with those of answers that other decode engines have begun.

vLLM has no way to give a request a token that the engine did not compute.  Before a step of the
engine the token is therefore sent to the client as vLLM would send it, through the engine's queue
of outputs, and becomes the last token of the request's prompt with one token fewer to generate:
the scheduler then asks the connector for the prompt, as always, and computes this token's position
when the blocks are there.  So it does with all tokens of an answer that is resumed here.  Whether
the last token ends the answer (end of sequence, stop token, length) is decided by vLLM's own
function, on the request as it would be after sampling that token.

vLLM's policy for failed loads does not apply to a request whose client has its first token: it is
computed here, like after a preemption.  The worker side keeps such a failure from vLLM, and the
scheduler learns of it here, in the words in which it notes failures under the policy ``recompute``.

A prompt that is read while it is computed gets its token when the prefill engine has told it,
mostly before the last of its blocks is here.  Whether such a load that fails is vLLM's policy's or
not is known at its end alone, so that the worker side keeps all of these failures from vLLM.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_commext.nixl.first_token import Sampler, facts_digest
from vllm_commext.nixl.reasons import FirstToken
from vllm_commext.nixl.wire.params import is_for_decode, params_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


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
    """Whether something beside vLLM's own sampler, or more than a token, makes an answer here."""
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
    """Whether a package that is installed brings some; reads a file of every package."""
    return bool(importlib.metadata.entry_points(group=_LOGITS_PROCESSORS))


class Source(Protocol):
    """The connector's scheduler side, as far as it is asked here."""

    def note_step(
        self, keep_blocks: Callable[[Request, int], None], running: RunningRequests
    ) -> None:
        """The engine is going to take a step; ``keep_blocks`` gives the blocks of a request's first
        tokens to the prefix cache."""
        ...

    def take_first_tokens(
        self, *, is_idle: bool
    ) -> Iterable[tuple[Request, list[int], FirstToken]]:
        """Requests whose first tokens are there, and where these come from; where the engine *is
        idle* it may wait for one that is about to come."""
        ...

    def note_first_token(self, request: Request, way: FirstToken) -> None:
        """Count where a request's first token comes from."""
        ...

    def take_unread(self) -> Iterable[tuple[str, bool]]:
        """Requests whose loads have failed, and whether they must be computed here, whatever
        vLLM's policy."""
        ...


class FirstTokens:
    """Sends first tokens before each step of an engine.

    Args:
        source: says which tokens there are.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def before_step(self, core: Any) -> None:
        """Send what first tokens there are; ``core`` is vLLM's ``EngineCoreProc``."""
        scheduler = core.scheduler
        self._source.note_step(partial(keep_blocks, scheduler), RunningRequests(scheduler))
        for request_id, must_compute in self._source.take_unread():
            _end_load(core, request_id, must_compute=must_compute)
        is_idle = not core.scheduler.running
        for request, tokens, way in self._source.take_first_tokens(is_idle=is_idle):
            can_send = _may_begin(core.scheduler, request)
            self._source.note_first_token(request, way if can_send else FirstToken.ENGINE)
            if can_send:
                send(core, request, tokens)


def _may_begin(scheduler: Any, request: Request) -> bool:
    """Whether a request is as it came in, or its whole prompt is being loaded and no more has been
    done, and it may begin."""
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
    """Whether a whole prompt is being loaded, or has been and the scheduler has not gone on yet."""
    return (
        request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        and request.request_id not in scheduler.failed_recving_kv_req_ids
        and request.num_computed_tokens == request.num_prompt_tokens
        and request.num_preemptions == 0
    )


def send(core: Any, request: Request, tokens: list[int]) -> None:
    """Let a request that may begin have generated ``tokens``, and tell its client."""
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
    if has_ended:
        # The scheduler ends what it does not know to have ended.
        status, request.status = request.status, before
        scheduler.finish_requests(request.request_id, status)
    else:
        _continue_prompt(request)
    _tell(core, request, tokens, stats)


def _refuse(core: Any, request: Request) -> None:
    core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    _tell(core, request, [])


def _tell(core: Any, request: Request, tokens: list[int], stats: Any = None) -> None:
    """Send a request's client what vLLM would send after a step."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=tokens,
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        prefill_stats=stats,
    )
    outputs = {request.client_index: EngineCoreOutputs(outputs=[output])}
    core._attach_weight_version(outputs)
    for pair in outputs.items():
        core.output_queue.put_nowait(pair)


def _continue_prompt(request: Any) -> None:
    """Make the tokens that a request has generated the last ones of its prompt."""
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


def keep_blocks(scheduler: Any, request: Request, num_tokens: int) -> None:
    """Have a request's first blocks found by all that begin like it, itself among them: its load
    has failed after them, and it still holds them."""
    scheduler.kv_cache_manager.cache_blocks(request, num_tokens)


class RunningRequests:
    """A scheduler's requests that run."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __iter__(self) -> Iterator[Request]:
        return iter(self._scheduler.running)

    def blocks_of(self, request: Request) -> list[KVCacheBlock]:
        """The request's blocks of the first group."""
        return self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
