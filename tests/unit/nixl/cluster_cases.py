"""Pairs of engines and the requests that go from one to the other."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, State, Table
from tests.unit.nixl.reference_meaning import Held, Int64Array, beyond, held, nothing_held

Model = tuple[Group, ...]

PAIRS = ((1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (4, 1), (1, 4), (8, 2), (2, 8))
"""Ranks of the prefill and of the decode engine."""


@dataclass(frozen=True)
class Request:
    """A request that was prefilled.

    Attributes:
        number: from 1.
        num_tokens: tokens that the decode engine wants.
        num_remote_tokens: tokens that the prefill engine has.
        local: the decode engine's blocks that are to be filled, a group at a time.
        remote: the prefill engine's blocks; the last one holds the last token.
    """

    number: int
    num_tokens: int
    num_remote_tokens: int
    local: tuple[Table, ...]
    remote: tuple[Table, ...]


@dataclass(frozen=True)
class Case:
    prefill: Cache
    decode: Cache
    requests: tuple[Request, ...]

    def prefill_memory(self, rank: int) -> Int64Array:
        """Tags of a prefill rank that has computed the requests."""
        memory = nothing_held(self.prefill, 0, rank)
        for one in self.requests:
            has = held(self.prefill, rank, one.number, one.remote, one.num_remote_tokens)
            memory[has.offsets] = has.tags
        return memory

    def decode_memory(self, rank: int) -> Int64Array:
        """Tags of a decode rank before it has read anything."""
        return nothing_held(self.decode, 1, rank)

    def wanted(self, rank: int, request: Request) -> Held:
        return held(self.decode, rank, request.number, request.local, request.num_tokens)

    def allowed(self, request: Request) -> Int64Array:
        """Offsets that the request's read may write anything to, on every decode rank."""
        return beyond(self.decode, request.local, request.num_tokens)


@dataclass(frozen=True)
class Span:
    """How much of a request is where, in tokens and in positions of blocks, a group at a time.

    Attributes:
        num_tokens: tokens that are wanted.
        num_remote_tokens: tokens that there are.
        local_first: the first block to be filled.
        remote_first: the first block that is offered.
    """

    num_tokens: int
    num_remote_tokens: int
    local_first: tuple[int, ...]
    remote_first: tuple[int, ...]


def case_of(
    model: Model, prefill: Engine, decode: Engine, spans: Sequence[Span], dice: random.Random
) -> Case:
    """Give the requests blocks at random; the engines get as many as there have to be and a few
    more, of which the first belongs to nobody."""
    local = [_counts(model, decode, one.local_first, one.num_tokens) for one in spans]
    remote = [_counts(model, prefill, one.remote_first, one.num_remote_tokens) for one in spans]
    tables: list[Iterator[tuple[Table, ...]]] = []
    engines: list[Engine] = []
    for engine, counts in ((prefill, remote), (decode, local)):
        needed = 1 + sum(end - first for request in counts for first, end in request)
        engines.append(replace(engine, num_blocks=needed + dice.randint(0, 3)))
        free = list(range(1, engines[-1].num_blocks))
        if dice.random() < 0.8:
            dice.shuffle(free)
        tables.append(_deal(counts, iter(free)))
    requests = tuple(
        Request(number, one.num_tokens, one.num_remote_tokens, own, theirs)
        for number, (one, theirs, own) in enumerate(zip(spans, *tables, strict=True), 1)
    )
    return Case(Cache(model, engines[0]), Cache(model, engines[1]), requests)


def _counts(
    model: Model, engine: Engine, firsts: Sequence[int], num_tokens: int
) -> list[tuple[int, int]]:
    ends = (-(-num_tokens // size) for size in engine.block_sizes)
    return [
        (end - 1, end) if group.kind == "state" else (first, end)
        for group, first, end in zip(model, firsts, ends, strict=True)
    ]


def _deal(
    counts: Sequence[list[tuple[int, int]]], free: Iterator[int]
) -> Iterator[tuple[Table, ...]]:
    for request in counts:
        yield tuple(
            Table(first, tuple(next(free) for _ in range(first, end))) for first, end in request
        )


def random_span(model: Model, prefill: Engine, decode: Engine, dice: random.Random) -> Span:
    num_remote_tokens = dice.randint(1, 24)
    num_tokens = num_remote_tokens
    if not any(group.kind == "state" for group in model) and dice.random() < 0.5:
        num_tokens = dice.randint(1, num_remote_tokens)
    local: list[int] = []
    remote: list[int] = []
    for number, group in enumerate(model):
        block_size = decode.block_sizes[number]
        local.append(dice.choice([0, dice.randint(0, num_tokens // block_size)]))
        remote.append(dice.randint(0, local[-1]) if group.kind == "window" else 0)
    return Span(num_tokens, num_remote_tokens, tuple(local), tuple(remote))


def _with_state(state: State, heads: int) -> Model:
    return (
        Group("full", (Attention(heads, 3),) * 2),
        Group("state", (state,) * 2),
        Group("state", (state,)),
    )


MODELS: dict[str, Model] = {
    "eight heads": (Group("full", (Attention(8, 2),) * 3),),
    "two heads and a window": (
        Group("full", (Attention(2, 3, num_planes=2),)),
        Group("window", (Attention(2, 3, num_planes=2),) * 2),
    ),
    "one head": (Group("full", (Attention(1, 4, num_planes=2),) * 2),),
    "latent": (Group("full", (Attention(1, 5, latent=True),) * 2 + (Attention(4, 2),)),),
    "mamba2 with one group": _with_state(State("mamba2", 8, 2, 1, 3), 2),
    "mamba2 with two groups": _with_state(State("mamba2", 16, 2, 2, 2), 8),
    "mamba2 with eight groups": _with_state(State("mamba2", 8, 3, 8, 2), 1),
    "gated delta net": _with_state(State("gdn", 16, 2, 8, 3), 2),
    "mamba1": _with_state(State("mamba1", 16, state_size=3), 4),
    "short convolution": _with_state(State("short_conv", 24), 8),
}


def named_case(name: str, sizes: tuple[int, int], *, alike: bool, num_requests: int = 1) -> Case:
    """Two engines of a model, which keep their caches alike or as differently as they may."""
    model = MODELS[name]
    dice = random.Random(f"{name} {sizes} {alike}")
    has_state = any(group.kind == "state" for group in model)
    windows = any(group.kind == "window" for group in model)
    groups = len(model)
    prefill = Engine(sizes[0], 0, (4,) * groups, (1,) * groups, shared=has_state)
    decode = replace(prefill, tp_size=sizes[1])
    if not alike:
        decode = replace(decode, order="LBNHC", padding=1)
        if not windows:
            shapes = {"block_sizes": (6, 5, 3)[:groups], "rows_per_block": (3, 1, 1)[:groups]}
            decode = replace(decode, **shapes)
    spans = [random_span(model, prefill, decode, dice) for _ in range(num_requests)]
    return case_of(model, prefill, decode, spans, dice)
