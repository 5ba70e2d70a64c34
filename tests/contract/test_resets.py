"""Pauses and new weights in vLLM's own scheduler: nothing that was computed before counts after
them, and a paused engine keeps nothing for others and has nothing kept."""

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore

from tests.contract.scheduled_core import (
    TO_PREFILL,
    Core,
    free,
    next_token,
    prefilled,
    request_of,
    turn_until,
)
from tests.kit.tiny_lora import write_named
from vllm_commext.compat import monkey_patch, resets
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.decode.prompt_match import CLOCK_SECONDS
from vllm_commext.nixl.wire.params import COMPUTED_BY, TELLS

PROMPT = list(range(14))
FIRST = next_token(PROMPT)
ANSWER = [FIRST, next_token([*PROMPT, FIRST])]
EVERY_POSITION = list(range(14))
TO_READ = {"do_remote_prefill": True}
PAUSES = [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]
MakeCore = Callable[..., Core]


def reload_weights(core: Core, method: Any = "reload_weights") -> None:
    """As a client of vLLM's has its workers load weights."""
    executor = SimpleNamespace(collective_rpc=lambda *args: [])
    engine: Any = SimpleNamespace(scheduler=core.scheduler, model_executor=executor)
    EngineCore.collective_rpc(engine, method)


def reset_prefix_cache(core: Core) -> None:
    core.scheduler.reset_prefix_cache()


RESETS = [reload_weights, reset_prefix_cache, lambda core: core.scheduler.connector.reset_cache()]
each_reset = pytest.mark.parametrize("reset", RESETS, ids=["weights", "prefix cache", "connector"])


def kept(make_core: MakeCore, num: int = 1) -> Core:
    """A prefill engine that keeps blocks for others."""
    core = make_core("kv_producer")
    core.worker.keeps = True
    for name in map(str, range(num)):
        core.add(request_of(name, [int(name), *PROMPT], TO_PREFILL, max_tokens=1))
        core.run(name)
    for _ in range(3):
        core.turn()
    assert len(core.worker.kept) == num
    return core


@pytest.mark.parametrize("params", [{}, {"answer_token_ids": ANSWER}, TO_READ])
def test_a_router_that_asks_is_told_first_what_computes_an_answer(
    make_core: MakeCore, params: dict[str, Any]
) -> None:
    core = make_core("kv_both")
    asking = {**params, TELLS: True}
    core.add(request_of("before", PROMPT, asking, max_tokens=3))
    core.run("before")
    reload_weights(core)
    core.add(request_of("without", PROMPT, params, max_tokens=3))
    core.add(request_of("after", PROMPT, asking, max_tokens=3))
    core.run("without", "after")
    marks = [one for one in core.outputs if COMPUTED_BY in (one.kv_transfer_params or ())]
    assert [(one.request_id, one.new_token_ids) for one in marks] == [("before", []), ("after", [])]
    assert marks[0].kv_transfer_params != marks[1].kv_transfer_params
    for one in marks:
        assert next(told for told in core.outputs if told.request_id == one.request_id) is one


@pytest.mark.parametrize("state", PAUSES)
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("num", [1, 5])
def test_a_pause_of_a_prefill_engine_ends_whatever_is_kept(
    make_core: MakeCore, state: PauseState, clears: bool, num: int
) -> None:
    core = kept(make_core, num)
    core.pause(state, clears=clears)
    assert not core.worker.kept
    assert free(core) == core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    core.resume()
    core.add(request_of("after", PROMPT, TO_PREFILL, max_tokens=1))
    core.run("after")
    turn_until(core, lambda: bool(core.worker.kept))


def test_a_connector_among_several_hears_of_new_weights_and_adapters(
    make_core: MakeCore, tmp_path: Path
) -> None:
    core = make_core("kv_producer")
    own = core.scheduler.connector
    core.scheduler.connector = SimpleNamespace(_connectors=[SimpleNamespace(), own])
    engine: Any = SimpleNamespace(
        scheduler=core.scheduler,
        model_executor=SimpleNamespace(collective_rpc=lambda *args: [], add_lora=lambda _: True),
    )
    lora = LoRARequest("a", 1, str(write_named(tmp_path, "content")))
    identity = own.scheduler_side.engine.identity
    EngineCore.add_lora(engine, lora)
    assert identity.adapters.identity_of(lora) == identity.adapters.identity_of(lora)
    before = identity.prompt_of(request_of("r", PROMPT)).weights
    EngineCore.collective_rpc(engine, "update_weights")
    assert identity.prompt_of(request_of("r", PROMPT)).weights != before
    core.scheduler.connector = own


def test_answers_of_an_adapter_end_when_it_is_loaded_anew_if_a_router_has_asked(
    make_core: MakeCore, tmp_path: Path
) -> None:
    """Other contents do not go on with what this one has begun; who asks nothing is as in vLLM."""
    core: Any = make_core("kv_both")
    core.model_executor = SimpleNamespace(add_lora=lambda _: True)
    lora = LoRARequest("a", 1, str(write_named(tmp_path, "content")))
    for name, adapter in (("asks", lora), ("asks not", lora), ("without", None)):
        request = request_of(name, PROMPT, {TELLS: name != "asks not"}, max_tokens=9)
        request.lora_request = adapter
        core.add(request)
    core.turn()
    for in_place, ended in ((False, []), (True, ["asks"])):
        lora.load_inplace = in_place
        EngineCore.add_lora(core, lora)
        core.turn()
        aborted = [one for one in core.outputs if one.finish_reason == FinishReason.ABORT]
        assert [one.request_id for one in aborted] == ended
    core.run("asks not", "without")


def test_what_was_begun_before_an_adapter_is_loaded_again_is_not_handed_over(
    make_core: MakeCore, tmp_path: Path
) -> None:
    """Of two prompts the one that another adapter has computed nothing of is."""
    core = make_core("kv_producer")
    core.worker.keeps = True
    lora = LoRARequest("a", 1, str(write_named(tmp_path, "content")), load_inplace=True)
    for name, adapter in (("with", lora), ("without", None)):
        request = request_of(name, list(range(40)), TO_PREFILL, max_tokens=1)
        request.lora_request = adapter
        core.add(request)
        core.turn()
    side = core.scheduler.get_kv_connector().scheduler_side
    side.begin_adapter(lora)()
    core.run("with", "without")
    params = {one.request_id: one.kv_transfer_params for one in core.outputs}
    assert params["with"] is None
    assert params["without"] is not None


@each_reset
def test_new_weights_end_what_a_prefill_engine_keeps(
    make_core: MakeCore, reset: Callable[[Core], None]
) -> None:
    core = kept(make_core, 3)
    reset(core)
    for _ in range(4):
        core.turn()
    assert not core.worker.kept
    assert not core.scheduler.requests


@each_reset
@pytest.mark.parametrize("has_come", [False, True])
def test_parameters_from_before_new_weights_and_their_token_are_not_used(
    make_core: MakeCore, reset: Callable[[Core], None], is_async: bool, has_come: bool
) -> None:
    core = make_core("kv_consumer", is_async=is_async)
    params = {**prefilled(make_core("kv_producer"), PROMPT), "remote_first_token": 3}
    request = request_of("d", PROMPT, params, max_tokens=2)
    if has_come:
        core.add(request)
        reset(core)
    else:
        core.turn()
        reset(core)
        core.add(request)
    core.run("d")
    assert core.answer("d").tokens == ANSWER
    assert core.worker.computed["d"][:14] == EVERY_POSITION
    assert (core.worker.loads, core.worker.released) == ([], ["d"])
    assert core.ways == {"differs": 1}


def test_parameters_from_after_new_weights_are_used(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, prefill = make_core("kv_consumer"), make_core("kv_producer")
    reload_weights(core)
    reload_weights(prefill)
    monkeypatch.setattr("time.time", lambda now=time.time: now() + CLOCK_SECONDS)
    core.add(request_of("d", PROMPT, prefilled(prefill, PROMPT), max_tokens=2))
    core.run("d")
    assert core.answer("d").tokens == ANSWER
    assert core.worker.computed["d"][0] > 0


@each_reset
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("takes_token", [True, False])
def test_blocks_whose_load_is_under_way_at_new_weights_are_not_used(
    make_core: MakeCore, reset: Callable[[Core], None], fails: bool, takes_token: bool
) -> None:
    """Nor does a failure of that load end the request."""
    core = make_core("kv_consumer", first_token_from_prefill=takes_token)
    core.worker.holds_loads, core.worker.fails = True, lambda _: fails
    core.add(request_of("d", PROMPT, prefilled(make_core("kv_producer"), PROMPT), max_tokens=2))
    turn_until(core, lambda: bool(core.worker.loads))
    reset(core)
    core.worker.holds_loads = False
    core.run("d")
    assert core.answer("d").tokens == ANSWER
    assert core.worker.computed["d"][:14] == EVERY_POSITION


@pytest.mark.parametrize("state", PAUSES)
def test_caches_can_be_cleared_while_a_load_is_under_way(
    make_core: MakeCore, state: PauseState, policy: str, is_async: bool
) -> None:
    core = make_core("kv_consumer", policy=policy, is_async=is_async)
    core.worker.holds_loads = True
    core.add(request_of("d", PROMPT, prefilled(make_core("kv_producer"), PROMPT), max_tokens=2))
    core.add(request_of("waits", [1, *PROMPT], max_tokens=2))
    turn_until(core, lambda: bool(core.worker.loads))
    execute, turns = core.worker.execute, iter(range(100))

    def end_later(step: Any) -> Any:
        core.worker.holds_loads = next(turns) < 6
        return execute(step)

    core.worker.execute = end_later
    core.pause(state)
    core.resume()
    core.run("d", "waits")
    assert core.answer("d").tokens == ANSWER
    assert core.answer("waits").finish_reason is not None
    if state == PauseState.PAUSED_ALL:
        assert core.worker.computed["d"][:14] == EVERY_POSITION


def test_a_paused_engine_renews_no_lease_and_a_running_one_does(make_core: MakeCore) -> None:
    core = make_core("kv_consumer")
    core.add(request_of("d", PROMPT, prefilled(make_core("kv_producer"), PROMPT), max_tokens=2))
    core.turn()
    core.pause(PauseState.PAUSED_ALL, clears=False)
    assert not core.worker.renews
    core.resume()
    core.run("d")
    assert core.worker.renews
    assert core.answer("d").tokens == ANSWER


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["short", "long"])
def test_blocks_elsewhere_are_trusted_only_after_a_short_pause(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    core = make_core("kv_consumer", kv_lease_duration=1.0)
    core.turn()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core.add(request_of("d", PROMPT, prefilled(make_core("kv_producer"), PROMPT), max_tokens=2))
    core.turn()
    later = time.monotonic() + seconds
    monkeypatch.setattr("vllm_commext.nixl.decode.prompt_match.time.monotonic", lambda: later)
    core.resume()
    core.run("d")
    assert core.answer("d").tokens == ANSWER
    assert (core.worker.computed["d"][0] == 0) == (seconds > 0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        *((name, True) for name in ("reload_weights", "update_weights", "finish_weight_update")),
        (lambda worker: None, True),
        *((name, True) for name in ("apply_model", "reset_weights")),
        *((name, False) for name in ("profile", "update_max_model_len", "add_lora")),
        *((name, False) for name in ("compute_weight_checksums", "init_weight_transfer_engine")),
    ],
)
def test_calls_that_may_change_weights(method: Any, expected: bool) -> None:
    assert resets.may_change_weights(method) == expected


def test_clients_can_call_what_is_patched_as_before(make_core: MakeCore) -> None:
    before = inspect.signature(monkey_patch.original_of(resets.CALL))
    make_core("kv_both")
    assert monkey_patch.is_patched(resets.CALL)
    assert inspect.signature(EngineCore.collective_rpc) == before


def test_vllm_is_told_at_once_that_memory_cannot_be_swapped() -> None:
    assert not CommextNixlConnector.supports_sleep_mode(SimpleNamespace())  # pyright: ignore
