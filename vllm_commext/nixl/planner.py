"""The planner: from two workers' cache layouts to the descriptor lists of both sides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_commext.errors import ProtocolError, UnsupportedError
from vllm_commext.nixl.descriptors import UInt64Array
from vllm_commext.nixl.lanes import Grid, Lanes, lanes_between
from vllm_commext.nixl.layout import WINDOW, CacheLayout, Family
from vllm_commext.nixl.plan import Int64Array, ReadPlan, Section

MAX_DESCRIPTORS = (1 << 31) - 1


def plan_read(
    local: CacheLayout, remote: CacheLayout, *, local_device: int, remote_device: int
) -> ReadPlan:
    """Plan how the local worker reads from the remote one.

    Raises:
        ProtocolError: the two have different layers.
        UnsupportedError: one side's bytes cannot be placed in the other's; says why.
    """
    sections: list[Section] = []
    own_rows: list[UInt64Array] = []
    their_rows: list[UInt64Array] = []
    offsets = [0, 0]
    for family, other, own_bases, their_bases in _matched(local, remote):
        what = f"layer {family.names[0]}"
        _check_group(local, remote, family, other, what)
        lanes = lanes_between(family.geometry, other.geometry, local.rank, remote.rank, what)
        if lanes is None:
            continue
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
            raise UnsupportedError(
                f"{what}: {max(offsets)} descriptors are needed, expected at most "
                f"{MAX_DESCRIPTORS}: give both engines the same --block-size and KV cache layout"
            )
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


def _matched(
    local: CacheLayout, remote: CacheLayout
) -> Iterator[tuple[Family, Family, Int64Array, Int64Array]]:
    """Families of both sides that have layers in common, and where these layers begin."""
    if [one.names for one in local.families] == [one.names for one in remote.families]:
        for own, theirs in zip(local.families, remote.families, strict=True):
            yield own, theirs, _addresses(own), _addresses(theirs)
        return
    place = {
        name: (number, index)
        for number, family in enumerate(remote.families)
        for index, name in enumerate(family.names)
    }
    _check_names({name for family in local.families for name in family.names}, set(place))
    for own in local.families:
        found = [place[name] for name in own.names]
        for number in sorted({number for number, _ in found}):
            theirs = remote.families[number]
            here = [index for index, (other, _) in enumerate(found) if other == number]
            there = [index for other, index in found if other == number]
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
    """A strided descriptor for each lane and each cell of a row."""
    cells = np.arange(grid.cells_per_row, dtype=np.int64) * grid.cell_stride
    rows = np.empty((len(addresses), grid.cells_per_row, 5), dtype=np.uint64)
    rows[:, :, 0] = addresses[:, None] + cells[None, :]
    rows[:, :, 1] = lengths[:, None]
    rows[:, :, 2:] = (device_id, grid.row_stride, grid.num_rows)
    return rows.reshape(-1, 5)
