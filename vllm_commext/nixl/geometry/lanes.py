"""From two geometries to lanes: which bytes of a remote region land where in a local one.

A lane is a pair of equally long runs of bytes, one in each region, that repeats for every cell. A
cell is as many tokens as both sides keep together: a kernel block where both have the same, a part
of one where they differ, a single token where one side keeps tokens apart."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import (
    PAGES,
    TOKENS,
    AttentionGeometry,
    Geometry,
    StateGeometry,
    StatePart,
)
from vllm_commext.nixl.geometry.topology import Rank, Split, interval, units_from

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """Where one side's cells begin, relative to a lane: cell ``c`` of row ``r`` at
    ``r*row_stride + c*cell_stride``.  Strides are in bytes."""

    num_rows: int
    row_stride: int
    rows_per_block: int = 1
    cells_per_row: int = 1
    cell_stride: int = 0

    @property
    def num_cells(self) -> int:
        return self.num_rows * self.cells_per_row

    @property
    def cells_per_block(self) -> int:
        return self.rows_per_block * self.cells_per_row

    def flattened(self) -> Grid:
        count = self.cells_per_row
        if count == 1 or self.row_stride != count * self.cell_stride:
            return self
        return Grid(self.num_rows * count, self.cell_stride, self.rows_per_block * count)

    def grouped(self, num_rows: int) -> Grid:
        return Grid(
            self.num_rows // num_rows,
            self.row_stride * num_rows,
            self.rows_per_block // num_rows,
            self.cells_per_row,
            self.cell_stride,
        )


@dataclass(frozen=True)
class Lanes:
    """All lanes of two regions.

    Attributes:
        cell_tokens: tokens of a cell, 0 for states.
        lengths: ``[num_lanes]`` bytes of a cell in each lane.
        local_offsets: ``[num_lanes]`` bytes from the local region's start to cell 0.
        remote_offsets: the same of the remote region.
    """

    cell_tokens: int
    local: Grid
    remote: Grid
    lengths: Int64Array
    local_offsets: Int64Array
    remote_offsets: Int64Array


@functools.lru_cache(maxsize=64)
def lanes_between(
    local: Geometry, remote: Geometry, reader: Rank, source: Rank, what: str
) -> Lanes | None:
    """Lanes of ``reader``'s part of ``source``'s cache, None where it gets nothing.

    Kept for the next peer of the same geometry.  ``what`` names the region in messages.

    Raises:
        UnsupportedError: one side's bytes cannot be placed in the other's; says why.
    """
    if isinstance(local, AttentionGeometry) and isinstance(remote, AttentionGeometry):
        return _attention_lanes(local, remote, reader, source, what)
    if isinstance(local, StateGeometry) and isinstance(remote, StateGeometry):
        return _state_lanes(local, remote, reader, source, what)
    raise UnsupportedError(f"{what}: one engine keeps tokens there, the other one a state")


def _attention_lanes(
    local: AttentionGeometry, remote: AttentionGeometry, reader: Rank, source: Rank, what: str
) -> Lanes | None:
    for name in ("num_heads", "replicated", "num_planes", "token_bytes", "content", "dtype"):
        _expect_equal(what, name, getattr(local, name), getattr(remote, name))
    heads = _Overlap.of(local.split, reader, source)
    if heads is None:
        return None
    if heads.is_whole and _is_one_run(local, heads.num_local) and _same_order(local, remote):
        return _whole_rows(local, remote, heads)
    run_tokens = _run_tokens(local, remote, what)
    run_bytes = run_tokens * local.token_bytes
    return Lanes(
        run_tokens,
        _grid_of_tokens(local, run_tokens),
        _grid_of_tokens(remote, run_tokens),
        np.full(local.num_planes * heads.count, run_bytes, dtype=np.int64),
        _head_offsets(local, heads.num_local, heads.local_first, heads.count),
        _head_offsets(remote, heads.num_remote, heads.remote_first, heads.count),
    )


@dataclass(frozen=True)
class _Overlap:
    """Units that a reader takes from a source, and where both keep them."""

    count: int
    local_first: int
    remote_first: int
    num_local: int
    num_remote: int

    @classmethod
    def of(cls, split: Split, reader: Rank, source: Rank) -> _Overlap | None:
        first, end = units_from(split, reader, source)
        if first == end:
            return None
        own, theirs = interval(split, reader), interval(split, source)
        return cls(
            end - first, first - own[0], first - theirs[0], own[1] - own[0], theirs[1] - theirs[0]
        )

    @property
    def is_whole(self) -> bool:
        return self.count == self.num_local == self.num_remote


def _is_one_run(one: AttentionGeometry, num_heads: int) -> bool:
    row_heads = one.num_planes * num_heads
    heads_first = (one.row_tokens * one.token_bytes, one.token_bytes)
    tokens_first = (one.token_bytes, row_heads * one.token_bytes)
    return (one.head_stride, one.token_stride) in (heads_first, tokens_first)


def _same_order(local: AttentionGeometry, remote: AttentionGeometry) -> bool:
    names = ("row_tokens", "head_stride", "token_stride")
    return all(getattr(local, name) == getattr(remote, name) for name in names)


def _whole_rows(local: AttentionGeometry, remote: AttentionGeometry, heads: _Overlap) -> Lanes:
    run_bytes = local.num_planes * heads.count * local.row_tokens * local.token_bytes
    grids = [Grid(one.num_rows, one.row_stride, one.rows_per_block) for one in (local, remote)]
    together = 1
    if all(grid.row_stride == run_bytes for grid in grids):
        together = math.gcd(*(grid.rows_per_block for grid in grids))
    zero = np.zeros(1, dtype=np.int64)
    return Lanes(
        local.row_tokens * together,
        grids[0].grouped(together),
        grids[1].grouped(together),
        np.array([run_bytes * together], dtype=np.int64),
        zero,
        zero,
    )


def _run_tokens(local: AttentionGeometry, remote: AttentionGeometry, what: str) -> int:
    together = all(one.token_stride == one.token_bytes for one in (local, remote))
    if local.content == TOKENS:
        return math.gcd(local.row_tokens, remote.row_tokens) if together else 1
    what = f"{what} with content {local.content!r}"
    if local.content.startswith(PAGES):
        raise UnsupportedError(
            f"{what}: a kernel block keeps data and scales of all its heads in parts of its own "
            "and is moved as a whole: start both engines with the same --tensor-parallel-size, "
            "--block-size and VLLM_KV_CACHE_LAYOUT"
        )
    if local.row_tokens != remote.row_tokens:
        raise UnsupportedError(
            f"{what}: the order of tokens in a block is that backend's own, and a block holds "
            f"{local.row_tokens} tokens in the decode engine, {remote.row_tokens} in the prefill "
            "engine. Remedy: start both engines with the same --block-size"
        )
    if not together:
        raise UnsupportedError(
            f"{what}: heads can be moved alone only where each one's tokens lie together: start "
            "both engines with VLLM_KV_CACHE_LAYOUT=HND, or with the same tensor-parallel size"
        )
    return local.row_tokens


def _grid_of_tokens(one: AttentionGeometry, run_tokens: int) -> Grid:
    return Grid(
        one.num_rows,
        one.row_stride,
        one.rows_per_block,
        one.row_tokens // run_tokens,
        run_tokens * one.token_stride,
    ).flattened()


def _head_offsets(one: AttentionGeometry, num_heads: int, first: int, count: int) -> Int64Array:
    planes = np.arange(one.num_planes, dtype=np.int64) * num_heads
    heads = np.arange(first, first + count, dtype=np.int64)
    return ((planes[:, None] + heads[None, :]) * one.head_stride).ravel()


def _state_lanes(
    local: StateGeometry, remote: StateGeometry, reader: Rank, source: Rank, what: str
) -> Lanes | None:
    names = [[part.name for part in one.parts] for one in (local, remote)]
    _expect_equal(what, "parts of the state", *names)
    lanes: list[tuple[int, int, int]] = []
    for own, theirs in zip(local.parts, remote.parts, strict=True):
        lanes += _part_lanes(own, theirs, reader, source, f"{what}, {own.name}")
    if not lanes:
        return None
    columns = np.array(lanes, dtype=np.int64).T
    return Lanes(
        0,
        Grid(local.num_rows, local.row_stride),
        Grid(remote.num_rows, remote.row_stride),
        *(columns[0], columns[1], columns[2]),
    )


def _part_lanes(
    local: StatePart, remote: StatePart, reader: Rank, source: Rank, what: str
) -> list[tuple[int, int, int]]:
    if (local.num_runs == 1) != (remote.num_runs == 1):
        raise UnsupportedError(
            f"{what}: one engine keeps channels first and the other one does not: start both with "
            "the same VLLM_SSM_CONV_STATE_LAYOUT"
        )
    for name in ("dtype", "num_units", "replicated", "unit_bytes", "num_runs"):
        _expect_equal(what, name, getattr(local, name), getattr(remote, name))
    units = _Overlap.of(local.split, reader, source)
    if units is None:
        return []
    return [
        (
            units.count * local.unit_bytes,
            local.offset + run * local.run_stride + units.local_first * local.unit_bytes,
            remote.offset + run * remote.run_stride + units.remote_first * remote.unit_bytes,
        )
        for run in range(local.num_runs)
    ]


def _expect_equal(what: str, name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise UnsupportedError(
            f"{what}: {name} is {ours!r} in the decode engine and {theirs!r} in the prefill "
            "engine, and one cannot be placed in the other: start both with the same model, dtypes "
            "and attention backend"
        )
