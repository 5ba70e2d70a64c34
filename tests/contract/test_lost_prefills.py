"""Prompts whose prefill engine is lost before all is read, in vLLM's own scheduler: what has been
read counts, for the request itself and for all that begin like it."""

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.contract.arrivals import (
    KEY,
    PROMPT,
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
    Core,
    assert_nothing_is_held,
    free,
    has_ended,
    request_of,
    turn_until,
)
from vllm_commext.nixl.metadata import WorkerMetadata

NUM_READ = 5 * BLOCK + 1
COUNTED = 5 * BLOCK


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
