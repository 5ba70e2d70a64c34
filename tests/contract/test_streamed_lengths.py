"""Prompts that are read while they are computed, on vLLM's own block manager: every kind of group,
many lengths and sizes of chunks, preempted or not.  What the decode engine computes from afterwards
is what a single engine computes from.

Rows, cursor and plan are the product's; in NIXL's place a copy between the two engines' memories is
made whenever the row tells of something new, or some steps later.
"""

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
    "window of 5": Model([FULL_SPEC, sliding(5)]),
    "window of 9": Model([sliding(9), FULL_SPEC]),
    "two windows": Model([FULL_SPEC, sliding(6), sliding(11)]),
    "chunks of 8": Model([FULL_SPEC, chunked(8)]),
    "state": Model([FULL_SPEC, STATE_SPEC]),
    "state in every block": Model([FULL_SPEC, ALIGNED_STATE_SPEC]),
    "state and window": Model([FULL_SPEC, sliding(8), STATE_SPEC]),
}
LENGTHS = (2, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 3, 6 * BLOCK, 6 * BLOCK + 1)
MORE_TOKENS = 3 * BLOCK


class Source:
    """A prefill engine whose prompts can be read while they are computed."""

    def __init__(self, model: Model) -> None:
        self.engine = Engine(model, "kv_producer")
        self.groups = tuple(groups_of(model.cache()))
        streaming = Streaming(None, self.groups, MAX_TOKENS, BLOCK)
        self.prefills = Prefills(
            EngineContext(
                "e",
                ConnectorConfig("h", 7000),
                self.groups,
                tp_size=1,
                port=7000,
                streaming=streaming,
                fence_key=FENCE_KEY,
            )
        )
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
        engine, name = self.engine, request.request_id
        hit, num_hit = engine.manager.get_computed_blocks(request)[:2]
        request.num_computed_tokens, begin, known = 0, num_hit, [0] * len(self.groups)
        while begin < min(request.num_prompt_tokens, until):
            count = min(tokens_a_step, request.num_prompt_tokens - begin)
            begins = begin == num_hit
            engine._allocate(request, count, *((num_hit, hit) if begins else ()))
            if begins:
                request.num_computed_tokens = num_hit
            tables = engine.manager.get_block_ids(name)
            new = [list(table[n:]) for table, n in zip(tables, known, strict=True)]
            known = [len(table) for table in tables]
            ran = {name: (request.num_computed_tokens, new, count)}
            if begins and not resumed:
                told = self.tell(step(new=ran))
            else:
                told = self.tell(step(cached=ran, resumed=[name] if begins else []))
            engine._step(request, count)
            self.publisher.launched(told.chunks)
            begin += count
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
        decode.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=hit,
            num_external_computed_tokens=found.num_tokens - num_hit,
            delay_cache_blocks=True,
        )
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


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(name="source")
def _source(model: Model) -> Iterator[Source]:
    made = Source(model)
    yield made
    made.engine.connector.shutdown()


@pytest.fixture(name="decode")
def _decode(model: Model) -> Iterator[Engine]:
    made = Engine(model, "kv_consumer")
    yield made
    made.connector.shutdown()


@pytest.mark.parametrize(
    ("tokens_a_step", "preempted"), crossed([BLOCK, 3, 2 * BLOCK], [False, True])
)
def test_what_is_computed_after_a_streamed_load_starts_from_what_a_single_engine_has(
    source: Source, decode: Engine, tokens_a_step: int, preempted: bool
) -> None:
    if ALIGNED_STATE_SPEC in decode.model.specs and tokens_a_step % BLOCK:
        pytest.skip("vLLM ends steps with blocks to keep these states")
    dice = random.Random(tokens_a_step)
    for length in LENGTHS:
        check_length(source, decode, length, tokens_a_step, preempted, dice)


def check_length(
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
    decode.manager.cache_blocks(request, request.num_computed_tokens)
    if request.num_computed_tokens == request.num_tokens:
        request.num_computed_tokens -= 1
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


@pytest.mark.parametrize("name", ["state", "window of 5"])
def test_a_prompt_whose_last_token_cannot_be_left_out_is_not_streamed(name: str) -> None:
    source = Source(MODELS[name])
    one = request_of("one", 1, TO_STREAM)
    assert source.prefills.add(one) == Handover.PROMPT
    wants_all = request_of("all", 9, TO_STREAM)
    wants_all.sampling_params.prompt_logprobs = 1
    wants_all.kv_transfer_params["stream_key"] = KEY[::-1]
    assert source.prefills.add(wants_all) == Handover.PROMPT
    source.engine.connector.shutdown()
