"""An answer under way at one engine goes on at another one, which reads what the first one has of
it, in vLLM's own scheduler.

Blocks are told apart by what they hold: every step says which tokens it puts into which blocks."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from tests.contract.reuse_engines import (
    BOUND_SECONDS,
    HOST,
    MOST,
    Engine,
    Writes,
    has_ended,
    start,
    turn_until,
)
from tests.contract.scheduled_core import BLOCK, NUM_TOKENS, Core, answer_to, request_of, written
from vllm_commext.nixl.config import parse_config
from vllm_commext.nixl.engine_facts import reusing_of

PROMPT = list(range(14))
SO_FAR = 19
MakeEngine = Callable[..., Engine]


WHOLE = answer_to(PROMPT, MOST)
BEGUN = [*PROMPT, *WHOLE[:SO_FAR]]
NUM_BLOCKS = (len(BEGUN) - 1) // BLOCK


@pytest.fixture
def make(folder: Path, restored_step: None) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def engine(role: str = "kv_consumer", **settings: Any) -> Engine:
        made.append(start(folder, role, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.core.close()
        one.table.close()


def answering(make: MakeEngine, *, is_async: bool = False, **settings: Any) -> Engine:
    """An engine in the midst of the answer."""
    owner = make(is_async=is_async, **settings)
    owner.core.add(request_of("old", PROMPT, max_tokens=MOST))
    turn_until(owner.core, lambda: len(owner.core.answer("old").tokens) > SO_FAR)
    return owner


def goes_on(reader: Engine, *owners: Engine, **params: Any) -> list[int]:
    """What the other engine answers."""
    return reader.ask("new", BEGUN, *owners, answered=SO_FAR, **params)


def offers_of(engine: Engine) -> Any:
    return engine.side._reuse._offers._table


def test_the_answer_so_far_is_read_and_not_computed(make: MakeEngine, is_async: bool) -> None:
    """Its engine answers at once, without a step."""
    owner, reader = answering(make, is_async=is_async), make(is_async=is_async)
    num_steps = owner.core._num_steps
    assert goes_on(reader, owner) == WHOLE
    assert owner.core._num_steps == num_steps
    (load,) = reader.loads
    assert load.recomputes
    assert load.num_tokens == NUM_BLOCKS * BLOCK
    assert len(load.block_ids) == NUM_BLOCKS == len(load.remote.block_ids[0])
    assert not load.remote.is_kept
    assert [int(owner.table.generations[one]) for one in load.remote.block_ids[0]] == list(
        load.remote.generations
    )
    assert reader.core.worker.computed["new"][0] == NUM_BLOCKS * BLOCK
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.counted == {"reuse_lookups": 1, "reuse_blocks": NUM_BLOCKS}
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    assert owner.core.answer("old").tokens == WHOLE


def test_a_read_that_fails_is_computed_whatever_the_policy(
    make: MakeEngine, is_async: bool
) -> None:
    owner = answering(make, is_async=is_async)
    reader = make(is_async=is_async, policy="fail")
    reader.core.worker.fails = lambda request_id: True
    assert goes_on(reader, owner) == WHOLE
    assert reader.core.worker.computed["new"][0] == 0
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.counted == {"reuse_lookups": 1, "reuse_recomputed_blocks": NUM_BLOCKS}


@pytest.mark.parametrize("has_owner", [False, True], ids=["nobody named", "a new prompt"])
def test_only_answers_that_go_on_are_looked_for(make: MakeEngine, has_owner: bool) -> None:
    """The negative control of the tests above: without reuse all is computed."""
    owner, reader = answering(make), make()
    if has_owner:
        reader.ask("new", BEGUN, owner)
        assert reader.core.worker.computed["new"][: len(BEGUN)] == [*range(len(BEGUN))]
    else:
        assert goes_on(reader) == WHOLE
    assert (reader.loads, reader.counted) == ([], {})


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_nothing_is_read_into_a_block_that_a_step_under_way_writes_to(
    make: MakeEngine, role: str, is_async: bool
) -> None:
    """Where a request is aborted, vLLM keeps its blocks as long as a step writes to them: reads are
    not ordered behind that step."""
    owner, reader = answering(make), make(role, is_async=is_async)
    writes: list[set[int]] = []
    execute = reader.core.worker.execute

    def check(step: Any) -> Any:
        """Of a step with loads, what the steps before write to that have not ended."""
        num_under_way = len(reader.core._under_way)
        for load in step.kv_connector_metadata.loads:
            under_way = set[int]().union(*writes[len(writes) - num_under_way :])
            assert not under_way & set(load.block_ids)
        writes.append(written(reader.core, step))
        return execute(step)

    reader.core.worker.execute = check
    reader.add("aborted", list(range(50, 70)), max_tokens=50)
    turn_until(reader.core, lambda: len(reader.core.answer("aborted").tokens) > 2)
    reader.add("new", BEGUN, owner, answered=SO_FAR)
    wait_for_answer(reader)
    assert len(reader.core._under_way) == is_async
    reader.core.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    turn_until(reader.core, lambda: has_ended(reader.core, "new"))
    assert reader.core.answer("new").tokens == WHOLE
    assert len(reader.loads) == 1


def wait_for_answer(reader: Engine) -> None:
    """Until it is known what another engine has of the request."""
    end = time.monotonic() + BOUND_SECONDS
    while not reader.side._reuse._finder.is_done("new"):
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("tenant", ["salt", "lora"])
def test_no_tenant_finds_anothers_blocks(make: MakeEngine, tenant: str) -> None:
    owner = make()
    owner.ask("old", PROMPT, **{tenant: "a"})
    others = [({}, 0), ({tenant: "b"}, 0), ({tenant: "a"}, 1)]
    others += [({"lora": "a", "content": "other"}, 0)] if tenant == "lora" else []
    for other, num_loads in others:
        reader = make()
        goes_on(reader, owner, **other)
        assert len(reader.loads) == num_loads


@pytest.mark.parametrize(
    ("what", "why"), [("speculative_config", "drafts'"), ("diffusion_config", "a denoising step")]
)
def test_tokens_that_were_guessed_are_not_on_offer(folder: Path, what: str, why: str) -> None:
    """Drafts, and canvases that a request is answered from without a pass that computes them."""
    config: Any = Core._config(folder, "kv_both", "fail", False, {})
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    settings = parse_config({"reuse_blocks": True}, default_host=HOST, default_port=1)
    assert reusing_of(config, cache, settings).refusal is None
    setattr(config, what, SimpleNamespace())
    assert why in str(reusing_of(config, cache, settings).refusal)


@pytest.mark.parametrize("case", ["being computed again", "older weights"])
def test_what_is_not_known_to_be_right_is_not_on_offer(make: MakeEngine, case: str) -> None:
    """Neither blocks of a request that was preempted, which a step may be computing again, nor
    those that were computed with other weights."""
    owner = make()
    owner.core.add(request_of("old", PROMPT, max_tokens=MOST))
    if case == "older weights":
        turn_until(owner.core, lambda: len(owner.core.answer("old").tokens) > SO_FAR)
        assert len(offers_of(owner)) >= NUM_BLOCKS
        owner.side._reuse.clear()
    else:
        owner.core.scheduler.requests["old"].num_preemptions += 1
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    assert len(offers_of(owner)) == 0


def test_a_reset_takes_everything_off_the_offer(make: MakeEngine) -> None:
    owner, reader = make(), make()
    owner.ask("old", PROMPT)
    before = owner.table.generations.copy()
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    assert owner.side._reuse._offers._named == {}
    assert owner.core.scheduler.reset_prefix_cache()
    assert (owner.table.generations != before).sum() >= NUM_BLOCKS
    assert len(offers_of(owner)) == 0
    assert goes_on(reader, owner) == WHOLE
    assert reader.loads == []


@pytest.mark.parametrize("is_taken", [False, True], ids=["answered", "taken"])
def test_what_was_found_before_a_reset_is_not_read_after_it(
    make: MakeEngine, is_taken: bool
) -> None:
    """The other engine may still have the weights that this one had before."""
    owner, reader = answering(make), make()
    reader.ask("first", PROMPT[:4], max_tokens=1)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    reader.add("new", BEGUN, owner, answered=SO_FAR)
    wait_for_answer(reader)
    if is_taken:
        assert reader.side.prompts.num_tokens(reader.core.scheduler.requests["new"], 0)
    assert reader.core.scheduler.reset_prefix_cache(reset_connector=True)
    turn_until(reader.core, lambda: has_ended(reader.core, "new"))
    assert reader.core.answer("new").tokens == WHOLE
    assert reader.loads == []


def check_offers(owner: Engine, writes: Writes) -> None:
    """No step under way writes to a block that is put on offer."""
    table = offers_of(owner)
    offer = table.offer

    def checked(hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        num_under_way = len(owner.core._under_way)
        under_way = set[int]().union(*writes.each[len(writes.each) - num_under_way :])
        assert not under_way & set(block_ids)
        offer(hashes, block_ids)

    table.offer = checked


def test_with_preemptions_every_block_on_offer_holds_what_its_name_says(
    make: MakeEngine, is_async: bool
) -> None:
    """Many answers at a time in a pool of few blocks, see ``Writes``."""
    owner = make(is_async=is_async, num_blocks=28)
    scheduler, dice = owner.core.scheduler, random.Random(5)
    names, table = owner.side._reuse._names, offers_of(owner)
    writes, num_told, num_preempted = Writes(owner), 0, 0
    check_offers(owner, writes)
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
        owner.core.turn()
        num_preempted += sum(one.num_preemptions > 0 for one in scheduler.running)
        for one in scheduler.running:
            run = table.find(names.of(one, one.num_tokens))
            num_told += len(run.block_ids)
            writes.tell(run)
    assert min(num_told, writes.num_reused, num_preempted) > 100
