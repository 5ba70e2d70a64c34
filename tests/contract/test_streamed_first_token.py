"""The prefill engine's first token for a prompt that is read while it is computed, in vLLM's own
scheduler: it is the answer's first one where it is there when the prompt is."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.contract.scheduled_core import (
    BOUND_SECONDS,
    SENDS_FIRST_TOKENS,
    Core,
    has_ended,
    next_token,
    prefilled,
    request_of,
    turn_until,
)
from tests.contract.test_streams import KEY, PROMPT, TO_STREAM, Channel
from vllm_commext.nixl import scheduler
from vllm_commext.nixl.first_token import DIFFERS, LOGPROBS, NOT_OFFERED, PREFILL

pytestmark = [SENDS_FIRST_TOKENS, pytest.mark.timeout(600)]
FIRST = next_token(PROMPT)
MakeCore = Callable[..., Core]
ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 6},
    "one token": {"max_tokens": 1},
    "end of sequence at once": {"max_tokens": 6, "eos": FIRST},
    "end of sequence as the second token": {"max_tokens": 6, "eos": next_token([*PROMPT, FIRST])},
    "a stop token at once": {"max_tokens": 6, "stop_token_ids": [FIRST]},
    "drawn": {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9},
}


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["one step at a time", "async scheduling"])
def decode(request: pytest.FixtureRequest, make_core: MakeCore) -> Core:
    return make_core("kv_consumer", is_async=request.param)


def offered(make_core: MakeCore, **sampling: Any) -> tuple[int, str]:
    """What a prefill engine says of the prompt's first token."""
    params = prefilled(make_core("kv_producer"), PROMPT, **sampling)
    return params["remote_first_token"], params["remote_sampling"]


def begin(decode: Core, channel: Channel, **sampling: Any) -> None:
    """A request, up to its load, which does not end yet."""
    decode.worker.holds_loads = True
    decode.add(request_of("d", PROMPT, channel.params, **sampling))
    channel.begin(PROMPT)
    turn_until(decode, lambda: bool(decode.worker.loads))


def knows_token(decode: Core) -> bool:
    side = decode.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    return side._consumer.wait_for_token("d", 0.0) is not None


def end_load(decode: Core) -> None:
    decode.worker.holds_loads = False
    turn_until(decode, lambda: has_ended(decode, "d"))


def single_answer(make_core: MakeCore, **sampling: Any) -> Any:
    single = make_core()
    single.add(request_of("d", PROMPT, None, **sampling))
    single.run("d")
    return single.answer("d")


@pytest.mark.parametrize("case", ENDS)
def test_the_answer_is_that_of_one_engine(
    make_core: MakeCore, channel: Channel, decode: Core, case: str
) -> None:
    sampling = ENDS[case]
    begin(decode, channel, **sampling)
    channel.directory.tell(KEY, *offered(make_core, **sampling))
    turn_until(decode, lambda: knows_token(decode))
    assert decode.answer("d").tokens == []
    end_load(decode)
    assert decode.answer("d") == single_answer(make_core, **sampling)
    assert decode.ways == Counter({PREFILL: 1})
    # Nothing of the prompt is computed, and each generated token but the last one once; it may be
    # under way already when the answer turns out to have ended before.
    computed = decode.worker.computed.get("d", [])
    assert computed == [*range(len(PROMPT), len(PROMPT) + len(computed))]
    assert 0 <= len(computed) + 1 - len(decode.answer("d").tokens) <= 1
    for _ in range(5):
        decode.turn()
    assert not decode.scheduler.has_requests()


def test_a_token_that_comes_later_than_the_prompt_is_computed_here(
    make_core: MakeCore, channel: Channel, decode: Core
) -> None:
    begin(decode, channel, max_tokens=3)
    end_load(decode)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    for _ in range(5):
        decode.turn()
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert decode.worker.computed["d"][0] == len(PROMPT) - 1
    assert decode.ways == Counter({NOT_OFFERED: 1})
    assert not knows_token(decode)


def test_a_token_is_known_when_its_prompt_was_computed_before_it_was_asked_for(
    make_core: MakeCore, channel: Channel, decode: Core
) -> None:
    channel.begin(PROMPT)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    decode.worker.holds_loads = True
    decode.add(request_of("d", PROMPT, channel.params, max_tokens=3))
    turn_until(decode, lambda: bool(decode.worker.loads))
    assert knows_token(decode)
    end_load(decode)
    assert decode.ways == Counter({PREFILL: 1})


def test_a_wrong_token_is_the_one_that_is_sent_and_gone_on_from(
    make_core: MakeCore, channel: Channel, decode: Core
) -> None:
    """The comparison with one engine would find a token that is not its own."""
    begin(decode, channel, max_tokens=3)
    token, sampling = offered(make_core, max_tokens=3)
    wrong = (token + 1) % 200
    channel.directory.tell(KEY, wrong, sampling)
    turn_until(decode, lambda: knows_token(decode))
    end_load(decode)
    assert decode.answer("d").tokens[:2] == [wrong, next_token([*PROMPT, wrong])]


@pytest.mark.parametrize(
    ("token", "sampled", "way"),
    [(FIRST, {"temperature": 0.5}, DIFFERS), (10**6, {}, DIFFERS), (-1, {}, NOT_OFFERED)],
    ids=["drawn otherwise", "no token of the model's", "none"],
)
def test_what_cannot_be_used_is_computed_here(
    make_core: MakeCore,
    channel: Channel,
    decode: Core,
    token: int,
    sampled: dict[str, Any],
    way: str,
) -> None:
    begin(decode, channel, max_tokens=3)
    _, sampling = offered(make_core, max_tokens=3, **sampled)
    channel.directory.tell(KEY, token, sampling)
    if token >= 0:
        turn_until(decode, lambda: knows_token(decode))
    end_load(decode)
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert decode.ways == Counter({way: 1})


def test_what_more_than_the_token_follows_from_is_not_asked_for(
    make_core: MakeCore, channel: Channel, decode: Core
) -> None:
    begin(decode, channel, max_tokens=3, logprobs=1)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    for _ in range(20):
        decode.turn()
    assert not knows_token(decode)
    end_load(decode)
    assert decode.ways == Counter({LOGPROBS: 1})


def test_a_load_that_fails_sends_no_token(
    make_core: MakeCore, channel: Channel, decode: Core
) -> None:
    decode.worker.fails = lambda request_id: True
    begin(decode, channel, max_tokens=3)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    turn_until(decode, lambda: knows_token(decode))
    end_load(decode)
    assert decode.answer("d").tokens == []
    assert decode.answer("d").finish_reason == FinishReason.ERROR
    assert decode.ways == Counter({NOT_OFFERED: 1})


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_aborted_request_is_told_nothing_and_forgotten(
    make_core: MakeCore, channel: Channel, decode: Core, is_loaded: bool
) -> None:
    begin(decode, channel, max_tokens=3)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    turn_until(decode, lambda: knows_token(decode))
    side = decode.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    if is_loaded:
        decode.worker.holds_loads = False
        turn_until(decode, lambda: bool(side._begun))
    decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    decode.worker.holds_loads = False
    for _ in range(10):
        decode.turn()
    assert decode.answer("d").tokens == []
    assert side._streamed == side._first_tokens == side._consumer._asker._tokens == {}
    assert not decode.scheduler.has_requests()


def test_the_prefill_engine_tells_the_token_when_the_prompt_is_computed(
    make_core: MakeCore,
) -> None:
    core = make_core("kv_producer")
    core.add(request_of("p", PROMPT, TO_STREAM, max_tokens=1))
    core.run("p")
    side = core.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    found = side._prefills.directory.find([], [KEY])
    assert found[KEY].first_token == FIRST
    assert found[KEY].sampling.endswith("greedy")


def test_an_engine_with_nothing_to_compute_waits_for_a_token_that_is_about_to_come(
    make_core: MakeCore, channel: Channel, decode: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "TOKEN_SECONDS", BOUND_SECONDS)
    begin(decode, channel, max_tokens=3)
    token = offered(make_core, max_tokens=3)
    side = decode.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    decode.worker.holds_loads = False
    turn_until(decode, lambda: bool(side._begun))
    later = threading.Timer(0.2, channel.directory.tell, (KEY, *token))
    later.start()
    turn_until(decode, lambda: has_ended(decode, "d"))
    assert decode.ways == Counter({PREFILL: 1})


def test_an_engine_that_computes_waits_for_no_token(
    make_core: MakeCore, channel: Channel, decode: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(decode, channel, max_tokens=3)
    decode.add(request_of("other", PROMPT, None, max_tokens=80))
    turn_until(decode, lambda: bool(decode.answer("other").tokens))
    consumer = decode.scheduler.get_kv_connector().scheduler_side._consumer  # pyright: ignore
    waited, really = [], consumer.wait_for_token

    def wait_for_token(name: str, seconds: float) -> Any:
        waited.append(seconds)
        return really(name, seconds)

    monkeypatch.setattr(consumer, "wait_for_token", wait_for_token)
    end_load(decode)
    assert waited == [0.0]
    assert not has_ended(decode, "other")
    assert decode.ways["not_offered"] == 1
