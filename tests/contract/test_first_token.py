"""A prefill engine's first token in vLLM's own scheduler: the answers are those of one engine,
and each token, position and block is accounted for."""

import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.contract.scheduled_core import (
    BLOCK,
    BOUND_SECONDS,
    MAX_TOKENS,
    NUM_TOKENS,
    Core,
    next_token,
    prefilled,
    request_of,
)
from tests.contract.vllm_caches import make_caches
from tests.kit.load_states import begin_load
from vllm_commext.compat import engine_wait
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl import first_token
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.metadata import StepMetadata, WorkerMetadata
from vllm_commext.nixl.reasons import FirstToken
from vllm_commext.nixl.requests import Load
from vllm_commext.nixl.vllm_cache import ModelFacts
from vllm_commext.nixl.worker import WorkerSide

# vLLM looks at the model's class in a process of its own, once, which imports all of vLLM.
pytestmark = pytest.mark.timeout(600)
PROMPT = list(range(14))
FIRST = next_token(PROMPT)
_number = count()
MakeCore = Callable[..., Core]


@pytest.fixture
def make(make_core: MakeCore) -> MakeCore:
    return make_core


def answered(core: Core, name: str, tokens: list[int], params: Any, **sampling: Any) -> Any:
    core.add(request_of(name, tokens, params, **sampling))
    core.run(name)
    return core.answer(name)


@pytest.fixture(params=[False, True], ids=["one step at a time", "async scheduling"])
def pair(request: pytest.FixtureRequest, make: MakeCore) -> SimpleNamespace:
    """A prefill and a decode engine, and one that does both."""
    return SimpleNamespace(
        prefill=make("kv_producer"),
        decode=make("kv_consumer", is_async=request.param),
        single=make(is_async=request.param),
    )


def both(pair: SimpleNamespace, tokens: list[int], **sampling: Any) -> tuple[Any, Any]:
    """A request's answer of the two engines, and of one."""
    params = prefilled(pair.prefill, tokens, **sampling)
    name = f"r{next(_number)}"
    got = answered(pair.decode, name, tokens, params, **sampling)
    return got, answered(pair.single, name, tokens, None, **sampling)


ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 6},
    "two tokens": {"max_tokens": 2},
    "one token": {"max_tokens": 1},
    "end of sequence at once": {"max_tokens": 6, "eos": FIRST},
    "end of sequence as the second token": {"max_tokens": 6, "eos": next_token([*PROMPT, FIRST])},
    "end of sequence ignored": {"max_tokens": 3, "eos": FIRST, "ignore_eos": True},
    "a stop token at once": {"max_tokens": 6, "stop_token_ids": [FIRST]},
    "drawn": {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
    "stop strings": {"max_tokens": 4, "stop": ["x"], "include_stop_str_in_output": True},
}


@pytest.mark.parametrize("case", ENDS)
def test_the_answer_is_that_of_one_engine(pair: SimpleNamespace, case: str) -> None:
    sampling = dict(ENDS[case])
    # vLLM leaves the end of sequence out where it is to be ignored.
    if sampling.get("ignore_eos"):
        sampling["eos"] = -1
    got, expected = both(pair, PROMPT, **sampling)
    assert got == expected
    assert got.finish_reason is not None
    assert pair.decode.ways == {FirstToken.PREFILL: 1}
    assert not pair.decode.scheduler.has_requests() or _runs_dry(pair.decode)


def _runs_dry(core: Core) -> bool:
    for _ in range(5):
        core.turn()
    return not core.scheduler.has_requests()


def test_the_first_token_is_sent_before_anything_is_loaded(pair: SimpleNamespace) -> None:
    decode: Core = pair.decode
    params = prefilled(pair.prefill, PROMPT)
    decode.worker.holds_loads = True
    decode.add(request_of("r", PROMPT, params, max_tokens=4))
    decode.turn()
    assert decode.answer("r").tokens == [FIRST]
    for _ in range(5):
        decode.turn()
    assert decode.answer("r").tokens == [FIRST]
    assert decode.worker.computed == {}
    decode.worker.holds_loads = False
    decode.run("r")
    # Nothing of the prompt is computed, and each generated token but the last one once.
    assert decode.worker.computed == {"r": [14, 15, 16]}


def test_a_wrong_token_is_the_one_that_is_sent_and_gone_on_from(pair: SimpleNamespace) -> None:
    """The comparison with one engine would find a token that is not its own."""
    wrong = (FIRST + 1) % NUM_TOKENS
    params = {**prefilled(pair.prefill, PROMPT), "remote_first_token": wrong}
    got = answered(pair.decode, "r", PROMPT, params, max_tokens=3)
    expected = [wrong, next_token([*PROMPT, wrong])]
    assert got.tokens == [*expected, next_token([*PROMPT, *expected])]
    assert got.tokens != answered(pair.single, "r", PROMPT, None, max_tokens=3).tokens


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


def test_a_whole_prefix_hit_loads_nothing_and_releases(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    tokens = list(range(2 * BLOCK))
    first = answered(decode, "a", tokens, prefilled(prefill, tokens), max_tokens=3)
    again = answered(decode, "b", tokens, prefilled(prefill, tokens), max_tokens=3)
    assert again == first
    assert decode.worker.released == ["b"]
    assert decode.worker.computed["b"] == [8, 9]


def test_an_answer_of_one_token_releases_the_prefill_engine(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    free = decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    answered(decode, "r", PROMPT, prefilled(prefill, PROMPT), max_tokens=1)
    assert _runs_dry(decode)
    assert decode.worker.released == ["r"]
    assert decode.worker.computed == {}
    assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert decode.scheduler.requests == {}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_after_the_first_token_is_computed_here(
    pair: SimpleNamespace, make: MakeCore, policy: str
) -> None:
    decode = make("kv_consumer", policy=policy, is_async=pair.decode._depth == 2)
    decode.worker.fails = lambda request_id: True
    params = prefilled(pair.prefill, PROMPT)
    got = answered(decode, "r", PROMPT, params, max_tokens=5)
    assert got == answered(pair.single, "r", PROMPT, None, max_tokens=5)
    assert decode.worker.computed["r"] == list(range(18))
    # Without a first token that was sent, the policy decides.
    params = prefilled(pair.prefill, PROMPT[1:], seed=1)
    got = answered(decode, "s", PROMPT[1:], params, max_tokens=2, seed=1)
    assert (got.finish_reason == FinishReason.ERROR) == (policy == "fail")
    assert decode.ways == {FirstToken.PREFILL: 1, FirstToken.SEEDED: 1}


def test_a_preempted_request_goes_on_with_what_it_has_said(make: MakeCore) -> None:
    """Three requests over blocks for two."""
    prefill, decode, single = make("kv_producer"), make("kv_consumer", num_blocks=16), make()
    prompts = {f"r{n}": list(range(n, n + 13)) for n in range(3)}
    for name, tokens in prompts.items():
        params = prefilled(prefill, tokens)
        decode.add(request_of(name, tokens, params, max_tokens=12))
        single.add(request_of(name, tokens, max_tokens=12))
    preempted: set[str] = set()
    for _ in range(200):
        decode.turn()
        preempted |= {
            one.request_id for one in decode.scheduler.requests.values() if one.num_preemptions
        }
    single.run(*prompts)
    assert preempted, "there was room for all of them"
    for name in prompts:
        assert decode.answer(name) == single.answer(name)


def test_a_request_that_is_aborted_while_it_loads(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    decode.worker.holds_loads = True
    decode.add(request_of("r", PROMPT, prefilled(prefill, PROMPT), max_tokens=4))
    decode.turn()
    decode.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    decode.worker.holds_loads = False
    decode.worker.fails = lambda request_id: True
    assert _runs_dry(decode)
    assert decode.scheduler.requests == {}
    assert decode.scheduler.failed_recving_kv_req_ids == set()
    assert decode.answer("r").tokens == [FIRST]


def test_a_request_that_is_aborted_before_the_next_step_is_told_nothing(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    decode.add(request_of("r", PROMPT, prefilled(prefill, PROMPT), max_tokens=4))
    decode.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert _runs_dry(decode)
    assert decode.answer("r").tokens == []
    assert decode.worker.released == ["r"]


USUAL: dict[str, tuple[dict[str, Any], str]] = {
    "a seed": ({"seed": 3}, FirstToken.SEEDED),
    "log probabilities": ({"logprobs": 2}, FirstToken.LOGPROBS),
    "a grammar": (
        {"structured_outputs": StructuredOutputsParams(choice=["a"])},
        FirstToken.GRAMMAR,
    ),
    "a penalty": ({"presence_penalty": 0.5}, FirstToken.PENALTIES),
    "a bias": ({"logit_bias": {3: 1.0}}, FirstToken.LOGIT_RULES),
    "a bad word": ({"bad_words": ["x"]}, FirstToken.LOGIT_RULES),
    "a least length": ({"min_tokens": 1}, FirstToken.MIN_TOKENS),
}


@pytest.mark.parametrize("case", USUAL)
def test_what_more_than_the_token_follows_from_goes_the_usual_way(
    make: MakeCore, case: str
) -> None:
    """Also where the prefill engine does not know of it."""
    sampling, way = USUAL[case]
    prefill, decode = make("kv_producer"), make("kv_consumer")
    request = request_of("r", PROMPT, prefilled(prefill, PROMPT), max_tokens=4, **sampling)
    decode.add(request)
    assert decode.scheduler.connector.scheduler_side.prompts.take_first_tokens() == []  # pyright: ignore
    if case != "a grammar":  # needs a tokenizer, which there is none of here
        decode.run("r")
        assert decode.worker.computed["r"][0] == 13
        assert decode.ways == {way: 1}
    request = request_of("p", PROMPT, {"do_remote_decode": True}, max_tokens=1, **sampling)
    assert first_token.offer(first_token.Sampler("d", 9, None), request) == (-1, "")


def test_sampling_must_be_the_same(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, PROMPT, temperature=0.7)
    answered(decode, "r", PROMPT, params, max_tokens=2, temperature=0.8)
    assert decode.ways == {FirstToken.DIFFERS: 1}
    assert decode.worker.computed["r"][0] == 13


def test_the_token_after_a_shorter_prompt_is_not_that_of_its_continuation(make: MakeCore) -> None:
    """Its KV cache is: a router has mixed two requests up, and what they share can be used."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    got = answered(decode, "r", [*PROMPT, 77], prefilled(prefill, PROMPT), max_tokens=2)
    assert got.tokens[0] == next_token([*PROMPT, 77])
    assert decode.ways == {FirstToken.DIFFERS: 1}


def test_samples_of_one_request_are_drawn_one_by_one(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, PROMPT, temperature=0.7)
    for name in ("0_r", "1_r"):
        answered(decode, name, PROMPT, params, max_tokens=2, temperature=0.7)
    assert decode.ways == {FirstToken.SAMPLES: 2}


def test_images_and_sessions_go_the_usual_way() -> None:
    own = first_token.Sampler("d", 9, None)
    item = MultiModalFeatureSpec(None, "image", "one", PlaceholderRange(2, 3))
    for change in ({"mm_features": [item]}, {"resumable": True}, {"prompt_token_ids": None}):
        request = request_of("r", PROMPT)
        request.append_output_token_ids(5)
        assert first_token.offer(own, request)[0] == 5
        for name, value in change.items():
            setattr(request, name, value)
        assert first_token.offer(own, request) == (-1, "")


@pytest.mark.parametrize(
    ("there", "here", "way"),
    [(False, True, FirstToken.NOT_OFFERED), (True, False, FirstToken.OFF)],
)
def test_either_side_can_leave_it_off(make: MakeCore, there: bool, here: bool, way: str) -> None:
    prefill = make("kv_producer", first_token_from_prefill=there)
    decode = make("kv_consumer", first_token_from_prefill=here)
    params = prefilled(prefill, PROMPT)
    assert ("remote_first_token" in params) == there
    assert answered(decode, "r", PROMPT, params, max_tokens=2).tokens[0] == FIRST
    assert decode.ways == {way: 1}
    assert decode.worker.computed["r"] == [13, 14]


def test_a_token_that_the_model_does_not_have_is_refused(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", policy="recompute")
    decode.worker.fails = lambda request_id: True
    params = {**prefilled(prefill, PROMPT), "remote_first_token": 1 << 20}
    decode.add(request_of("r", PROMPT, params, max_tokens=2))
    decode.worker.holds_loads = True
    decode.turn()
    (load,) = decode.worker.loads
    assert "expected remote_first_token below" in load.refusal
    assert load.remote is None


def test_a_paused_engine_says_nothing(make: MakeCore) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, PROMPT)
    decode.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    decode.add(request_of("r", PROMPT, params, max_tokens=2))
    decode.turn()
    assert decode.answer("r").tokens == []
    decode.scheduler.set_pause_state(PauseState.UNPAUSED)
    decode.run("r")
    assert decode.worker.computed["r"] == [13, 14]
    assert decode.ways == {FirstToken.ENGINE: 1}


def refused() -> None:
    raise UnsupportedError("this step does something else")


def test_an_engine_whose_step_is_vllms_own_goes_the_usual_way(
    make: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_wait, "install", refused)
    prefill, decode = make("kv_producer"), make("kv_consumer")
    answered(decode, "r", PROMPT, prefilled(prefill, PROMPT), max_tokens=2)
    assert decode.worker.computed["r"] == [13, 14]
    assert decode.ways == {FirstToken.ENGINE: 1}


def test_a_failure_that_is_not_vllms_is_told_apart() -> None:
    """By a real worker, whose loads fail as they are refused."""
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config, caches = make_caches({"layer": spec})
    settings = ConnectorConfig(side_channel_host="127.0.0.1", side_channel_port=5600)
    worker = WorkerSide(
        "d", settings, {}, config, ModelFacts(Rank(1, 0), 1, None, True, {"layer": "FLASH_ATTN"})
    )
    blocks = (Blocks(0, [1]),)
    loads = [
        Load(name, None, blocks, 16, refusal="not to be tried", recomputes=name == "said")
        for name in ("said", "unsaid")
    ]
    worker.register(caches)
    received: set[str] = set()
    failed: set[str] = set()
    unread: set[str] = set()
    try:
        worker.start_step(StepMetadata(loads=loads))
        deadline = time.monotonic() + BOUND_SECONDS
        while len(received) < len(loads) and time.monotonic() < deadline:
            outcomes, told = worker.take_outcomes(), worker.take_metadata()
            received |= outcomes.received
            failed |= outcomes.failed
            unread |= told.unread if told is not None else set()
    finally:
        worker.close()
    assert (received, failed, unread) == ({"said", "unsaid"}, {"unsaid"}, {"said"})


def test_a_failure_on_one_rank_is_kept_until_the_last_one_is_done(make: MakeCore) -> None:
    decode = make("kv_consumer")
    side = decode.scheduler.connector.scheduler_side  # pyright: ignore
    aggregator = KVOutputAggregator(2)

    def step(*ranks: KVConnectorOutput) -> list[tuple[str, bool]]:
        outputs = [ModelRunnerOutput([], {}, kv_connector_output=one) for one in ranks]
        total = aggregator.aggregate(outputs).kv_connector_output
        side.note_outcomes(total.finished_recving or set(), set(), total.kv_connector_worker_meta)
        return side.prompts.take_unread()

    begin_load(side, "r")
    failed = KVConnectorOutput(
        finished_recving={"r"}, kv_connector_worker_meta=WorkerMetadata(unread={"r"})
    )
    assert step(failed, KVConnectorOutput()) == []
    assert step(KVConnectorOutput(), KVConnectorOutput(finished_recving={"r"})) == [("r", False)]
    assert step(KVConnectorOutput(), KVConnectorOutput()) == []


def test_the_longest_answer_ends_where_the_model_does(pair: SimpleNamespace) -> None:
    got, expected = both(pair, list(range(MAX_TOKENS - 1)), max_tokens=9)
    assert got == expected
    assert len(got.tokens) == 1
    assert got.finish_reason == FinishReason.LENGTH
