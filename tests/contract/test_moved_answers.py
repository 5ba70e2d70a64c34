"""An answer under way at one engine goes on at another one, which reads what the first one has of
it, in vLLM's own scheduler."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.interface import PauseState

from tests.contract.reuse_engines import Engine, start, turn_until
from tests.contract.scheduled_core import BLOCK, next_token, request_of

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


def add(
    engine: Engine, name: str, count: int, most: int, *others: Engine, is_known: bool = False
) -> None:
    """A request that goes on with so many tokens of the answer."""
    params = {
        "answer_token_ids": whole_answer()[:count],
        "answer_is_known": is_known,
        "reuse_from": [one.place for one in others],
    }
    engine.core.add(request_of(name, PROMPT, params, max_tokens=most))


def offered(make: MakeEngine, *, is_async: bool) -> Engine:
    """An engine in the midst of the answer, which has put it on offer."""
    owner = make(is_async=is_async)
    owner.core.add(request_of("old", PROMPT, max_tokens=MOST))
    turn_until(owner.core, lambda: len(owner.core.answer("old").tokens) >= SO_FAR)
    add(owner, "again", SO_FAR, SO_FAR + 1, is_known=True)
    turn_until(owner.core, lambda: "again" not in owner.core.scheduler.requests)
    assert owner.core.answer("again").tokens == whole_answer()[SO_FAR : SO_FAR + 1]
    # All but the last block was there.
    assert len(owner.core.worker.computed["again"]) <= BLOCK + 1
    assert "old" in owner.core.scheduler.requests
    return owner


IS_ASYNC = pytest.mark.parametrize(
    "is_async", [False, True], ids=["one step at a time", "async scheduling"]
)


@IS_ASYNC
def test_the_answer_so_far_is_read_and_not_computed(make: MakeEngine, is_async: bool) -> None:
    owner, reader = offered(make, is_async=is_async), make(is_async=is_async)
    add(reader, "new", SO_FAR, MOST, owner)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.core.answer("new").tokens == whole_answer()
    num_blocks = (len(PROMPT) + SO_FAR - 1) // BLOCK
    assert reader.core.worker.computed["new"][0] == num_blocks * BLOCK
    assert reader.counted == {"reuse_lookups": 1, "reuse_blocks": num_blocks}
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    assert owner.core.answer("old").tokens == whole_answer()


@IS_ASYNC
def test_a_read_that_fails_is_computed(make: MakeEngine, is_async: bool) -> None:
    owner, reader = offered(make, is_async=is_async), make(is_async=is_async)
    reader.core.worker.fails = lambda request_id: True
    add(reader, "new", SO_FAR, MOST, owner)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.core.answer("new").tokens == whole_answer()
    assert reader.core.worker.computed["new"][0] == 0


def test_an_answer_that_is_begun_anew_reads_the_prompt_alone(make: MakeEngine) -> None:
    """It was looked for with the answer, which a pause has had left aside."""
    owner, reader = offered(make, is_async=False), make()
    reader.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    add(reader, "new", SO_FAR, MOST, owner)
    reader.core.turn()
    reader.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.core.answer("new").tokens == whole_answer()
    computed = reader.core.worker.computed["new"]
    assert computed[0] == (len(PROMPT) - 1) // BLOCK * BLOCK
