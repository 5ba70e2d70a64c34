"""Prompts that are read while they are computed, in vLLM's own scheduler: when the prefill engine's
first token comes, and what else may come before it; where that engine is lost before all is read,
what has been read counts, for the request itself and for all that begin like it."""

import threading
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.contract.arrivals import (
    FIRST,
    KEY,
    PROMPT,
    TO_STREAM,
    Channel,
    MakeCore,
    begin,
    end_load,
    offered,
    prompts_of,
    single_answer,
)
from tests.contract.scheduled_core import (
    BLOCK,
    BOUND_SECONDS,
    Core,
    assert_nothing_is_held,
    free,
    has_ended,
    request_of,
    turn_until,
)
from vllm_commext.nixl.decode import remote_tokens
from vllm_commext.nixl.decode.load_state import TokenPhase
from vllm_commext.nixl.first_token import FirstToken
from vllm_commext.nixl.metadata import WorkerMetadata

NUM_READ = 5 * BLOCK + 1
COUNTED = 5 * BLOCK


@pytest.fixture
def decode(is_async: bool, make_core: MakeCore) -> Core:
    return make_core("kv_consumer", is_async=is_async)


def is_awaited(decode: Core) -> bool:
    """Whether the prefill engine may still tell the request's first token."""
    return prompts_of(decode)._states["d"].token_phase is TokenPhase.AWAITED


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
    assert decode.ways == {FirstToken.NOT_OFFERED: 1}
    assert prompts_of(decode)._asker.take_tokens() == {}


def test_a_token_is_sent_while_there_is_no_room_for_its_prompt(
    make_core: MakeCore, channel: Channel
) -> None:
    decode = make_core("kv_consumer", num_blocks=16)
    others = [token + 1 for token in PROMPT[:24]]  # which shares no blocks
    decode.add(request_of("other", others, None, max_tokens=30, eos=-1))
    turn_until(decode, lambda: bool(decode.answer("other").tokens))
    decode.add(request_of("d", PROMPT, channel.params, max_tokens=3))
    channel.begin(PROMPT)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    decode.turn()  # it asks
    prompts_of(decode)._asker.wait_for_token("d", BOUND_SECONDS)
    turn_until(decode, lambda: decode.answer("d").tokens == [FIRST])
    assert not decode.worker.loads
    assert not has_ended(decode, "other")
    turn_until(decode, lambda: has_ended(decode, "d"))
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert decode.worker.computed["d"] == [len(PROMPT), len(PROMPT) + 1]


@pytest.mark.parametrize(
    ("token", "sampled", "way"),
    [
        (FIRST, {"temperature": 0.5}, FirstToken.DIFFERS),
        (10**6, {}, FirstToken.DIFFERS),
        (-1, {}, FirstToken.NOT_OFFERED),
    ],
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
        turn_until(decode, lambda: not is_awaited(decode))
    end_load(decode)
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert decode.ways == {way: 1}


def test_a_load_that_fails_without_a_first_token_is_the_policys(
    make_core: MakeCore, channel: Channel, is_async: bool, policy: str
) -> None:
    """A token that comes then is not used."""
    decode = make_core("kv_consumer", policy=policy, is_async=is_async)
    before = free(decode)
    decode.worker.fails = lambda request_id: True
    begin(decode, channel, max_tokens=3)
    decode.worker.holds_loads = False
    turn_until(decode, lambda: not is_awaited(decode))
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    turn_until(decode, lambda: has_ended(decode, "d"))
    if policy == "fail":
        assert decode.answer("d").tokens == []
        assert decode.answer("d").finish_reason == FinishReason.ERROR
    else:
        assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert decode.ways == {FirstToken.NOT_OFFERED: 1}
    assert_nothing_is_held(decode, before)


def test_an_engine_that_is_paused_when_the_token_comes_computes_it(
    make_core: MakeCore, channel: Channel, decode: Core
) -> None:
    begin(decode, channel, max_tokens=3)
    decode.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    turn_until(decode, lambda: not is_awaited(decode))
    decode.scheduler.set_pause_state(PauseState.UNPAUSED)
    end_load(decode)
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert decode.ways == {FirstToken.ENGINE: 1}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["before the token", "when it is loaded"])
def test_a_request_that_is_aborted_before_its_token_is_told_nothing_and_forgotten(
    make_core: MakeCore, channel: Channel, is_async: bool, is_loaded: bool, fails: bool, policy: str
) -> None:
    decode = make_core("kv_consumer", policy=policy, is_async=is_async)
    decode.worker.fails = lambda request_id: fails
    before = free(decode)
    begin(decode, channel, max_tokens=3)
    prompts = prompts_of(decode)
    if is_loaded:
        decode.worker.holds_loads = False
        turn_until(decode, lambda: bool(prompts.tokens._loaded or prompts._unread))
    told = decode.answer("d").tokens
    decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    if not is_loaded:
        channel.directory.tell(KEY, *offered(make_core, max_tokens=3))
    decode.worker.holds_loads = False
    assert_nothing_is_held(decode, before)
    for _ in range(5):
        decode.turn()
    assert decode.answer("d").tokens == told
    assert prompts._states == prompts._asker.take_tokens() == {}
    assert free(decode) == before


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
    monkeypatch.setattr(remote_tokens, "TOKEN_SECONDS", BOUND_SECONDS)
    begin(decode, channel, max_tokens=3)
    token = offered(make_core, max_tokens=3)
    decode.worker.holds_loads = False
    turn_until(decode, lambda: bool(prompts_of(decode).tokens._loaded))
    later = threading.Timer(0.2, channel.directory.tell, (KEY, *token))
    later.start()
    turn_until(decode, lambda: has_ended(decode, "d"))
    assert decode.ways == {FirstToken.PREFILL: 1}


def test_an_engine_that_computes_waits_for_no_token(
    make_core: MakeCore, channel: Channel, decode: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(decode, channel, max_tokens=3)
    decode.add(request_of("other", PROMPT, None, max_tokens=80))
    turn_until(decode, lambda: bool(decode.answer("other").tokens))
    waited: list[float] = []
    asker = prompts_of(decode)._asker
    monkeypatch.setattr(asker, "wait_for_token", lambda name, seconds: waited.append(seconds))
    end_load(decode)
    assert waited == [0.0]
    assert not has_ended(decode, "other")
    assert decode.ways["not_offered"] == 1


@pytest.fixture
def make_decode(is_async: bool, make_core: MakeCore) -> MakeCore:
    def make(policy: str) -> Core:
        decode = make_core("kv_consumer", policy=policy, is_async=is_async)
        decode.worker.fails = lambda request_id: request_id == "d"
        decode.worker.num_read = NUM_READ
        return decode

    return make


def first_computed(decode: Core, name: str) -> int:
    """Of a request, the first position that was computed here."""
    return decode.worker.computed[name][0]


def ask_again(decode: Core) -> int:
    """The same prompt, from nobody: where its computation begins."""
    decode.add(request_of("again", PROMPT, None, max_tokens=3))
    decode.run("again")
    return first_computed(decode, "again")


@pytest.mark.parametrize("is_told", [False, True], ids=["", "after the first token"])
def test_the_rest_alone_is_computed(
    make_core: MakeCore, channel: Channel, make_decode: MakeCore, is_told: bool
) -> None:
    decode = make_decode("recompute")
    before = free(decode)
    begin(decode, channel, max_tokens=5)
    if is_told:
        channel.directory.tell(KEY, *offered(make_core, max_tokens=5))
        turn_until(decode, lambda: bool(decode.answer("d").tokens))
    end_load(decode)
    assert decode.answer("d") == single_answer(make_core, max_tokens=5)
    assert first_computed(decode, "d") == COUNTED
    assert decode.failures == {"transfer": 1}
    assert_nothing_is_held(decode, before)


@pytest.mark.parametrize("end", ["fail", "abort"])
def test_who_asks_again_finds_what_was_read(
    make_core: MakeCore, channel: Channel, make_decode: MakeCore, end: str
) -> None:
    decode = make_decode("fail")
    before = free(decode)
    begin(decode, channel, max_tokens=3)
    if end == "abort":
        decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
        decode.worker.holds_loads = False
        turn_until(decode, lambda: not decode.worker.loads)
    else:
        end_load(decode)
        assert decode.answer("d").finish_reason == FinishReason.ERROR
    assert ask_again(decode) == COUNTED
    assert decode.answer("again") == single_answer(make_core, max_tokens=3)
    assert_nothing_is_held(decode, before)


def test_blocks_of_a_late_load_stay_out_of_use_but_for_those_that_are_here(
    make_core: MakeCore, channel: Channel, make_decode: MakeCore
) -> None:
    """Its last read may still write to the others."""
    decode = make_decode("recompute")
    before = free(decode)
    begin(decode, channel, max_tokens=3)
    manager, prompts = decode.scheduler.kv_cache_manager, prompts_of(decode)
    (filled,) = manager.get_block_ids("d")
    prompts.note_outcomes([], WorkerMetadata(late={"d"}))
    decode.worker.holds_loads = False
    turn_until(decode, lambda: bool(decode.answer("d").tokens))
    (used,) = manager.get_block_ids("d")
    assert used[:5] == filled[:5]
    assert not set(used[5:]) & set(filled)
    turn_until(decode, lambda: has_ended(decode, "d"))
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert first_computed(decode, "d") == COUNTED
    prompts.note_outcomes([], WorkerMetadata(settled={"d": 1}))
    assert_nothing_is_held(decode, before)


def test_what_was_read_before_new_weights_does_not_count(
    make_core: MakeCore, channel: Channel, make_decode: MakeCore
) -> None:
    decode = make_decode("recompute")
    begin(decode, channel, max_tokens=3)
    prompts_of(decode).forget_computed()
    end_load(decode)
    assert decode.answer("d") == single_answer(make_core, max_tokens=3)
    assert first_computed(decode, "d") == 0
