"""Reuse in vLLM's own scheduler: what an engine has on offer, and how another one takes it.

Blocks are told apart by what they hold: every step says which tokens it puts into which blocks.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from tests.contract.reuse_engines import (
    BOUND_SECONDS,
    HOST,
    Engine,
    Writes,
    changed,
    has_ended,
    start,
    turn_until,
)
from tests.contract.scheduled_core import (
    BLOCK,
    Core,
    free,
    next_token,
    request_of,
    written,
)
from vllm_commext.compat.first_token import defer_frees
from vllm_commext.nixl.config import parse_config
from vllm_commext.nixl.engine_facts import reusing_of
from vllm_commext.nixl.reasons import NoReuse

pytestmark = [
    pytest.mark.skipif(
        not hasattr(BlockPool, "unpin_blocks"), reason="vLLM before 0.32 tells of no block's reuse"
    ),
    pytest.mark.timeout(600),
]
PROMPT = list(range(21))
IS_ASYNC = pytest.mark.parametrize(
    "is_async", [False, True], ids=["one step at a time", "async scheduling"]
)


def answer_to(tokens: Sequence[int], count: int) -> list[int]:
    """What the model says after these tokens."""
    said = list(tokens)
    for _ in range(count):
        said.append(next_token(said))
    return said[len(tokens) :]


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(folder: Path, restored_step: None) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def engine(role: str, **settings: Any) -> Engine:
        made.append(start(folder, role, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.core.close()
        one.table.close()


@IS_ASYNC
def test_the_second_turn_computes_what_is_new_and_at_most_a_block(
    make: MakeEngine, is_async: bool
) -> None:
    owner = make("kv_consumer", is_async=is_async)
    reader = make("kv_producer", is_async=is_async)
    before = free(owner.core)
    said = owner.ask("turn-1", PROMPT, max_tokens=11)
    assert free(owner.core) == before
    history = PROMPT + said
    prompt = [*history, 7, 8, 9]
    assert reader.ask("turn-2", prompt, owner) == answer_to(prompt, 1)
    (load,) = reader.loads
    # The last token that was said is never computed.
    num_blocks = (len(history) - 1) // BLOCK
    assert load.recomputes
    assert load.num_tokens == num_blocks * BLOCK
    assert len(load.block_ids) == num_blocks == len(load.remote.block_ids[0])
    assert not load.remote.is_kept
    assert [int(owner.table.generations[one]) for one in load.remote.block_ids[0]] == list(
        load.remote.generations
    )
    assert reader.num_computed("turn-2") == len(prompt) - num_blocks * BLOCK <= 3 + BLOCK
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.counted == {"reuse_lookups": 1, "reuse_blocks": num_blocks}


@IS_ASYNC
def test_a_block_that_a_step_begun_ahead_may_be_writing_is_not_on_offer(
    make: MakeEngine, is_async: bool
) -> None:
    """A stop token ends the answer, when vLLM has scheduled a step for that token already: the last
    of a block."""
    owner = make("kv_consumer", is_async=is_async)
    said = answer_to(PROMPT, 11)
    assert said[-1] not in said[:-1]
    computed: list[int] = []
    offer = owner.side._reuse.offer

    def note(request: Request, block_ids: Sequence[int]) -> None:
        computed.append(request.num_computed_tokens)
        offer(request, block_ids)

    owner.side._reuse.offer = note
    assert owner.ask("turn-1", PROMPT, max_tokens=50, stop=[said[-1]]) == said
    history = PROMPT + said
    assert len(history) % BLOCK == 0
    assert computed == [len(history) - (not is_async)]
    names = owner.side._reuse._names.of(request_of("look", history), len(history))
    run = owner.side._reuse._offers._table.find(names)
    assert len(run.block_ids) == len(names) - 1 == len(history) // BLOCK - 1


@IS_ASYNC
def test_what_is_here_already_is_not_read(make: MakeEngine, is_async: bool) -> None:
    owner = make("kv_consumer", is_async=is_async)
    reader = make("kv_producer", is_async=is_async)
    reader.ask("first", PROMPT)
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    reader.ask("turn-2", [*history, 7, 8, 9], owner)
    (load,) = reader.loads
    assert load.blocks[0].first == len(PROMPT) // BLOCK
    assert len(load.remote.block_ids[0]) == len(load.block_ids) == 30 // BLOCK - 5
    reader.ask("turn-2 again", [*history, 7, 8, 9], owner)
    assert len(reader.loads) == 1


@pytest.mark.parametrize(("least", "is_awaited"), [(13, True), (14, False)])
def test_an_answer_is_awaited_only_where_it_can_bring_enough(
    make: MakeEngine, least: int, is_awaited: bool
) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer", reuse_min_tokens=least)
    reader.ask("first", PROMPT)
    reader.side._reuse._finder.is_done = lambda request_id: False
    prompt = [*PROMPT, *range(60, 73)]
    reader.add("turn-2", prompt, owner)
    request = reader.core.scheduler.requests["turn-2"]
    num_here = len(PROMPT) // BLOCK * BLOCK
    assert len(prompt) - 1 - num_here == 13
    assert reader.side.prompts.num_tokens(request, num_here) == (None if is_awaited else 0)
    del reader.side._reuse._finder.is_done
    turn_until(reader.core, lambda: has_ended(reader.core, "turn-2"))
    assert reader.core.answer("turn-2").tokens == answer_to(prompt, 1)


@pytest.mark.parametrize(("least", "num_loads"), [(8, 1), (9, 0)])
def test_what_others_have_is_read_only_where_it_is_enough(
    make: MakeEngine, least: int, num_loads: int
) -> None:
    """Of the prompt's 13 tokens that are not here the other engine has 8."""
    owner, reader = make("kv_consumer"), make("kv_producer", reuse_min_tokens=least)
    reader.ask("first", PROMPT)
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    prompt = [*history, 7, 8, 9]
    assert reader.ask("turn-2", prompt, owner) == answer_to(prompt, 1)
    assert len(reader.loads) == num_loads
    assert reader.num_computed("turn-2") == len(prompt) - (28 if num_loads else 20)


@IS_ASYNC
def test_a_load_that_fails_is_computed_here_whatever_the_policy(
    make: MakeEngine, is_async: bool
) -> None:
    owner = make("kv_consumer", is_async=is_async)
    reader = make("kv_producer", is_async=is_async, policy="fail")
    reader.core.worker.fails = lambda request_id: True
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    prompt = [*history, 7, 8, 9]
    assert reader.ask("turn-2", prompt, owner) == answer_to(prompt, 1)
    assert len(reader.loads) == 1
    assert reader.num_computed("turn-2") == len(prompt)
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    assert reader.counted == {"reuse_lookups": 1, "reuse_recomputed_blocks": 30 // BLOCK}


@IS_ASYNC
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_nothing_is_read_into_a_block_that_a_step_under_way_writes_to(
    make: MakeEngine, role: str, is_async: bool
) -> None:
    """vLLM frees the blocks of an aborted request while a step writes to them, save on consumers:
    reads are not ordered behind that step."""
    owner = make("kv_consumer")
    reader = make(role, is_async=is_async)
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
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
    prompt = [*history, 7, 8, 9]
    reader.add("turn-2", prompt, owner)
    end = time.monotonic() + BOUND_SECONDS
    while not reader.side._reuse._finder.is_done("turn-2"):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert len(reader.core._under_way) == is_async
    reader.core.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    turn_until(reader.core, lambda: has_ended(reader.core, "turn-2"))
    assert reader.core.answer("turn-2").tokens == answer_to(prompt, 1)
    assert len(reader.loads) == 1


def test_a_producer_that_reuses_nothing_frees_blocks_as_vllm_does(make: MakeEngine) -> None:
    engine = make("kv_producer", is_async=True, reuse_blocks=False)
    engine.ask("turn-1", PROMPT)
    assert engine.core.scheduler.defer_block_free is False


def test_an_engine_that_cannot_keep_such_blocks_reads_nothing(make: MakeEngine) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer", is_async=True)
    reader.core.scheduler.current_step = 1  # vLLM counts steps for that from the first one on
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    assert reader.ask("turn-2", history, owner) == answer_to(history, 1)
    assert reader.loads == []
    assert not reader.side._reuse.is_on
    assert defer_frees(SimpleNamespace()) is False  # a vLLM that knows nothing of it


def test_nothing_is_asked_where_no_engine_is_named(make: MakeEngine) -> None:
    """The negative control of the tests above: without reuse all is computed."""
    owner, reader = make("kv_consumer"), make("kv_producer")
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    reader.ask("turn-2", history)
    assert reader.loads == []
    assert reader.num_computed("turn-2") == len(history)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {}),
        ({}, {"salt": "b"}),
        ({"lora": "a"}, {}),
        ({"lora": "a"}, {"lora": "b"}),
        ({"lora": "a", "path": "/first"}, {"lora": "a", "path": "/second"}),
        ({"lora": "a"}, {"salt": "a"}),
    ],
)
def test_no_tenant_finds_anothers_blocks(
    make: MakeEngine, own: dict[str, str], other: dict[str, str]
) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer")
    request = changed(request_of("turn-1", PROMPT, max_tokens=10), own)
    names = reader.side._reuse._names
    request.num_computed_tokens = len(PROMPT)
    owner.side._reuse.offer(request, [1, 2, 3, 4, 5])
    table = owner.side._reuse._offers._table
    assert len(table) == 5
    for params, num_found in ((own, 5), (other, 0)):
        asked = changed(request_of("turn-2", [*PROMPT, 7, 8, 9]), params)
        assert len(table.find(names.of(asked, 23)).block_ids) == num_found


def test_a_salt_is_asked_for_end_to_end(make: MakeEngine) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer")
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10, salt="a")
    reader.ask("other", [*history, 7], owner, salt="b")
    assert reader.loads == []
    same = make("kv_producer")
    same.ask("own", [*history, 7], owner, salt="a")
    assert len(same.loads) == 1


def test_the_longest_answer_counts_and_who_is_gone_does_not(make: MakeEngine) -> None:
    short, long = make("kv_consumer"), make("kv_both")
    gone = make("kv_consumer")
    gone.core.close()
    reader = make("kv_producer")
    short.ask("turn-1", PROMPT)
    history = PROMPT + long.ask("turn-1", PROMPT, max_tokens=10)
    prompt = [*history, 7, 8, 9]
    assert reader.ask("turn-2", prompt, short, gone, long) == answer_to(prompt, 1)
    (load,) = reader.loads
    assert load.remote.port == long.port


def test_an_idle_engine_answers_without_stepping(make: MakeEngine) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer")
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    num_steps = owner.core._num_steps
    reader.ask("turn-2", [*history, 7, 8, 9], owner)
    assert len(reader.loads) == 1
    assert owner.core._num_steps == num_steps


def test_an_engine_does_not_sleep_over_a_request_that_waits_for_its_grammar(
    make: MakeEngine,
) -> None:
    """Nobody notifies when a grammar is there: only until the answer does the engine sleep."""
    owner, reader = make("kv_consumer"), make("kv_producer")
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    params = {"do_remote_decode": True, "reuse_from": [owner.place]}
    choice = StructuredOutputsParams(choice=["a"])
    request = request_of("turn-2", history, params, max_tokens=1, structured_outputs=choice)
    request.structured_output_request._grammar = Future()
    reader.core.add(request)
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    turn_until(reader.core, lambda: reader.side._reuse._finder.is_done("turn-2"))
    reader.side.engine.wakeup.wait = lambda arrivals: pytest.fail("it sleeps")
    for _ in range(10):
        reader.core.turn()
    reader.core.scheduler.finish_requests("turn-2", RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("what", ["speculative_config", "diffusion_config"])
def test_tokens_that_were_guessed_are_not_on_offer(folder: Path, what: str) -> None:
    """Drafts, and canvases that a request is answered from without a pass that computes them."""
    config: Any = Core._config(folder, "kv_both", "fail", False, {})
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    settings = parse_config({"reuse_blocks": True}, default_host=HOST, default_port=1)
    assert reusing_of(config, cache, settings).refusal is None
    setattr(config, what, SimpleNamespace())
    assert reusing_of(config, cache, settings).refusal in (NoReuse.SPECULATION, NoReuse.DIFFUSION)


def test_a_reset_takes_everything_off_the_offer(make: MakeEngine) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer")
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    before = owner.table.generations.copy()
    turn_until(owner.core, lambda: not owner.core.scheduler.requests)
    assert owner.core.scheduler.reset_prefix_cache()
    assert (owner.table.generations != before).sum() >= 30 // BLOCK
    assert len(owner.side._reuse._offers._table) == 0
    reader.ask("turn-2", history, owner)
    assert reader.loads == []


@pytest.mark.parametrize("is_taken", [False, True], ids=["answered", "taken"])
def test_what_was_found_before_a_reset_is_not_read_after_it(
    make: MakeEngine, is_taken: bool
) -> None:
    """The other engine may still have the weights that this one had before."""
    owner, reader = make("kv_consumer"), make("kv_producer")
    history = PROMPT + owner.ask("turn-1", PROMPT, max_tokens=10)
    reader.ask("first", PROMPT[:4])
    turn_until(reader.core, lambda: not reader.core.scheduler.requests)
    reader.add("turn-2", history, owner)
    end = time.monotonic() + BOUND_SECONDS
    while not reader.side._reuse._finder.is_done("turn-2"):
        assert time.monotonic() < end
        time.sleep(0.001)
    if is_taken:
        assert reader.side.prompts.num_tokens(reader.core.scheduler.requests["turn-2"], 0)
    assert reader.core.scheduler.reset_prefix_cache(reset_connector=True)
    turn_until(reader.core, lambda: has_ended(reader.core, "turn-2"))
    assert reader.core.answer("turn-2").tokens == answer_to(history, 1)
    assert reader.loads == []


def test_an_aborted_request_offers_nothing_and_is_forgotten(make: MakeEngine) -> None:
    owner, reader = make("kv_consumer"), make("kv_producer")
    owner.add("turn-1", PROMPT, max_tokens=50)
    for _ in range(4):
        owner.core.turn()
    owner.core.scheduler.finish_requests("turn-1", RequestStatus.FINISHED_ABORTED)
    assert len(owner.side._reuse._offers._table) == 0
    reader.add("turn-2", PROMPT, owner)
    reader.core.scheduler.finish_requests("turn-2", RequestStatus.FINISHED_ABORTED)
    assert not reader.side.is_loading("turn-2")
    assert reader.side._reuse._finder.take("turn-2") is None


@IS_ASYNC
def test_under_eviction_every_block_on_offer_holds_what_its_name_says(
    make: MakeEngine, is_async: bool
) -> None:
    """Many conversations in a pool of few blocks, see ``Writes``."""
    owner = make("kv_consumer", is_async=is_async, num_blocks=24)
    table, dice = owner.side._reuse._offers._table, random.Random(3)
    writes, num_seen, names = Writes(owner), 0, owner.side._reuse._names
    for number in range(60):
        prompt = [dice.randrange(3) for _ in range(dice.randrange(4, 40))]
        owner.ask(f"r{number}", prompt, max_tokens=dice.randrange(1, 8))
        run = table.find(names.of(request_of("look", prompt), len(prompt)))
        num_seen += len(run.block_ids)
        writes.tell(run)
        assert [int(owner.table.generations[one]) for one in run.block_ids] == run.generations
        turn_until(owner.core, lambda: not owner.core.scheduler.requests)
        assert free(owner.core) == 23
    assert min(num_seen, writes.num_reused) > 100


@pytest.mark.parametrize(
    "place",
    [
        "here",
        {"host": HOST},
        [{"host": HOST, "port": 0}],
        [{"host": HOST, "port": 1, "more": 1}],
        [{"host": HOST, "port": "1"}],
        [{"host": HOST, "port": 1}] * 17,
    ],
)
def test_what_names_no_engine_is_computed_here(make: MakeEngine, place: Any) -> None:
    reader = make("kv_producer")
    params = {"do_remote_decode": True, "do_remote_prefill": False, "reuse_from": place}
    reader.core.add(request_of("r", PROMPT, params, max_tokens=1))
    turn_until(reader.core, lambda: has_ended(reader.core, "r"))
    assert reader.core.answer("r").tokens == answer_to(PROMPT, 1)
    assert reader.side.engine.client._thread is None
