"""A plan for reads: from a request's two lists of blocks to the pairs of descriptors that one read
copies.  ``planner`` makes it, once a peer.

A descriptor list holds, section after section, the cells of every lane: cell ``c`` of row ``r`` of
lane ``l`` has the index ``offset + l*num_cells + c*num_rows + r``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.descriptors import Int32Array, UInt64Array
from vllm_commext.nixl.lanes import Grid
from vllm_commext.nixl.layout import CacheLayout

Int64Array = npt.NDArray[np.int64]
MAX_IDS = 1 << 13
"""Block ids that become an array in one step."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class Blocks:
    """A request's blocks in one group.

    Attributes:
        first: position in the request of the first of them.
        block_ids: one a position; for a state the one block that holds it.
    """

    first: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class _Held:
    """``Blocks`` whose ids are checked: 64-bit numbers inside their cache."""

    first: int
    block_ids: Int64Array


@dataclass(frozen=True)
class Section:
    """One part of both descriptor lists: lanes whose cells are counted alike.

    Attributes:
        local_group: group of the local blocks.
        remote_group: group of the remote blocks.
        cell_tokens: tokens of a cell, 0 for states.
        local: the local cells.
        remote: the remote cells.
        local_offset: index of the section's first local descriptor.
        remote_offset: of its first remote one.
        num_lanes: lanes.
        cell_bytes: bytes of a cell in all lanes.
    """

    local_group: int
    remote_group: int
    cell_tokens: int
    local: Grid
    remote: Grid
    local_offset: int
    remote_offset: int
    num_lanes: int
    cell_bytes: int


@dataclass(frozen=True)
class Pairs:
    """What one read copies: descriptor ``local[i]`` from descriptor ``remote[i]``."""

    local: Int32Array
    remote: Int32Array
    num_bytes: int


@dataclass(frozen=True)
class ReadPlan:
    """How one decode rank reads from one prefill rank.

    Attributes:
        local: this worker's layout.
        remote: the prefill worker's.
        local_rows: ``[n, 5]`` strided descriptors, see ``descriptors``.
        remote_rows: the same of the prefill worker.
        sections: the parts of both lists.
    """

    local: CacheLayout
    remote: CacheLayout
    local_rows: UInt64Array
    remote_rows: UInt64Array
    sections: tuple[Section, ...]

    def pairs(
        self,
        local: Sequence[Blocks],
        remote: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        num_remote_tokens: int,
        pause: Callable[[], None] = lambda: None,
    ) -> Pairs:
        """Descriptors that copy a request's missing blocks.

        Args:
            local: for each local group, the blocks to be filled.
            remote: for each remote group, the blocks up to the one of the last remote token.
            num_tokens: tokens whose KV is wanted.
            num_remote_tokens: tokens whose KV the remote blocks hold.
            pause: called between steps that hold the interpreter's lock.

        Raises:
            ProtocolError: a list is too short, or an id is outside its cache.
        """
        own, theirs = self._checked(local, remote, pause)
        chosen = [
            (section, *self._cells(section, own, theirs, num_tokens, num_remote_tokens))
            for section in self.sections
        ]
        return Pairs(
            _indices(
                [(one.local, one.local_offset, one.num_lanes, cells) for one, cells, _ in chosen]
            ),
            _indices(
                [(one.remote, one.remote_offset, one.num_lanes, cells) for one, _, cells in chosen]
            ),
            sum(one.cell_bytes * len(cells) for one, cells, _ in chosen),
        )

    def _checked(
        self,
        local: Sequence[Blocks],
        remote: Sequence[Sequence[int]],
        pause: Callable[[], None],
    ) -> tuple[list[_Held], list[Int64Array]]:
        if len(remote) != len(self.remote.groups):
            raise ProtocolError(
                f"kv_transfer_params have {len(remote)} groups of blocks, expected "
                f"{len(self.remote.groups)}"
            )
        num_local, num_remote = self.local.num_blocks, self.remote.num_blocks
        own = [
            _Held(one.first, _checked_ids("local", one.block_ids, num_local, pause))
            for one in local
        ]
        return own, [_checked_ids("remote", ids, num_remote, pause) for ids in remote]

    def _cells(
        self,
        section: Section,
        local: Sequence[_Held],
        remote: Sequence[Int64Array],
        num_tokens: int,
        num_remote_tokens: int,
    ) -> tuple[Int64Array, Int64Array]:
        """Cells of both sides that hold the same, in ascending order of the remote ones, so that
        NIXL can merge neighbours into one descriptor."""
        blocks, block_ids = local[section.local_group], remote[section.remote_group]
        if not section.cell_tokens:
            own, theirs = _states(blocks.block_ids, block_ids)
        else:
            block_size = self.remote.groups[section.remote_group].block_size
            first = num_blocks_for(num_remote_tokens, block_size) - len(block_ids)
            held = _Held(first, block_ids)
            wanted = _wanted(section, blocks, held, num_tokens)
            own = _cells_at(section.local, blocks, *wanted)
            theirs = _cells_at(section.remote, held, *wanted)
        order = np.argsort(theirs, kind="stable")
        return own[order], theirs[order]


def _states(local: Int64Array, remote: Int64Array) -> tuple[Int64Array, Int64Array]:
    if len(local) != len(remote):
        raise ProtocolError(
            f"the prefill engine offers {len(remote)} states, the decode engine needs {len(local)}"
        )
    return local, remote


def _wanted(section: Section, local: _Held, remote: _Held, num_tokens: int) -> tuple[int, int]:
    """Positions ``[first, end)`` of the cells to be read, from the request's first token on."""
    first = local.first * section.local.cells_per_block
    end = max(first, num_blocks_for(num_tokens, section.cell_tokens))
    for side, blocks, grid in (
        ("decode", local, section.local),
        ("prefill", remote, section.remote),
    ):
        begins, stops = blocks.first, blocks.first + len(blocks.block_ids)
        if first < end and not (
            0 <= begins * grid.cells_per_block <= first and end <= stops * grid.cells_per_block
        ):
            block_size = grid.cells_per_block * section.cell_tokens
            raise ProtocolError(
                f"the {side} engine offers {len(blocks.block_ids)} blocks of {block_size} tokens, "
                f"from token {begins * block_size} on; expected those of the tokens from "
                f"{first * section.cell_tokens} to {num_tokens - 1}"
            )
    return first, end


def _cells_at(grid: Grid, blocks: _Held, first: int, end: int) -> Int64Array:
    """Numbers of the cells at the positions ``[first, end)``: ``row*cells_per_row + cell``."""
    per_block = grid.cells_per_block
    begin, within = divmod(first, per_block)
    stop = num_blocks_for(end, per_block)
    block_ids = blocks.block_ids[begin - blocks.first : stop - blocks.first]
    cells = block_ids[:, None] * per_block + np.arange(per_block, dtype=np.int64)
    return cells.ravel()[within : within + end - first]


def _indices(parts: Sequence[tuple[Grid, int, int, Int64Array]]) -> Int32Array:
    """Descriptor indices of cells in every lane, lane after lane."""
    found: list[Int64Array] = []
    for grid, offset, num_lanes, cells in parts:
        row, cell = np.divmod(cells, grid.cells_per_row)
        lanes = offset + np.arange(num_lanes, dtype=np.int64) * grid.num_cells
        found.append((lanes[:, None] + (cell * grid.num_rows + row)[None, :]).ravel())
    return np.concatenate(found).astype(np.int32)


def _checked_ids(
    side: str, block_ids: Sequence[int], num_blocks: int, pause: Callable[[], None]
) -> Int64Array:
    ids = np.empty(len(block_ids), dtype=np.int64)
    try:
        for begin in range(0, len(ids), MAX_IDS):
            if begin:
                pause()
            piece = block_ids[begin : begin + MAX_IDS]
            ids[begin : begin + len(piece)] = np.fromiter(piece, np.int64, len(piece))
    except OverflowError:  # what came from a router may exceed 64 bits
        ids = None
    if ids is None or (len(ids) and (ids.min() < 0 or ids.max() >= num_blocks)):
        raise ProtocolError(
            f"{side} block ids run from {min(block_ids)} to {max(block_ids)}, "
            f"expected 0 to {num_blocks - 1}"
        )
    return ids
