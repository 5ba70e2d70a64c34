"""KV blocks count until the engine's weights or caches change, and a paused engine keeps none for
others and has none kept. Likewise what an adapter has computed counts until it is loaded again.

vLLM tells a connector only that a pause clears its caches, after it has reset its own. That fails
where a block is in use: also one that is kept for another engine, or that a load has filled whose
request cannot go on during the pause. It tells of no new weights or adapters, and of no reset of
the prefix cache alone. `install` patches the three methods that do these things."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from vllm_commext.compat.monkey_patch import wrap
from vllm_commext.nixl.wire.params import TELLS, params_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_commext.nixl.scheduler import SchedulerSide

CACHE = "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache"
CALL = "vllm.v1.engine.core:EngineCore.collective_rpc"
ADAPTER = "vllm.v1.engine.core:EngineCore.add_lora"
_READ_ONLY = ("get_", "compute_", "check_", "init_", "shutdown_", "supports_")


class Pauses:
    """Tells the connector of one engine's pauses and resets."""

    def __init__(self, source: SchedulerSide) -> None:
        self.source = source
        self._scheduler: Any = None

    def before_step(self, core: Any) -> None:
        self._scheduler = core.scheduler
        version = getattr(core, "_weight_version", None)  # vLLM 0.32 has none
        if version is not None:
            self.source.engine.identity.note_version(version)
        self.source.note_pause(is_paused=self._is_paused())

    def has_work(self) -> bool:
        """A paused engine must go on stepping, without computing anything."""
        return self._is_paused() and not self.source.is_at_rest()

    def _is_paused(self) -> bool:
        state = PauseState.UNPAUSED if self._scheduler is None else self._scheduler.pause_state
        return state != PauseState.UNPAUSED


def install() -> None:
    """Monkey-patch this process's engine; a second call changes nothing."""
    wrap({CACHE: _reset_prefix_cache, CALL: _collective_rpc, ADAPTER: _add_lora})


def _reset_prefix_cache(reset: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(reset)
    def reset_prefix_cache(
        scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        pauses = _pauses_of(scheduler)
        if pauses is not None:
            pauses.source.forget_computed()
            if reset_running_requests:
                _free_loaded(scheduler)
        return reset(scheduler, reset_running_requests, reset_connector)

    return reset_prefix_cache


def _collective_rpc(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)  # vLLM reads the signature of what its clients call
    def collective_rpc(
        core: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        pauses = _pauses_of(getattr(core, "scheduler", None))
        settle = None
        if pauses is not None and may_change_weights(method):
            settle = pauses.source.begin_new_weights(method, args, kwargs or {})
        elif pauses is not None and method == "add_lora" and args:
            settle = pauses.source.begin_adapter(args[0])
        answer = call(core, method, timeout, args, kwargs)
        if settle is not None:
            settle()
        return answer

    return collective_rpc


def _add_lora(add: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(add)
    def add_lora(core: Any, lora_request: Any) -> bool:
        pauses = _pauses_of(getattr(core, "scheduler", None))
        settle = pauses.source.begin_adapter(lora_request) if pauses is not None else None
        answer = add(core, lora_request)
        if settle is not None and answer:
            settle()
            if lora_request.load_inplace:
                _end_answers(core, lora_request.lora_int_id)
        return answer

    return add_lora


def _end_answers(core: Any, adapter: int) -> None:
    """End the answers of an adapter that another content would go on with, where a router has asked
    what computes them: it takes them to an engine that has the first one, or ends them."""
    names = {
        name: one.client_index
        for name, one in core.scheduler.requests.items()
        if getattr(one.lora_request, "lora_int_id", None) == adapter
        if (params_of(one) or {}).get(TELLS)
    }
    core.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)
    for name, client in names.items():
        told = EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT)
        ends = EngineCoreOutputs(outputs=[told], finished_requests={name})
        core.output_queue.put_nowait((client, ends))


def may_change_weights(method: Any) -> bool:
    """Methods that vLLM and training frameworks name after weights, and any functions."""
    if not isinstance(method, str):
        return True
    named = method.lower()
    return named == "apply_model" or ("weight" in named and not named.startswith(_READ_ONLY))


def _pauses_of(scheduler: Any) -> Pauses | None:
    connector = getattr(scheduler, "connector", None)
    children = getattr(connector, "_connectors", ())  # of a MultiConnector
    found = (getattr(one, "pauses", None) for one in (connector, *children))
    return next((pauses for pauses in found if pauses is not None), None)


def _free_loaded(scheduler: Any) -> None:
    """Compute requests whose loads have ended and that have not gone on, as vLLM does with those
    that run: it frees their blocks."""
    for request_id in list(scheduler.finished_recving_kv_req_ids):
        request: Request | None = scheduler.requests.get(request_id)
        if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)
        scheduler._update_waiting_for_remote_kv(request)
        preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
        holding = scheduler.kv_holding_waiting
        if request in holding:
            holding.remove_requests([request])
            scheduler.waiting.prepend_request(request)
