"""A plan for reads: from a request's two lists of blocks to the pairs of descriptors that one read
copies.

A descriptor list holds, section after section, the cells of every lane: cell ``c`` of row ``r`` of
lane ``l`` has the index ``offset + l*num_cells + c*num_rows + r``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import ProtocolError, UnsupportedError
from vllm_commext.nixl.geometry.lanes import Grid, Lanes, lanes_between
from vllm_commext.nixl.geometry.layout import (
    FULL,
    STATE,
    WINDOW,
    CacheLayout,
    Family,
    Group,
    Int32Array,
    UInt64Array,
)

Int64Array = npt.NDArray[np.int64]
MAX_DESCRIPTORS = (1 << 31) - 1  # in the list of one side
MAX_PLAN_ROWS = 1 << 20
"""Strided rows of one side: a plan of as many takes 42 MB and a fifth of a second."""
MAX_IDS = 1 << 13  # block ids that become an array in one step


def num_blocks_for(num_tokens: int, block_size: int) -> int:
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
        cell_tokens: tokens of a cell, 0 for states.
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
    """How one decode rank reads from one prefill rank; rows are ``[n, 5]`` strided descriptors."""

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
        self, local: Sequence[Blocks], remote: Sequence[Sequence[int]], pause: Callable[[], None]
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
    found = [np.empty(0, dtype=np.int32)]
    for grid, offset, num_lanes, cells in parts:
        row, cell = np.divmod(cells, grid.cells_per_row)
        within = (cell * grid.num_rows + row).astype(np.int32)
        lanes = offset + np.arange(num_lanes, dtype=np.int32) * np.int32(grid.num_cells)
        found.append((lanes[:, None] + within[None, :]).ravel())
    return np.concatenate(found)


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


def plan_read(
    local: CacheLayout, remote: CacheLayout, *, local_device: int, remote_device: int
) -> ReadPlan:
    """Plan how the local worker reads from the remote one: layers that both have, by name. Workers
    of different pipeline stages may have none in common; then nothing is read.

    Raises:
        ProtocolError: the two engines have different layers.
        UnsupportedError: one side's bytes cannot be placed in the other's; says why.
    """
    sections: list[Section] = []
    num_rows = 0
    own_rows: list[UInt64Array] = []
    their_rows: list[UInt64Array] = []
    offsets = [0, 0]
    for family, other, own_bases, their_bases in _matched(local, remote):
        what = f"layer {family.names[0]}"
        _check_group(local, remote, family, other, what)
        lanes = lanes_between(family.geometry, other.geometry, local.rank, remote.rank, what)
        if lanes is None:
            continue
        per_lane = max(lanes.local.cells_per_row, lanes.remote.cells_per_row)
        num_rows += len(own_bases) * len(lanes.lengths) * per_lane
        if num_rows > MAX_PLAN_ROWS:  # before anything of that size is allocated
            raise _refused(what, f"{num_rows} rows of descriptors", MAX_PLAN_ROWS)
        lengths, own, theirs = _merged(lanes, own_bases, their_bases)
        sections.append(
            Section(
                family.group,
                other.group,
                lanes.cell_tokens,
                lanes.local,
                lanes.remote,
                offsets[0],
                offsets[1],
                len(lengths),
                int(lengths.sum()),
            )
        )
        offsets[0] += len(lengths) * lanes.local.num_cells
        offsets[1] += len(lengths) * lanes.remote.num_cells
        if max(offsets) > MAX_DESCRIPTORS:
            raise _refused(what, f"{max(offsets)} descriptors", MAX_DESCRIPTORS)
        own_rows.append(_rows(lanes.local, own, lengths, local_device))
        their_rows.append(_rows(lanes.remote, theirs, lengths, remote_device))
    empty = np.empty((0, 5), dtype=np.uint64)
    return ReadPlan(
        local,
        remote,
        np.concatenate([empty, *own_rows]),
        np.concatenate([empty, *their_rows]),
        tuple(sections),
    )


def _refused(what: str, needed: str, most: int) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: {needed} are needed, expected at most {most}: give both engines the same "
        "--block-size and KV cache layout"
    )


def _matched(
    local: CacheLayout, remote: CacheLayout
) -> Iterator[tuple[Family, Family, Int64Array, Int64Array]]:
    """Families of both sides that have layers in common, and where these layers begin; of engines
    with pipeline stages, each has layers that the other has not."""
    _check_names(local.engine_names(), remote.engine_names())
    if [one.names for one in local.families] == [one.names for one in remote.families]:
        for own, theirs in zip(local.families, remote.families, strict=True):
            yield own, theirs, _addresses(own), _addresses(theirs)
        return
    place = {
        name: (number, index)
        for number, family in enumerate(remote.families)
        for index, name in enumerate(family.names)
    }
    for own in local.families:
        found = {here: place[name] for here, name in enumerate(own.names) if name in place}
        for number in sorted({number for number, _ in found.values()}):
            theirs = remote.families[number]
            here = [index for index, (other, _) in found.items() if other == number]
            there = [index for other, index in found.values() if other == number]
            yield own, theirs, _addresses(own)[here], _addresses(theirs)[there]


def _addresses(family: Family) -> Int64Array:
    return np.asarray(family.base_addresses, dtype=np.int64)


def _check_names(local: set[str], remote: set[str]) -> None:
    if local != remote:
        raise ProtocolError(
            f"the engines' layers differ: only in decode {sorted(local - remote)[:4]}, only in "
            f"prefill {sorted(remote - local)[:4]}: serve the same model on both"
        )


def _check_group(
    local: CacheLayout, remote: CacheLayout, family: Family, other: Family, what: str
) -> None:
    own, theirs = local.groups[family.group], remote.groups[other.group]
    if own.kind != theirs.kind:
        raise UnsupportedError(
            f"{what}: in a group of kind {own.kind!r} in the decode engine, {theirs.kind!r} in the "
            "prefill engine: serve the same model on both"
        )
    if own.kind == WINDOW and own.block_size != theirs.block_size:
        raise UnsupportedError(
            f"{what}: sliding-window layers need the same block size on both sides, got "
            f"{own.block_size} in the decode engine and {theirs.block_size} in the prefill engine: "
            "start both with the same --block-size"
        )


def _merged(
    lanes: Lanes, own_bases: Int64Array, their_bases: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Lanes of all regions as (bytes, local address, remote address); those that are neighbours on
    both sides become one."""
    own = (own_bases[:, None] + lanes.local_offsets[None, :]).ravel()
    theirs = (their_bases[:, None] + lanes.remote_offsets[None, :]).ravel()
    lengths = (np.zeros_like(own_bases)[:, None] + lanes.lengths[None, :]).ravel()
    order = own.argsort(kind="stable")
    own, theirs, lengths = own[order], theirs[order], lengths[order]
    begins = np.ones(len(own), dtype=bool)
    begins[1:] = (own[1:] != own[:-1] + lengths[:-1]) | (theirs[1:] != theirs[:-1] + lengths[:-1])
    starts = begins.nonzero()[0]
    return np.add.reduceat(lengths, starts), own[starts], theirs[starts]


def _rows(grid: Grid, addresses: Int64Array, lengths: Int64Array, device_id: int) -> UInt64Array:
    cells = np.arange(grid.cells_per_row, dtype=np.int64) * grid.cell_stride
    rows = np.empty((len(addresses), grid.cells_per_row, 5), dtype=np.uint64)
    rows[:, :, 0] = addresses[:, None] + cells[None, :]
    rows[:, :, 1] = lengths[:, None]
    rows[:, :, 2:] = (device_id, grid.row_stride, grid.num_rows)
    return rows.reshape(-1, 5)


NULL_BLOCK = 0


def has_state(groups: Sequence[Group]) -> bool:
    return any(group.kind == STATE for group in groups)


def keeps_every_token(groups: Sequence[Group]) -> bool:
    """Whether the last token can be computed again from the cache after it: a state cannot go back,
    and a window may have dropped the block of the first token that the last one attends to."""
    return all(group.kind == FULL for group in groups)


def blocks_to_fill(
    groups: Sequence[Group],
    block_ids: Sequence[Sequence[int]],
    *,
    num_local_tokens: int,
    num_tokens: int,
) -> tuple[Blocks, ...]:
    """The decode side's blocks, a group at a time.

    Args:
        block_ids: blocks of each group, by position.
        num_local_tokens: tokens that this engine has already, in whole blocks.
        num_tokens: tokens after the load.
    """
    found: list[Blocks] = []
    for group, ids in zip(groups, block_ids, strict=True):
        end = num_blocks_for(num_tokens, group.block_size)
        first = end - 1 if group.kind == STATE else num_local_tokens // group.block_size
        while first < min(end, len(ids)) and ids[first] == NULL_BLOCK:
            first += 1
        found.append(Blocks(first, list(ids[first:end])))
    return tuple(found)


def blocks_to_offer(
    groups: Sequence[Group], block_ids: Sequence[Sequence[int]], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The prefill side's blocks, a group at a time: all that are left, ending with that of the last
    token; the arguments are those of ``blocks_to_fill``."""
    filled = blocks_to_fill(groups, block_ids, num_local_tokens=0, num_tokens=num_tokens)
    return tuple(tuple(blocks.block_ids) for blocks in filled)


def is_complete(groups: Sequence[Group], offered: Sequence[Sequence[int]]) -> bool:
    """Whether nothing that a reader needs is missing; only a window can be empty, where the next
    token begins a new one."""
    return all(
        len(ids) > 0 or group.kind == WINDOW for group, ids in zip(groups, offered, strict=True)
    )


def is_at_block_boundary(groups: Sequence[Group], num_tokens: int) -> bool:
    return all(num_tokens % group.block_size == 0 for group in groups if group.kind != STATE)
