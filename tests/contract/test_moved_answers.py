"""An answer under way at one engine goes on at another one, which reads what the first one has of
it, in vLLM's own scheduler."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.interface import PauseState

from tests.contract.reuse_engines import BOUND_SECONDS, Engine, Writes, start, turn_until
from tests.contract.scheduled_core import BLOCK, NUM_TOKENS, next_token, request_of
from vllm_commext.compat.first_token import RunningRequests

pytestmark = [
    pytest.mark.skipif(
        not hasattr(BlockPool, "unpin_blocks"), reason="vLLM before 0.32 tells of no block's reuse"
    ),
    pytest.mark.timeout(600),
]
PROMPT = list(range(14))
MOST, SO_FAR = 40, 19
MakeEngine = Callable[..., Engine]


def whole_answer() -> list[int]:
    tokens = list(PROMPT)
    for _ in range(MOST):
        tokens.append(next_token(tokens))
    return tokens[len(PROMPT) :]


@pytest.fixture
def make(folder: Path, restored_step: None) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        made.append(start(folder, "kv_consumer", **settings))
        return made[-1]

    yield engine
    for one in made:
        one.core.close()
        one.table.close()


def add(engine: Engine, name: str, count: int, *others: Engine) -> None:
    """A request that goes on with so many tokens of the answer."""
    params = {
        "answer_token_ids": whole_answer()[:count],
        "reuse_from": [one.place for one in others],
    }
    engine.core.add(request_of(name, PROMPT, params, max_tokens=MOST))


def answering(make: MakeEngine, *, is_async: bool = False, **settings: Any) -> Engine:
    """An engine in the midst of the answer."""
    owner = make(is_async=is_async, **settings)
    owner.core.add(request_of("old", PROMPT, max_tokens=MOST))
    turn_until(owner.core, lambda: len(owner.core.answer("old").tokens) >= SO_FAR)
    return owner


def answered(owner: Engine, reader: Engine) -> list[int]:
    """What the other engine answers, while the first one goes on."""
    end = time.monotonic() + BOUND_SECONDS
    while reader.core.scheduler.requests:
        assert time.monotonic() < end
        owner.core.turn()
        reader.core.turn()
    return reader.core.answer("new").tokens


IS_ASYNC = pytest.mark.parametrize(
    "is_async", [False, True], ids=["one step at a time", "async scheduling"]
)


@IS_ASYNC
def test_the_answer_so_far_is_read_and_not_computed(make: MakeEngine, is_async: bool) -> None:
    owner = answering(make, is_async=is_async)
    reader = make(is_async=is_async, reuse_min_tokens=1024)  # that is of new prompts alone
    assert len(owner.side._reuse._offers._table) == 0
    add(reader, "new", SO_FAR, owner)
    assert answered(owner, reader) == whole_answer()
    num_blocks = (len(PROMPT) + SO_FAR - 1) // BLOCK
    assert reader.core.worker.computed["new"][0] == num_blocks * BLOCK
    assert reader.counted == {"reuse_lookups": 1, "reuse_blocks": num_blocks}
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    assert owner.core.answer("old").tokens == whole_answer()


@IS_ASYNC
def test_a_read_that_fails_is_computed(make: MakeEngine, is_async: bool) -> None:
    owner, reader = answering(make, is_async=is_async), make(is_async=is_async)
    reader.core.worker.fails = lambda request_id: True
    add(reader, "new", SO_FAR, owner)
    assert answered(owner, reader) == whole_answer()
    assert reader.core.worker.computed["new"][0] == 0


def test_an_answer_that_is_begun_anew_reads_the_prompt_alone(make: MakeEngine) -> None:
    """It was looked for with the answer, which a pause has had left aside."""
    owner, reader = answering(make), make()
    reader.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    add(reader, "new", SO_FAR, owner)
    reader.core.turn()
    reader.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert answered(owner, reader) == whole_answer()
    computed = reader.core.worker.computed["new"]
    assert computed[0] == (len(PROMPT) - 1) // BLOCK * BLOCK


def test_an_engine_at_which_nothing_runs_answers_at_once(make: MakeEngine) -> None:
    """It takes no step, in which it would look."""
    owner, reader = answering(make), make()
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    owner.side._reuse.clear()
    num_steps = owner.core._num_steps
    add(reader, "new", SO_FAR, owner)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.core.answer("new").tokens == whole_answer()
    assert (reader.loads, owner.core._num_steps) == ([], num_steps)


def test_an_engine_that_takes_no_step_is_waited_for_no_longer_than_may_be(make: MakeEngine) -> None:
    owner, reader = answering(make), make(reuse_lookup_timeout=0.1)
    add(reader, "new", SO_FAR, owner)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.core.answer("new").tokens == whole_answer()
    assert reader.loads == []
    (channel,) = reader.side._reuse._finder._channels.values()
    assert channel.num_failures == 0
    assert owner.side._reuse._offers._table.wanted == []


def test_a_new_prompt_is_not_looked_for_in_what_runs(make: MakeEngine) -> None:
    owner, reader = answering(make), make()
    num_steps = owner.core._num_steps
    reader.ask("new", [*PROMPT, *whole_answer()[:SO_FAR]], owner)
    assert (reader.loads, owner.core._num_steps) == ([], num_steps)


@IS_ASYNC
@pytest.mark.parametrize("case", ["being computed again", "older weights", "its prompt"])
def test_what_is_not_known_to_be_right_is_not_on_offer(
    make: MakeEngine, case: str, is_async: bool
) -> None:
    """Not the blocks of a request that was preempted, which a step may be computing again; nor
    those that were computed with other weights, now or when the request ends; nor those of a prompt
    before its first token."""
    owner = answering(make, is_async=is_async)
    scheduler = owner.core.scheduler
    request, manager = scheduler.requests["old"], scheduler.kv_cache_manager
    if case == "being computed again":
        request.num_preemptions += 1
    elif case == "older weights":
        owner.side._reuse.clear()
    else:
        request._output_token_ids.clear()
    reader = make()
    add(reader, "new", SO_FAR, owner)
    end = time.monotonic() + BOUND_SECONDS
    table = owner.side._reuse._offers._table
    while not table.wanted:
        assert time.monotonic() < end
        reader.core.turn()
    assert manager.get_block_ids("old")
    owner.side._reuse.note_step(lambda: True, RunningRequests(scheduler))
    assert (table.wanted, len(table)) == ([], 0)
    if case == "older weights":
        turn_until(owner.core, lambda: not scheduler.requests)
        assert len(table) == 0


def test_of_answers_that_begin_alike_the_longest_common_one_is_read(make: MakeEngine) -> None:
    owner, reader = make(), make()
    others = [[*PROMPT, 5, 6, 7], PROMPT, PROMPT[:9]]
    for number, prompt in enumerate(others):
        owner.core.add(request_of(f"old-{number}", prompt, max_tokens=MOST))
    turn_until(owner.core, lambda: len(owner.core.answer("old-1").tokens) >= SO_FAR)
    add(reader, "new", SO_FAR, owner)
    assert answered(owner, reader) == whole_answer()
    num_blocks = (len(PROMPT) + SO_FAR - 1) // BLOCK
    assert reader.core.worker.computed["new"][0] == num_blocks * BLOCK


@IS_ASYNC
def test_with_preemptions_every_block_on_offer_holds_what_its_name_says(
    make: MakeEngine, is_async: bool
) -> None:
    """Many answers at a time in a pool of few blocks, each looked for at random times, see
    ``Writes``; and no step under way writes to a block that is put on offer."""
    owner = make(is_async=is_async, num_blocks=28)
    scheduler, dice = owner.core.scheduler, random.Random(5)
    names, table = owner.side._reuse._names, owner.side._reuse._offers._table
    writes, num_told, num_preempted, offer = Writes(owner), 0, 0, table.offer

    def check_offer(hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        num_under_way = len(owner.core._under_way)
        under_way = set[int]().union(*writes.each[len(writes.each) - num_under_way :])
        assert not under_way & set(block_ids)
        offer(hashes, block_ids)

    table.offer = check_offer
    waiting = [
        request_of(
            f"r{number}",
            [dice.randrange(NUM_TOKENS) for _ in range(dice.randrange(4, 30))],
            max_tokens=dice.randrange(5, MOST),
        )
        for number in range(60)
    ]
    end = time.monotonic() + BOUND_SECONDS
    while waiting or scheduler.requests:
        assert time.monotonic() < end
        while waiting and len(scheduler.requests) < 6:
            owner.core.add(waiting.pop())
        for one in dice.sample(scheduler.running, min(2, len(scheduler.running))):
            hashes = b"".join(names.of(one, one.num_tokens))
            if hashes:
                table.want(hashes)
        owner.core.turn()
        num_preempted += sum(one.num_preemptions > 0 for one in scheduler.running)
        for one in scheduler.running:
            run = table.find(names.of(one, one.num_tokens))
            num_told += len(run.block_ids)
            writes.tell(run)
    assert table.wanted == []
    assert min(num_told, writes.num_reused, num_preempted) > 100
