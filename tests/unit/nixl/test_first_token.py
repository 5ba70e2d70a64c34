"""When a prefill engine's first token is the decode engine's: exactly where nothing that it follows
from can differ."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.nixl.first_token import FirstToken, Sampler, facts_digest, offer, source_of
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.params import MAX_SAMPLING_CHARACTERS, TransferParams

OWN = Sampler("0123456789abcdef", 100, None)
NUM_PROMPT = 7


class Params(msgspec.Struct):
    """vLLM's sampling parameters, and one that no vLLM has yet."""

    n: int = 1
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    of_a_later_vllm: float = 2.0


WITHOUT_EFFECT: dict[str, st.SearchStrategy[Any]] = {
    "stop": st.lists(st.text(max_size=3), max_size=2),
    "stop_token_ids": st.none() | st.lists(st.integers(0, 9), max_size=2),
    "ignore_eos": st.booleans(),
    "max_tokens": st.none() | st.integers(1, 9),
    "detokenize": st.booleans(),
    "extra_args": st.none() | st.just({"kv_transfer_params": {"a": 1}}),
    "skip_reading_prefix_cache": st.sampled_from([None, False]),
}
DRAWN_BY: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.1 + 0.2, 0.3, 1.0]),
    "top_p": st.sampled_from([0.9, 1.0]),
    "top_k": st.sampled_from([0, 5]),
    "min_p": st.sampled_from([0.0, 0.1]),
}
UNUSUAL: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 3),
    "logprobs": st.integers(0, 3),
    "prompt_logprobs": st.integers(0, 3),
    "structured_outputs": st.just(object()),
    "presence_penalty": st.floats(0.1, 2.0),
    "repetition_penalty": st.floats(1.1, 2.0),
    "logit_bias": st.just({1: 2.0}),
    "bad_words": st.just(["x"]),
    "min_tokens": st.integers(1, 3),
    "n": st.integers(2, 4),
    "of_a_later_vllm": st.floats(3.0, 4.0) | st.just(True),
    "skip_reading_prefix_cache": st.just(True),
}


def request_of(params: Params | None, tokens: tuple[int, ...] = (), **changes: Any) -> Any:
    """As much of vLLM's request as is looked at."""
    plain: dict[str, Any] = {
        "request_id": "cmpl-1",
        "prompt_token_ids": list(range(NUM_PROMPT)),
        "prompt_embeds": None,
        "mm_features": [],
        "resumable": False,
        "sampling_params": params,
        "output_token_ids": tokens,
        "num_prompt_tokens": NUM_PROMPT,
    }
    return SimpleNamespace(**{**plain, **changes})


def transfer_params_of(token: int, sampling: str, num_tokens: int = NUM_PROMPT) -> TransferParams:
    remote = RemoteRequest("p", "", "h", 1, 1, "r", ((1,),), num_tokens)
    return TransferParams(remote, {}, token, sampling)


def handed_over(there: Any, here: Any, own: Sampler = OWN, other: Sampler = OWN) -> str:
    """The way of ``here``'s first token, when its prompt was prefilled as ``there``."""
    return source_of(other, transfer_params_of(*offer(own, there)), here)


effectless = st.fixed_dictionaries({}, optional=WITHOUT_EFFECT)
drawn_by = st.fixed_dictionaries({}, optional=DRAWN_BY)


@given(effectless, effectless, drawn_by, drawn_by, st.integers(0, 99))
def test_a_token_is_used_exactly_where_it_was_drawn_alike(
    there: dict[str, Any], here: dict[str, Any], by: dict[str, Any], other: dict[str, Any], one: int
) -> None:
    first = request_of(Params(**there, **by), (one,))
    second = request_of(Params(**here, **other))
    token, sampling = offer(OWN, first)
    assert token == one
    assert len(sampling) <= MAX_SAMPLING_CHARACTERS
    both = (Params(**by), Params(**other))
    greedy = [params.temperature == 0 for params in both]
    alike = all(greedy) or (not any(greedy) and both[0] == both[1])
    way = source_of(OWN, transfer_params_of(token, sampling), second)
    assert way == (FirstToken.PREFILL if alike else FirstToken.DIFFERS)


@pytest.mark.parametrize("name", UNUSUAL)
@given(effectless, st.data())
@settings(max_examples=10)
def test_everything_else_goes_the_usual_way_on_either_side(
    name: str, plain: dict[str, Any], data: st.DataObject
) -> None:
    unusual = Params(**{**plain, name: data.draw(UNUSUAL[name])})
    usual = request_of(Params(**plain), (5,))
    assert handed_over(usual, request_of(unusual)) == FirstToken.PARAMETERS
    assert offer(OWN, request_of(unusual, (5,))) == (-1, "")
    assert handed_over(request_of(unusual, (5,)), request_of(Params())) == FirstToken.NOT_OFFERED


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"prompt_embeds": object()}, FirstToken.PROMPT),
        ({"prompt_token_ids": None}, FirstToken.PROMPT),
        ({"mm_features": [object()]}, FirstToken.PROMPT),
        ({"resumable": True}, FirstToken.PROMPT),
        ({"request_id": "1_cmpl-1"}, FirstToken.PARAMETERS),
        ({"sampling_params": None}, FirstToken.PARAMETERS),
    ],
)
def test_requests_that_are_more_than_tokens_go_the_usual_way(
    changes: dict[str, Any], way: str
) -> None:
    there, here = request_of(Params(), (5,)), request_of(Params())
    assert handed_over(there, here) == FirstToken.PREFILL
    for name, value in changes.items():
        setattr(here, name, value)
        setattr(there, name, value)
    assert source_of(OWN, transfer_params_of(5, "0123456789abcdef greedy"), here) == way
    assert offer(OWN, there) == (-1, "")


@given(st.integers(0, 20))
def test_a_token_follows_one_prompt(num_tokens: int) -> None:
    token, sampling = offer(OWN, request_of(Params(), (5,)))
    way = source_of(OWN, transfer_params_of(token, sampling, num_tokens), request_of(Params()))
    assert (way == FirstToken.PREFILL) == (num_tokens == NUM_PROMPT)


def test_engines_that_differ_or_refuse_do_not_exchange_tokens() -> None:
    there, here = request_of(Params(), (5,)), request_of(Params())
    assert handed_over(there, here, other=Sampler("another", 100, None)) == FirstToken.DIFFERS
    for refusal in (FirstToken.OFF, FirstToken.ENGINE):
        refusing = Sampler(OWN.digest, 100, refusal)
        assert handed_over(there, here, other=refusing) == refusal
        assert handed_over(there, here, own=refusing) == FirstToken.NOT_OFFERED
    assert handed_over(there, here, other=Sampler()) == FirstToken.ENGINE
    assert handed_over(request_of(Params()), here) == FirstToken.NOT_OFFERED


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3)), st.randoms())
def test_facts_are_the_same_in_any_order(facts: dict[str, str], dice: Any) -> None:
    pairs = list(facts.items())
    dice.shuffle(pairs)
    assert facts_digest(dict(pairs)) == facts_digest(facts)
    assert facts_digest({**facts, "more": ""}) != facts_digest(facts) or "more" in facts
