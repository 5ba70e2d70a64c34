"""Engines without a model: those of ``scheduler_engine.py`` with our planner, and with a memory in
which every token's place holds a tag.

The oracle: whatever a layer of an engine would read to compute a token must hold the tags that a
single engine would have written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from tests.contract import scheduler_engine
from tests.contract.scheduler_engine import BLOCK, NUM_BLOCKS, cache_of
from tests.kit.descriptors import expand_rows, one_plane
from vllm_commext.nixl.geometry.layout import (
    STATE,
    CacheLayout,
    Family,
    Geometry,
    Group,
    StateGeometry,
    StatePart,
    UInt64Array,
)
from vllm_commext.nixl.geometry.plan import Pairs, ReadPlan, plan_read
from vllm_commext.nixl.requests import Load
from vllm_commext.nixl.vllm_cache import groups_of

NUM_GUESSES = 3
TAG_BYTES = 8
BASE = 1 << 20
_ATTENTION: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.float32}
LATENT_SPEC = MLAAttentionSpec(**_ATTENTION, head_size=8)
# A state at the end of every block, as vLLM keeps them with prefix caching.
ALIGNED_STATE_SPEC = MambaSpec(
    block_size=BLOCK,
    shapes=((8, 3), (2, 4, 8)),
    dtypes=(torch.float32,) * 2,
    mamba_cache_mode="align",
)


def sliding(window: int) -> SlidingWindowSpec:
    """Attention to the last ``window`` tokens."""
    return SlidingWindowSpec(**_ATTENTION, head_size=8, sliding_window=window)


def chunked(chunk: int) -> ChunkedLocalAttentionSpec:
    """Attention to the tokens of the same ``chunk`` tokens."""
    return ChunkedLocalAttentionSpec(**_ATTENTION, head_size=8, attention_chunk_size=chunk)


def first_attended(spec: KVCacheSpec, token: int) -> int:
    """The first token that attention reads to compute ``token``."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, token - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return token - token % spec.attention_chunk_size
    return 0


@dataclass(frozen=True)
class Model:
    """The specifications of a model's groups; of ``drafts``, groups with layers of an EAGLE draft,
    vLLM drops the last block of prefix-cache hits."""

    specs: Sequence[KVCacheSpec]
    drafts: Sequence[int] = ()

    @property
    def keeps_every_token(self) -> bool:
        """Whether no group drops or overwrites what it has."""
        return all(type(spec) in (FullAttentionSpec, MLAAttentionSpec) for spec in self.specs)

    def layout(self) -> CacheLayout:
        """Every group has one layer; all lie over one another, as vLLM lays a hybrid model's."""
        cache = self.cache()
        groups = groups_of(cache)
        families = [
            Family(number, [f"layer{number}"], [BASE], _geometry(group))
            for number, group in enumerate(groups)
        ]
        return CacheLayout(1, 0, NUM_BLOCKS, groups, families)

    def cache(self) -> KVCacheConfig:
        """vLLM's description of the same."""
        return cache_of(self.specs, self.drafts)


def _geometry(group: Group) -> Geometry:
    stride = BLOCK * TAG_BYTES
    if group.kind == STATE:
        part = StatePart("ssm", "int64", 0, 1, False, TAG_BYTES)
        return StateGeometry(NUM_BLOCKS, stride, (part,))
    return one_plane(NUM_BLOCKS, stride, BLOCK, 1, stride, TAG_BYTES, dtype="int64")


class Engine(scheduler_engine.Engine):
    """One engine with a memory.

    Attributes:
        memory: ``[blocks, tokens]`` tags, of all groups: a block belongs to one of them.
        faults: what was computed from other tags than a single engine's.
    """

    def __init__(self, model: Model, role: str) -> None:
        super().__init__(role, model.specs, model.drafts)
        self.model = model
        self.memory = np.full((NUM_BLOCKS, BLOCK), -1, dtype=np.int64)
        self.faults: list[str] = []

    def hand_over(self, request: Request, tokens_a_step: int) -> Mapping[str, Any] | None:
        """Compute a prompt for another engine, finish, and say what the router is told."""
        self.connector.on_new_request(request)
        self.compute_prompt(request, tokens_a_step)
        request.append_output_token_ids(1)
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        return self.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)[1]

    def load(self, request: Request, prefill: Engine) -> tuple[int, int]:
        """Read what the request's parameters offer; tokens had here, tokens loaded."""
        self.manager.new_step_starts()  # no state that this step leaves in a block serves it
        num_hit, num_external = self.schedule(request)
        loads = self.step().loads
        request.num_computed_tokens = num_hit + num_external
        if num_external:
            self._read(loads[0], prefill)
            self.note_loaded(request)
        return num_hit, num_external

    def note_loaded(self, request: Request) -> None:
        """What was loaded counts as computed; of a whole prompt the last token is computed."""
        self.manager.cache_blocks(request, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _read(self, load: Load, prefill: Engine) -> None:
        assert load.remote is not None, load.refusal
        plan = plan_read(
            self.model.layout(), prefill.model.layout(), local_device=0, remote_device=0
        )
        pairs = plan.pairs(
            load.blocks,
            load.remote.block_ids,
            num_tokens=load.num_tokens,
            num_remote_tokens=load.remote.num_tokens,
        )
        self.copy(plan, pairs, prefill)

    def copy(self, plan: ReadPlan, pairs: Pairs, prefill: Engine) -> None:
        own = list(_places(expand_rows(plan.local_rows)[pairs.local]))
        theirs = list(_places(expand_rows(plan.remote_rows)[pairs.remote]))
        self.memory.reshape(-1)[own] = prefill.memory.reshape(-1)[theirs]

    def compute_prompt(self, request: Request, tokens_a_step: int) -> None:
        """Compute what the prefix cache lacks of a prompt."""
        for _, count in self.steps(request, tokens_a_step):
            self.run(request, count)

    def steps(
        self, request: Request, tokens_a_step: int, until: int = 1 << 30
    ) -> Iterator[tuple[bool, int]]:
        """Steps of a prompt that have their blocks and are to run, up to one that ends at ``until``
        tokens or later: whether it is the first one, and its tokens."""
        hit, num_hit = self.manager.get_computed_blocks(request)[:2]
        request.num_computed_tokens, begin = 0, num_hit
        while begin < min(request.num_prompt_tokens, until):
            count = min(tokens_a_step, request.num_prompt_tokens - begin)
            is_first = begin == num_hit
            self._allocate(request, count, *((num_hit, hit) if is_first else ()))
            request.num_computed_tokens = begin
            yield is_first, count
            begin += count

    def compute(self, request: Request, num_right: int = NUM_GUESSES) -> None:
        """One step of a request; with a draft also of its guesses, of which only the first
        ``num_right`` stay computed."""
        num_guesses = NUM_GUESSES if self.model.drafts else 0
        num_tokens = request.num_tokens - request.num_computed_tokens + num_guesses
        self._allocate(request, num_tokens)
        self.run(request, num_tokens)
        request.num_computed_tokens -= max(0, num_guesses - num_right)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it begins anew."""
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    def _allocate(self, request: Request, *args: Any) -> None:
        self.manager.new_step_starts()
        more = {"num_lookahead_tokens": NUM_GUESSES} if self.model.drafts else {}
        assert self.manager.allocate_slots(request, *args, **more) is not None

    def run(self, request: Request, num_tokens: int) -> None:
        """A step whose blocks are there."""
        first = request.num_computed_tokens
        tables = self.manager.get_block_ids(request.request_id)
        for number, spec in enumerate(self.model.specs):
            step = self._state_step if isinstance(spec, MambaSpec) else self._attention_step
            step(number, tables[number], first, first + num_tokens)
        request.num_computed_tokens += num_tokens

    def forget(self, request: Request) -> None:
        """Free a request, and everything that was ever computed."""
        self.manager.free(request)
        self.manager.reset_prefix_cache()
        self.memory.fill(-1)

    def _state_step(self, number: int, table: Sequence[int], first: int, end: int) -> None:
        block_size = self.model.specs[number].block_size
        if first:
            block = table[(first - 1) // block_size]
            if block == 0 or self.memory[block, 0] != _tag(number, first - 1):
                self.faults.append(f"group {number}: token {first} goes on from another state")
        block = table[(end - 1) // block_size]
        assert block != 0, "a state is written to the null block"
        self.memory[block, 0] = _tag(number, end - 1)

    def _attention_step(self, number: int, table: Sequence[int], first: int, end: int) -> None:
        spec = self.model.specs[number]
        blocks = np.asarray(table)
        for token in range(first, end):
            assert blocks[token // BLOCK] != 0, "a token is written to the null block"
            self.memory[blocks[token // BLOCK], token % BLOCK] = _tag(number, token)
            read = np.arange(first_attended(spec, token), token + 1)
            found = self.memory[blocks[read // BLOCK], read % BLOCK]
            wrong = read[(found != _tag(number, read)) | (blocks[read // BLOCK] == 0)]
            self.faults += [f"group {number}: token {token} misses {one}" for one in wrong]


def _tag(group: int, token: Any) -> Any:
    return group * 10_000 + token


def _places(rows: UInt64Array) -> Iterator[int]:
    """Places of the tags that descriptors cover."""
    for address, num_bytes, _ in rows.astype(np.int64):
        begin = (address - BASE) // TAG_BYTES
        yield from range(begin, begin + num_bytes // TAG_BYTES)


def request_of(
    request_id: str, num_tokens: int, params: Mapping[str, Any] | None = None
) -> Request:
    """A prompt whose token ids are 0, 1, 2 and so on."""
    return scheduler_engine.request_of(request_id, params, list(range(num_tokens)))
