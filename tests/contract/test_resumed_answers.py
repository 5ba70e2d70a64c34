"""An answer that one decode engine has begun goes on at another one, in vLLM's own scheduler: what
the client is told is the whole answer of one engine, of which the beginning is not drawn anew."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason

from tests.contract.scheduled_core import (
    NUM_TOKENS,
    Core,
    next_token,
    prefilled,
    request_of,
)
from tests.kit.crossed import crossed
from vllm_commext.nixl.reasons import FirstToken

pytestmark = pytest.mark.timeout(600)
PROMPT = list(range(14))
MOST = 30
MakeCore = Callable[..., Core]


def answer_of(num_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """What one engine generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def resume(core: Core, begun: list[int], params: Any = None, **sampling: Any) -> Any:
    told = {**(params or {}), "answer_token_ids": begun}
    core.add(request_of("r", PROMPT, told, **{"max_tokens": MOST, **sampling}))
    core.run("r")
    return core.answer("r")


WHOLE = answer_of(MOST)
ENDS: dict[str, tuple[int, dict[str, Any], int]] = {
    # How much has been answered, what else is asked for, and where the answer ends.
    "its length": (9, {}, MOST),
    "one token so far": (1, {}, MOST),
    "all but one": (MOST - 1, {}, MOST),
    "all": (MOST, {}, MOST),
    "an end of sequence later": (5, {"eos": WHOLE[7]}, 8),
    "an end of sequence as the last token so far": (5, {"eos": WHOLE[4]}, 5),
    "a stop token as the last one so far": (5, {"stop_token_ids": [WHOLE[4]]}, 5),
    "drawn": (9, {"temperature": 0.7, "top_p": 0.9}, MOST),
    "stop strings": (9, {"stop": ["x"]}, MOST),
}


@pytest.mark.parametrize(
    ("role", "is_async"), crossed(["kv_consumer", "kv_producer", "kv_both"], [False, True])
)
@pytest.mark.parametrize("case", ENDS)
def test_the_answer_goes_on(make_core: MakeCore, case: str, role: str, is_async: bool) -> None:
    """Whether the prompt is read or computed here, it is computed once, and so is the answer."""
    num_begun, sampling, end = ENDS[case]
    reads = role != "kv_producer"
    params = prefilled(make_core("kv_producer"), PROMPT) if reads else None
    core = make_core(role, is_async=is_async)
    got = resume(core, WHOLE[:num_begun], params, **sampling)
    assert got.tokens == WHOLE[:end]
    assert got.finish_reason == (FinishReason.LENGTH if end == MOST else FinishReason.STOP)
    assert core.ways == {FirstToken.RESUMED: 1}
    first = len(PROMPT) if reads else 0
    computed = [] if end == num_begun else list(range(first, len(PROMPT) + end - 1))
    assert core.worker.computed.get("r", [])[: len(computed)] == computed


def test_a_wrong_beginning_is_gone_on_from(make_core: MakeCore) -> None:
    """The comparison with one engine would find an answer that is drawn anew."""
    wrong = [(token + 1) % NUM_TOKENS for token in WHOLE[:9]]
    got = resume(make_core("kv_consumer"), wrong)
    assert got.tokens == [*wrong, *answer_of(MOST - 9, [*PROMPT, *wrong])]


def test_the_beginning_is_told_at_once(make_core: MakeCore) -> None:
    core = make_core("kv_consumer")
    core.worker.holds_loads = True
    params = {**prefilled(make_core("kv_producer"), PROMPT), "answer_token_ids": WHOLE[:9]}
    core.add(request_of("r", PROMPT, params, max_tokens=MOST))
    core.turn()
    assert core.answer("r").tokens == WHOLE[:9]
    core.worker.holds_loads = False
    core.run("r")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_is_computed_here(make_core: MakeCore, policy: str) -> None:
    core = make_core("kv_consumer", policy=policy)
    core.worker.fails = lambda request_id: True
    got = resume(core, WHOLE[:9], prefilled(make_core("kv_producer"), PROMPT))
    assert got.tokens == WHOLE
    assert core.worker.computed["r"] == list(range(len(PROMPT) + MOST - 1))


def test_parameters_of_another_prompt_change_nothing(make_core: MakeCore) -> None:
    core = make_core("kv_consumer")
    params = prefilled(make_core("kv_producer"), [*PROMPT[1:], 99])
    got = resume(core, WHOLE[:9], params)
    assert got.tokens == WHOLE
    assert core.ways == {FirstToken.RESUMED: 1}


ANEW: dict[str, tuple[Any, dict[str, Any]]] = {
    # An answer that was begun, and what else is asked for.
    "a seed": (WHOLE[:9], {"seed": 3}),
    "log probabilities": (WHOLE[:9], {"logprobs": 1}),
    "a penalty": (WHOLE[:9], {"presence_penalty": 0.5}),
    "a least length": (WHOLE[:9], {"min_tokens": 3}),
    "more than is asked for": (WHOLE[:9], {"max_tokens": 8}),
    "none": ([], {}),
    "no list": ({"1": 2}, {}),
    "text": (["7"], {}),
    "a truth": ([True], {}),
    "a fraction": ([1.0], {}),
    "a token below all": ([-1], {}),
    "a token that the model does not have": ([1 << 20], {}),
    "a long number": ([1 << 62], {}),
}


@pytest.mark.parametrize("case", ANEW)
def test_what_cannot_be_gone_on_from_is_drawn_from_its_beginning(
    make_core: MakeCore, case: str
) -> None:
    begun, sampling = ANEW[case]
    core = make_core("kv_consumer")
    got = resume(core, begun, **sampling)
    assert got.tokens == WHOLE[: sampling.get("max_tokens", MOST)]
    assert core.ways == {}


def test_a_prefill_engine_begins_no_answer(make_core: MakeCore) -> None:
    prefill = make_core("kv_producer")
    params = {"do_remote_decode": True, "answer_token_ids": WHOLE[:3]}
    prefill.add(request_of("p", PROMPT, params, max_tokens=1))
    prefill.run("p")
    assert prefill.answer("p").tokens == WHOLE[:1]


def test_a_paused_engine_draws_it_from_its_beginning(make_core: MakeCore) -> None:
    core = make_core("kv_consumer")
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core.add(request_of("r", PROMPT, {"answer_token_ids": WHOLE[:9]}, max_tokens=MOST))
    core.turn()
    assert core.answer("r").tokens == []
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.run("r")
    assert core.answer("r").tokens == WHOLE
    assert core.ways == {FirstToken.ENGINE: 1}


def test_a_preempted_request_goes_on_with_what_it_has_said(make_core: MakeCore) -> None:
    """Three requests over blocks for two."""
    core = make_core("kv_consumer", num_blocks=20)
    prompts = {f"r{n}": list(range(n, n + 13)) for n in range(3)}
    whole = {name: answer_of(24, tokens) for name, tokens in prompts.items()}
    for name, tokens in prompts.items():
        begun = {"answer_token_ids": whole[name][:5]}
        core.add(request_of(name, tokens, begun, max_tokens=24))
    preempted: set[str] = set()
    for _ in range(200):
        core.turn()
        waiting = core.scheduler.requests.values()
        preempted |= {one.request_id for one in waiting if one.num_preemptions}
    assert preempted, "there was room for all of them"
    assert {name: core.answer(name).tokens for name in prompts} == whole
