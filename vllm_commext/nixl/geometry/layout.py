"""What a worker's cache looks like in memory, as sent to peers: families of regions.

A region is one layer's cache. Regions that differ only in where they begin form a family, so that a
model of a hundred layers is described, checked and planned in a few steps. Two families may share
bytes: where a model has attention and state-space layers, vLLM lays them over one another and hands
each block to one of them.

Descriptors are in NIXL's strided form, a row ``(address, length, device, stride, count)`` for
``count`` equally long ones ``stride`` bytes apart."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.topology import Rank, Split, interval, worker_number

UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]


def strided_row(*, address: int, num_bytes: int, count: int, device_id: int = 0) -> UInt64Array:
    """``[1, 5]``: ``count`` neighbouring descriptors of ``num_bytes`` bytes each."""
    return np.array([[address, num_bytes, device_id, num_bytes, count]], dtype=np.uint64)


TOKENS = "tokens"
"""Content of an attention cache in which every token's bytes of a head are one run."""
PAGES = "pages of "
"""How the content begins where only a whole kernel block has meaning; the form's name follows."""

FULL, WINDOW, STATE = "full", "window", "state"
"""Kinds of groups: attention to all tokens, to the last ones, or a state in place of tokens."""

MAX_COUNT = 1 << 16  # heads, units, runs or kernel blocks a block that a description may have
MAX_BLOCK_TOKENS = 1 << 16  # tokens of a block, but where it holds a state
MAX_STAGES = 1 << 12  # pipeline stages that a description may name
MAX_PARTS = 64  # parts of a state that a description may have
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Size = Annotated[int, Meta(ge=1, lt=1 << 40)]
Distance = Annotated[int, Meta(ge=0, lt=(1 << 40) - 1)]
Address = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
Int32 = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class AttentionGeometry(msgspec.Struct, frozen=True, tag="attention"):
    """One rank's attention cache: token ``t`` of head ``h`` of plane ``p`` in row ``r`` is the
    ``token_bytes`` bytes at ``base + r*row_stride + (p*heads + h)*head_stride + t*token_stride``.

    Attributes:
        num_rows: kernel blocks.
        rows_per_block: kernel blocks in one of the cache manager's blocks.
        num_heads: KV heads of the whole model.
        replicated: every rank holds all heads.
        num_planes: 2 where keys and values lie in planes of their own, else 1.
        content: ``TOKENS``, ``PAGES`` and a name, or the name of a form in which only whole rows of
            a head have meaning.
    """

    num_rows: int
    rows_per_block: Count
    row_stride: Size
    row_tokens: Size
    num_heads: Count
    replicated: bool
    num_planes: Count
    head_stride: Size
    token_stride: Size
    token_bytes: Size
    content: str
    dtype: str

    @property
    def split(self) -> Split:
        return Split(self.num_heads, self.replicated)


class StatePart(msgspec.Struct, frozen=True):
    """A part of a state that tensor parallelism deals out by itself.

    Unit ``u`` of those that the rank holds is, in each of ``num_runs`` runs, the ``unit_bytes``
    bytes at ``offset + run*run_stride + u*unit_bytes`` of the block.

    Attributes:
        name: "x", "B", "C", "q", "k", "v", "conv" or "ssm".
        num_units: units of the whole model.
        replicated: every rank holds all units.
    """

    name: str
    dtype: str
    offset: Distance
    num_units: Count
    replicated: bool
    unit_bytes: Size
    num_runs: Count = 1
    run_stride: Distance = 0

    @property
    def split(self) -> Split:
        return Split(self.num_units, self.replicated)


class StateGeometry(msgspec.Struct, frozen=True, tag="state"):
    """One rank's states, one a block; bytes beyond the parts are padding."""

    num_rows: int
    row_stride: Size
    parts: Annotated[tuple[StatePart, ...], Meta(min_length=1, max_length=MAX_PARTS)]


Geometry = AttentionGeometry | StateGeometry


class Family(msgspec.Struct, frozen=True):
    """Regions of equal geometry in one group.

    Attributes:
        group: index into ``CacheLayout.groups``.
        base_addresses: address of block 0 of each.
    """

    group: int
    names: list[str]
    base_addresses: list[Address]
    geometry: Geometry


class Group(msgspec.Struct, frozen=True):
    """Layers that share a request's list of blocks.

    Attributes:
        kind: ``FULL``, ``WINDOW`` or ``STATE``.
        block_size: tokens of one of the cache manager's blocks.
    """

    kind: Annotated[str, Meta(pattern=rf"^({FULL}|{WINDOW}|{STATE})\Z")]
    block_size: Int32


class CacheLayout(msgspec.Struct, frozen=True):
    """One worker's whole cache.

    Attributes:
        groups: in the order of a request's lists of blocks.
        families: the worker's layers, each once.
        stages: names of the layers of every pipeline stage of the engine; empty where this worker's
            layers are all.
    """

    tp_size: Annotated[int, Meta(le=1 << 16)]
    tp_rank: Annotated[int, Meta(ge=0)]
    num_blocks: Int32
    groups: Annotated[list[Group], Meta(min_length=1)]
    families: Annotated[list[Family], Meta(min_length=1)]
    pp_rank: Annotated[int, Meta(ge=0)] = 0
    stages: Annotated[list[list[str]], Meta(max_length=MAX_STAGES)] = []

    @property
    def rank(self) -> Rank:
        return Rank(self.tp_size, self.tp_rank)

    @property
    def worker(self) -> int:
        return worker_number(self.pp_rank, self.rank)

    @property
    def pp_size(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_regions(self) -> int:
        return sum(len(family.names) for family in self.families)

    def own_names(self) -> set[str]:
        return {name for family in self.families for name in family.names}

    def engine_names(self) -> set[str]:
        return {name for names in self.stages for name in names} or self.own_names()

    def splits(self) -> frozenset[Split]:
        return frozenset(part.split for family in self.families for part in parts_of(family))


def describe_place(layout: CacheLayout) -> str:
    rank = f"rank {layout.tp_rank} of {layout.tp_size}"
    return rank if layout.pp_size == 1 else f"{rank}, stage {layout.pp_rank} of {layout.pp_size}"


def parts_of(family: Family) -> Iterator[AttentionGeometry | StatePart]:
    if isinstance(family.geometry, AttentionGeometry):
        yield family.geometry
    else:
        yield from family.geometry.parts


def block_bytes(layout: CacheLayout, family: Family) -> int:
    """Bytes of one of the cache manager's blocks in one region of the family, without padding."""
    geometry = family.geometry
    if isinstance(geometry, AttentionGeometry):
        first, end = interval(geometry.split, layout.rank)
        heads = (end - first) * geometry.num_planes
        return heads * geometry.row_tokens * geometry.rows_per_block * geometry.token_bytes
    total = 0
    for part in geometry.parts:
        first, end = interval(part.split, layout.rank)
        total += (end - first) * part.unit_bytes * part.num_runs
    return total


def check_layout(layout: CacheLayout) -> None:
    """Raise ProtocolError where a description's numbers, each in its range, do not go together."""
    _expect(layout.tp_rank < layout.tp_size, "tp_rank below tp_size")
    for family in layout.families:
        _expect(0 <= family.group < len(layout.groups), "family.group")
        _expect(0 < len(family.names) == len(family.base_addresses), "a base address a layer")
        _check_geometry(family.geometry, layout.num_blocks, layout.groups[family.group])
    stages = layout.stages or [list(layout.own_names())]
    _expect(layout.pp_rank < len(stages), "pp_rank below the number of stages")
    _expect(set(stages[layout.pp_rank]) == layout.own_names(), "the layers of its stage")
    num_names = sum(map(len, stages))
    _expect(len(layout.engine_names()) == num_names, "each layer in one stage, and once there")


def _check_geometry(geometry: Geometry, num_blocks: int, group: Group) -> None:
    keeps_tokens = isinstance(geometry, AttentionGeometry)
    _expect(keeps_tokens == (group.kind != STATE), "states in groups of states only")
    if not isinstance(geometry, AttentionGeometry):
        _expect(geometry.num_rows == num_blocks, "a row a block")
        return
    _expect(group.block_size <= MAX_BLOCK_TOKENS, f"block_size from 1 to {MAX_BLOCK_TOKENS}")
    _expect(geometry.num_rows == num_blocks * geometry.rows_per_block, "rows for all blocks")
    block_size = geometry.rows_per_block * geometry.row_tokens
    _expect(block_size == group.block_size, f"{group.block_size} tokens in a block's rows")


def _expect(good: bool, what: str) -> None:
    if not good:
        raise ProtocolError(f"the worker description is not consistent: expected {what}")
