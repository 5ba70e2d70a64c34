"""Every kind of group, every length of prompt from one block to four and around the window: what
the decode engine computes from after a load is what a single engine computes from.

Of prompts that are read while they are computed, rows, cursor and plan are the product's; in NIXL's
place a copy between the two engines' memories is made whenever the row tells of something new, or
some steps later."""

import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.request import Request, RequestStatus

from tests.contract.engine_in_memory import (
    ALIGNED_STATE_SPEC,
    LATENT_SPEC,
    NUM_GUESSES,
    Engine,
    Model,
    chunked,
    request_of,
    sliding,
)
from tests.contract.scheduler_engine import BLOCK, FULL_SPEC, MAX_TOKENS, STATE_SPEC, TO_PREFILL
from tests.kit.crossed import crossed
from tests.kit.stream_requests import step
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.engine_context import EngineContext, Streaming
from vllm_commext.nixl.geometry.plan import blocks_to_fill, plan_read
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.prefill.prefills import Prefills
from vllm_commext.nixl.requests import Load, RemoteRequest
from vllm_commext.nixl.stream.cursor import Cursor, cursor_of
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.stream.progress import PIECE_IDS, ProgressTable, Publisher, header_of
from vllm_commext.nixl.vllm_cache import groups_of
from vllm_commext.nixl.wire.description import FENCES, STREAM_HEADERS, STREAM_PIECES

FENCE_KEY = bytes(range(32))
KEY = "0123456789abcdef" * 2
TO_STREAM = {**TO_PREFILL, "stream_key": KEY}
MODELS = {
    "full": Model([FULL_SPEC]),
    "latent": Model([LATENT_SPEC]),
    **{f"window of {size}": Model([FULL_SPEC, sliding(size)]) for size in (2, 5, 7, 8, 12)},
    "window of 9 first": Model([sliding(9), FULL_SPEC]),
    "window alone": Model([sliding(8)]),
    "two windows": Model([FULL_SPEC, sliding(6), sliding(11)]),
    "chunks of 8": Model([FULL_SPEC, chunked(8)]),
    "chunks of 12": Model([FULL_SPEC, chunked(12)]),
    "state": Model([FULL_SPEC, STATE_SPEC]),
    "state in every block": Model([FULL_SPEC, ALIGNED_STATE_SPEC]),
    "state and window": Model([FULL_SPEC, sliding(8), STATE_SPEC]),
    "full, with a draft": Model([FULL_SPEC], drafts=[0]),
    **{
        f"window of {size}, with a draft": Model([FULL_SPEC, sliding(size)], drafts=[0])
        for size in (5, 8)
    },
    "window alone, with a draft in it": Model([sliding(8)], drafts=[0]),
    "two windows, with drafts in all": Model(
        [FULL_SPEC, sliding(6), sliding(11)], drafts=[0, 1, 2]
    ),
}
STREAMED = (
    *("full", "latent", "window of 5", "window of 9 first", "two windows", "chunks of 8"),
    *("state", "state in every block", "state and window"),
)
LENGTHS = range(2, 6 * BLOCK + 2)
STREAMED_LENGTHS = (2, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 3, 6 * BLOCK, 6 * BLOCK + 1)
TOKENS_A_STEP = (1000, 3)
ALIGNED_TOKENS_A_STEP = (2 * BLOCK, BLOCK)  # vLLM ends steps with blocks to keep their states
MORE_TOKENS = 3 * BLOCK


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture
def engines(model: Model) -> Iterator[tuple[Engine, Engine]]:
    both = Engine(model, "kv_producer"), Engine(model, "kv_consumer")
    yield both
    for engine in both:
        engine.connector.shutdown()


@pytest.mark.parametrize(
    ("tokens_a_step", "num_cached"),
    [
        *crossed(TOKENS_A_STEP, (0, 3 * BLOCK)),
        *(pytest.param(tokens, BLOCK, marks=pytest.mark.long) for tokens in TOKENS_A_STEP),
    ],
)
def test_what_is_computed_after_a_load_starts_from_what_a_single_engine_has(
    engines: tuple[Engine, Engine], tokens_a_step: int, num_cached: int
) -> None:
    prefill, decode = engines
    if ALIGNED_STATE_SPEC in decode.model.specs:
        tokens_a_step = ALIGNED_TOKENS_A_STEP[TOKENS_A_STEP.index(tokens_a_step)]
    for length in LENGTHS:
        check_length(prefill, decode, length, tokens_a_step, min(num_cached, length))


def check_length(
    prefill: Engine, decode: Engine, length: int, tokens_a_step: int, num_cached: int
) -> None:
    """One prompt, of which the decode engine may have cached some, and some tokens after it."""
    warm_up(decode, num_cached)
    first = request_of(f"p{length}", length, TO_PREFILL)
    params = prefill.hand_over(first, tokens_a_step)
    assert params is not None, f"{length} tokens: nothing is offered"
    request = request_of(f"d{length}", length, params)
    num_hit, num_loaded = decode.load(request, prefill)
    most = length if decode.model.keeps_every_token else length - 1
    assert num_loaded == max(0, most - num_hit)
    for more in range(MORE_TOKENS):
        num_right = more % (NUM_GUESSES + 1) if decode.model.drafts else 0
        decode.compute(request, num_right)
        request.append_output_token_ids([more] * (num_right + 1))
    again = request_of(f"again{length}", length)
    decode.compute_prompt(again, tokens_a_step)
    assert prefill.faults == []
    assert decode.faults == [], f"{length} tokens"
    decode.manager.free(again)
    for engine, one in ((prefill, first), (decode, request)):
        engine.forget(one)


def test_a_preempted_request_computes_its_prompt_here(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    length = 4 * BLOCK - 1
    first = request_of("p", length, TO_PREFILL)
    request = request_of("d", length, prefill.hand_over(first, BLOCK))
    decode.load(request, prefill)
    decode.compute(request, num_right=0)
    request.append_output_token_ids(1)
    decode.preempt(request)
    decode.memory.fill(-1)
    decode.manager.reset_prefix_cache()
    assert decode.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    decode.compute_prompt(request, BLOCK)
    assert decode.faults == []


def warm_up(engine: Engine, num_tokens: int) -> None:
    """Leave the prompt's first tokens in the prefix cache, where there is one."""
    if num_tokens:
        request = request_of("warm", num_tokens)
        engine.compute_prompt(request, BLOCK)
        engine.manager.free(request)


class Source:
    """A prefill engine whose prompts can be read while they are computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.groups = tuple(groups_of(engine.model.cache()))
        streaming = Streaming(None, self.groups, MAX_TOKENS, BLOCK)
        more: dict[str, Any] = {"streaming": streaming, "fence_key": FENCE_KEY}
        config = ConnectorConfig("h", 7000)
        self.prefills = Prefills(EngineContext("e", config, self.groups, 1, 7000, **more))
        self.pieces_per_row = streaming.pieces_per_row
        self.table, self.fences = ProgressTable(streaming.pieces_per_row), FenceTable()
        self.fences.arm(FENCE_KEY)
        self.publisher = Publisher(self.table, self.fences, is_on_device=False)

    def tell(self, ran: Any) -> StepMetadata:
        """What a worker is told before a step."""
        engine = self.prefills._engine
        told, engine.step = engine.step, StepMetadata()
        self.prefills.fill_step(told, ran)
        self.publisher.prepare(told.chunks, told.restarts)
        self.publisher.ended(told.holds)
        return told

    def compute(
        self, request: Request, tokens_a_step: int, *, resumed: bool = False, until: int = 1 << 30
    ) -> Iterator[None]:
        """Steps of a prompt, up to one that ends at ``until`` tokens or later."""
        engine, known = self.engine, [0] * len(self.groups)
        name = request.request_id
        for is_first, count in engine.steps(request, tokens_a_step, until):
            tables = engine.manager.get_block_ids(name)
            new = [list(table[n:]) for table, n in zip(tables, known, strict=True)]
            known = [len(table) for table in tables]
            ran = {name: (request.num_computed_tokens, new, count)}
            if is_first and not resumed:
                told = self.tell(step(new=ran))
            else:
                told = self.tell(step(cached=ran, resumed=[name] if is_first else []))
            engine.run(request, count)
            self.publisher.launched(told.chunks)
            yield

    def preempt(self, request: Request) -> None:
        """Its blocks are another's, before the next step's kernels."""
        self.engine.preempt(request)
        self.engine.manager.reset_prefix_cache()
        self.engine.memory.fill(-1)
        self.tell(step(preempted=[request.request_id]))
        request.status = RequestStatus.RUNNING

    def finish(self, request: Request) -> Mapping[str, Any] | None:
        """The prompt has ended; the next step tells the workers."""
        request.append_output_token_ids(1)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        manager = self.engine.manager
        manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        blocks = manager.get_block_ids(request.request_id)
        _, params = self.prefills.finish(request, blocks)
        self.tell(step())
        return params


class Reader:
    """A decode engine that reads one prompt as its row tells."""

    def __init__(self, source: Source, decode: Engine, request: Request) -> None:
        self._source, self._decode = source, decode
        found = source.prefills.directory.find([KEY])[KEY]
        assert not found.refusal
        decode.manager.new_step_starts()
        hit, num_hit = decode.manager.get_computed_blocks(request)[:2]
        decode.allocate(request, hit, num_hit, found.num_tokens - num_hit)
        blocks = blocks_to_fill(
            source.groups,
            decode.manager.get_block_ids(request.request_id),
            num_local_tokens=num_hit,
            num_tokens=found.num_tokens,
        )
        remote = RemoteRequest(
            **{"engine_id": "e", "incarnation": "1", "host": "h", "port": 7000, "tp_size": 1},
            request_id=found.request_id,
            block_ids=(),
            num_tokens=found.num_tokens,
            fence_slot=found.fence_slot,
            fence_nonce=found.fence_nonce,
            stream_row=found.row,
            stream_tag=found.tag,
            stream_regions=tuple(found.regions),
        )
        layouts = decode.model.layout(), source.engine.model.layout()
        link = SimpleNamespace(
            plan=plan_read(*layouts, local_device=0, remote_device=0),
            tables=dict.fromkeys(
                (FENCES, STREAM_HEADERS, STREAM_PIECES), SimpleNamespace(num_records=256)
            ),
            pieces_per_row=source.pieces_per_row,
        )
        link.hold = lambda: link
        shard: Any = SimpleNamespace(
            remote=remote, load=Load(request.request_id, remote, blocks, found.num_tokens)
        )
        made: Any = link
        self.cursor: Cursor = cursor_of(shard, made)

    def look(self) -> None:
        table, cursor = self._source.table, self.cursor
        row = cursor.shard.remote.stream_row
        header = header_of(table.headers[row])
        assert header.tag == cursor.shard.remote.stream_tag
        if header.nonce != cursor.nonce:
            cursor.start_again(header.nonce)
        cursor.note_progress(header)
        while cursor.has_more and (wanted := cursor.wanted()):
            runs = []
            for group, first, count in wanted:
                place = (cursor.regions[group].first + first) * PIECE_IDS
                runs.append(table.entries[row, place : place + count * PIECE_IDS])
            cursor.take(wanted, np.concatenate(runs))
        if cursor.has_more:
            pairs = cursor.next_pairs()
            self._decode.copy(cursor.link.plan, pairs, self._source.engine)
            cursor.note_read()


@pytest.mark.parametrize("model", STREAMED, indirect=True)
@pytest.mark.parametrize(
    ("tokens_a_step", "preempted"), crossed([BLOCK, 3, 2 * BLOCK], [False, True])
)
def test_what_is_computed_after_a_streamed_load_starts_from_what_a_single_engine_has(
    engines: tuple[Engine, Engine], tokens_a_step: int, preempted: bool
) -> None:
    source, decode = Source(engines[0]), engines[1]
    if ALIGNED_STATE_SPEC in decode.model.specs and tokens_a_step % BLOCK:
        pytest.skip("vLLM ends steps with blocks to keep these states")
    dice = random.Random(tokens_a_step)
    for length in STREAMED_LENGTHS:
        check_streamed(source, decode, length, tokens_a_step, preempted, dice)


def check_streamed(
    source: Source,
    decode: Engine,
    length: int,
    tokens_a_step: int,
    preempted: bool,
    dice: random.Random,
) -> None:
    first = request_of(f"p{length}", length, TO_STREAM)
    assert source.prefills.add(first) == "streamed"
    request, reader = request_of(f"d{length}", length), None
    if preempted:
        for _ in source.compute(first, tokens_a_step, until=length // 2 + 1):
            reader = reader or Reader(source, decode, request)
            reader.look()
        source.preempt(first)
        decode.memory.fill(-1)  # what was read counts for nothing
    for _ in source.compute(first, tokens_a_step, resumed=preempted):
        reader = reader or Reader(source, decode, request)
        if dice.random() < 0.7:
            reader.look()
    reader.look()
    keeps = decode.model.keeps_every_token
    assert reader.cursor.is_over == keeps
    assert source.finish(first) is not None
    reader.look()
    assert reader.cursor.is_over
    request.num_computed_tokens = reader.cursor.num_tokens
    decode.note_loaded(request)
    for more in range(MORE_TOKENS):
        decode.compute(request)
        request.append_output_token_ids(more)
    assert source.engine.faults == []
    assert decode.faults == [], f"{length} tokens"
    source.prefills.note_outcomes({first.request_id}, set())
    assert source.prefills.num_held == 0
    source.prefills.directory._ended.clear()
    source.engine.forget(first)
    decode.forget(request)


@pytest.mark.parametrize("model", ["state", "window of 5"], indirect=True)
def test_a_prompt_whose_last_token_cannot_be_left_out_is_not_streamed(
    engines: tuple[Engine, Engine],
) -> None:
    source = Source(engines[0])
    one = request_of("one", 1, TO_STREAM)
    assert source.prefills.add(one) == Handover.PROMPT
    wants_all = request_of("all", 9, TO_STREAM)
    wants_all.sampling_params.prompt_logprobs = 1
    wants_all.kv_transfer_params["stream_key"] = KEY[::-1]
    assert source.prefills.add(wants_all) == Handover.PROMPT
