"""An answer that another engine has begun, in vLLM's own scheduler: its first token or more come in
each of ``ARRIVALS``, are sent before anything is loaded, and the answer is that of one engine."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.contract.arrivals import (
    ARRIVALS,
    FIRST,
    PROMPT,
    WHOLE,
    Arrival,
    Channel,
    MakeCore,
    end_load,
    prompts_of,
    single_answer,
)
from tests.contract.scheduled_core import (
    MAX_TOKENS,
    NUM_TOKENS,
    Core,
    answer_to,
    assert_nothing_is_held,
    free,
    next_token,
    prefilled,
    request_of,
    turn_until,
)
from vllm_commext.compat import engine_wait
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.first_token import FirstToken

_number = count()
LENGTH = len(PROMPT)
MOST = 30


@pytest.fixture(params=ARRIVALS)
def arrival(request: pytest.FixtureRequest) -> Arrival:
    return ARRIVALS[request.param]


ENDS: dict[str, Callable[[int], dict[str, Any]]] = {
    # What else is asked for, by how many tokens another engine has generated.
    "length": lambda begun: {"max_tokens": begun + 5},
    "one more token": lambda begun: {"max_tokens": begun + 1},
    "no more token": lambda begun: {"max_tokens": begun},
    "end of sequence as the last token so far": lambda begun: {"eos": WHOLE[begun - 1]},
    "end of sequence as the next token": lambda begun: {"eos": WHOLE[begun]},
    "end of sequence later": lambda begun: {"eos": WHOLE[begun + 2]},
    # vLLM leaves the end of sequence out where it is to be ignored.
    "end of sequence ignored": lambda begun: {"max_tokens": begun + 2, "ignore_eos": True},
    "a stop token as the last one so far": lambda begun: {"stop_token_ids": [WHOLE[begun - 1]]},
    "drawn": lambda _: {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    "stop strings": lambda _: {"stop": ["x"], "include_stop_str_in_output": True},
}


def bring(
    make_core: MakeCore, channel: Channel, arrival: Arrival, core: Core, shift: int = 0, **more: Any
) -> list[int]:
    """Request "d" and the beginning of its answer come, whose load does not end yet; each token is
    ``shift`` beside the right one."""
    begun = [(token + shift) % NUM_TOKENS for token in WHOLE[: arrival.num_begun]]
    core.worker.holds_loads = True
    arrival.bring(make_core, channel, core, begun, **more)
    turn_until(core, lambda: bool(core.answer("d").tokens))
    assert core.answer("d").tokens == begun
    return begun


@pytest.mark.parametrize("case", ENDS)
def test_the_answer_is_that_of_one_engine(
    make_core: MakeCore, channel: Channel, arrival: Arrival, case: str, is_async: bool
) -> None:
    num_begun = arrival.num_begun
    sampling = {"max_tokens": num_begun + 6, **ENDS[case](num_begun)}
    core = make_core(arrival.role, is_async=is_async)
    before = free(core)
    bring(make_core, channel, arrival, core, **sampling)
    if core.worker.loads:
        assert core.worker.computed == {}
        assert free(core) < before  # its blocks are being written to
    end_load(core)
    answer = core.answer("d")
    assert answer == single_answer(make_core, **sampling)
    assert answer.finish_reason is not None
    assert core.ways == {arrival.way: 1}
    if len(answer.tokens) > num_begun:
        # What is read is not computed, and each generated token but the last one once; it may be
        # under way already when the answer turns out to have ended before.
        first = 0 if arrival.role == "kv_producer" else LENGTH
        computed = core.worker.computed["d"]
        assert computed == [*range(first, first + len(computed))]
        num_more = len(computed) + first - (LENGTH + len(answer.tokens) - 1)
        assert 0 <= num_more <= (is_async and answer.finish_reason is FinishReason.STOP)
    assert_nothing_is_held(core, before)
    assert prompts_of(core)._states == {}


def test_a_wrong_beginning_is_the_one_that_is_sent_and_gone_on_from(
    make_core: MakeCore, channel: Channel, arrival: Arrival, is_async: bool
) -> None:
    """The comparison with one engine would find an answer that is not its own."""
    core = make_core(arrival.role, is_async=is_async)
    wrong = bring(make_core, channel, arrival, core, shift=1, max_tokens=MOST)
    end_load(core)
    assert core.answer("d").tokens == [*wrong, *answer_to([*PROMPT, *wrong], MOST - len(wrong))]


def test_a_load_that_fails_after_it_is_computed_here(
    make_core: MakeCore, channel: Channel, arrival: Arrival, policy: str, is_async: bool
) -> None:
    core = make_core(arrival.role, policy=policy, is_async=is_async)
    core.worker.fails = lambda request_id: True
    bring(make_core, channel, arrival, core, max_tokens=MOST)
    end_load(core)
    assert core.answer("d").tokens == WHOLE[:MOST]
    assert core.worker.computed["d"] == list(range(LENGTH + MOST - 1))
    assert core.ways == {arrival.way: 1}


def test_a_preempted_request_goes_on_with_what_it_has_said(
    make_core: MakeCore, channel: Channel, arrival: Arrival, is_async: bool
) -> None:
    core = make_core(arrival.role, num_blocks=17, is_async=is_async)
    num_begun = len(bring(make_core, channel, arrival, core, max_tokens=MOST - 6))
    core.add(request_of("other", PROMPT[:8], None, max_tokens=40))  # begins before the load ends
    core.worker.holds_loads = False
    requests = [core.scheduler.requests[name] for name in ("d", "other")]
    turn_until(core, lambda: any(one.num_preemptions for one in requests))
    assert len(core.answer("d").tokens) > num_begun
    core.run("d", "other")
    assert core.answer("d").tokens == WHOLE[: MOST - 6]
    assert core.answer("other").tokens == answer_to(PROMPT[:8], 40)


@pytest.mark.parametrize("fails", [False, True])
def test_an_aborted_request_is_told_nothing_more_and_forgotten(
    make_core: MakeCore, channel: Channel, arrival: Arrival, fails: bool, policy: str
) -> None:
    core = make_core(arrival.role, policy=policy)
    core.worker.fails = lambda request_id: fails
    before = free(core)
    begun = bring(make_core, channel, arrival, core, max_tokens=MOST)
    core.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    core.worker.holds_loads = False
    assert_nothing_is_held(core, before)
    assert core.answer("d").tokens == begun
    assert prompts_of(core)._states == {}
    assert core.scheduler.failed_recving_kv_req_ids == set()


@pytest.mark.parametrize("name", [name for name in ARRIVALS if name != "stream"])
def test_a_paused_engine_says_nothing(make_core: MakeCore, channel: Channel, name: str) -> None:
    arrival = ARRIVALS[name]
    core = make_core(arrival.role)
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    arrival.bring(make_core, channel, core, WHOLE[: arrival.num_begun], max_tokens=MOST)
    core.turn()
    assert core.answer("d").tokens == []
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.run("d")
    assert core.answer("d").tokens == WHOLE[:MOST]
    assert core.worker.computed["d"][0] == (0 if arrival.role == "kv_producer" else LENGTH - 1)
    assert core.ways == {FirstToken.ENGINE: 1}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["parameters", "stream"])
def test_an_engine_whose_step_is_vllms_own_sends_nothing_and_leaves_failures_to_it(
    make_core: MakeCore, channel: Channel, monkeypatch: pytest.MonkeyPatch, name: str, fails: bool
) -> None:
    prefill, arrival = make_core("kv_producer"), ARRIVALS[name]

    def refused() -> None:
        raise UnsupportedError("this step does something else")

    monkeypatch.setattr(engine_wait, "install", refused)
    core = make_core("kv_consumer")
    core.worker.fails = lambda request_id: fails
    arrival.bring(lambda _: prefill, channel, core, [FIRST], max_tokens=2)
    end_load(core)
    if fails:
        assert core.answer("d").finish_reason == FinishReason.ERROR
    else:
        assert core.answer("d").tokens == WHOLE[:2]
        assert core.worker.computed["d"] == [LENGTH - 1, LENGTH]
    assert core.ways == {FirstToken.ENGINE: 1}


def answered(core: Core, name: str, tokens: list[int], params: Any, **sampling: Any) -> Any:
    core.add(request_of(name, tokens, params, **sampling))
    core.run(name)
    return core.answer(name)


@pytest.fixture
def pair(is_async: bool, make_core: MakeCore) -> SimpleNamespace:
    """A prefill and a decode engine, and one that does both."""
    return SimpleNamespace(
        prefill=make_core("kv_producer"),
        decode=make_core("kv_consumer", is_async=is_async),
        single=make_core(is_async=is_async),
    )


def both(pair: SimpleNamespace, tokens: list[int], **sampling: Any) -> tuple[Any, Any]:
    """A request's answer of the two engines, and of one."""
    params = prefilled(pair.prefill, tokens, **sampling)
    name = f"r{next(_number)}"
    got = answered(pair.decode, name, tokens, params, **sampling)
    return got, answered(pair.single, name, tokens, None, **sampling)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.booleans())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_prompt_and_length(
    pair: SimpleNamespace, tokens: list[int], max_tokens: int, is_known: bool
) -> None:
    """Also where the decode engine has some of the prompt, or all, from requests before."""
    if is_known:
        both(pair, tokens[: len(tokens) // 2] or tokens, max_tokens=1)
    got, expected = both(pair, tokens, max_tokens=max_tokens)
    assert got == expected


def test_the_longest_answer_ends_where_the_model_does(pair: SimpleNamespace) -> None:
    got, expected = both(pair, list(range(MAX_TOKENS - 1)), max_tokens=9)
    assert got == expected
    assert len(got.tokens) == 1
    assert got.finish_reason == FinishReason.LENGTH


def test_a_request_whose_answer_or_client_has_ended_releases_the_prefill_engine(
    make_core: MakeCore,
) -> None:
    prefill, decode = make_core("kv_producer"), make_core("kv_consumer")
    before = free(decode)
    answered(decode, "one token", PROMPT, prefilled(prefill, PROMPT), max_tokens=1)
    decode.add(request_of("aborted", PROMPT, prefilled(prefill, PROMPT), max_tokens=4))
    decode.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    assert_nothing_is_held(decode, before)
    assert decode.answer("aborted").tokens == []
    assert decode.worker.released == ["one token", "aborted"]
    assert decode.worker.computed == {}


@pytest.mark.parametrize(
    ("there", "prompt", "names", "way"),
    [
        ({"temperature": 0.8}, PROMPT, ["r"], FirstToken.DIFFERS),
        # A router has mixed two requests up: the KV cache that they share can be used.
        ({"temperature": 0.7}, [*PROMPT, 77], ["r"], FirstToken.DIFFERS),
        ({"temperature": 0.7}, PROMPT, ["0_r", "1_r"], FirstToken.PARAMETERS),
    ],
    ids=["drawn otherwise", "a longer prompt", "samples of one request"],
)
def test_a_token_that_may_not_be_the_answers_is_not_used(
    make_core: MakeCore, there: dict[str, Any], prompt: list[int], names: list[str], way: FirstToken
) -> None:
    prefill, decode = make_core("kv_producer"), make_core("kv_consumer")
    params = prefilled(prefill, PROMPT, **there)
    for name in names:
        got = answered(decode, name, prompt, params, max_tokens=2, temperature=0.7)
        assert got.tokens[0] == next_token(prompt)
    assert decode.ways == {way: len(names)}
    assert decode.worker.computed[names[0]][0] >= LENGTH - 1


@pytest.mark.parametrize(
    ("there", "here", "way"), [(False, True, FirstToken.NOT_OFFERED), (True, False, FirstToken.OFF)]
)
def test_either_side_can_leave_it_off(
    make_core: MakeCore, there: bool, here: bool, way: str
) -> None:
    prefill = make_core("kv_producer", first_token_from_prefill=there)
    decode = make_core("kv_consumer", first_token_from_prefill=here)
    params = prefilled(prefill, PROMPT)
    assert ("remote_first_token" in params) == there
    assert answered(decode, "r", PROMPT, params, max_tokens=2).tokens[0] == FIRST
    assert decode.ways == {way: 1}
    assert decode.worker.computed["r"] == [LENGTH - 1, LENGTH]


def test_a_token_that_the_model_does_not_have_is_refused(make_core: MakeCore) -> None:
    prefill, decode = make_core("kv_producer"), make_core("kv_consumer", policy="recompute")
    decode.worker.fails = lambda request_id: True
    params = {**prefilled(prefill, PROMPT), "remote_first_token": 1 << 20}
    decode.add(request_of("r", PROMPT, params, max_tokens=2))
    decode.worker.holds_loads = True
    decode.turn()
    (load,) = decode.worker.loads
    assert "expected remote_first_token below" in load.refusal
    assert load.remote is None
    assert decode.ways == {FirstToken.NOT_OFFERED: 1}


# An answer that a decode engine has begun.


def resume(core: Core, begun: Any, params: Any = None, **sampling: Any) -> Any:
    told = {**(params or {}), "answer_token_ids": begun}
    return answered(core, "r", PROMPT, told, **{"max_tokens": MOST, **sampling})


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
