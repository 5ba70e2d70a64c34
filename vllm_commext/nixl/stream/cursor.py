"""The progress of a shard that is read while its prompt is computed, its next chunk, and the times
at which its row is polled: often around the time when the next chunk is expected, else seldom.

A chunk is expected after as long as the last one took, in proportion to its tokens."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.decode.transfers import ShardRead
from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.geometry.plan import Blocks, Pairs, num_blocks_for
from vllm_commext.nixl.stream.progress import (
    ENDED,
    MAX_PIECES,
    PIECE_IDS,
    Entries,
    Header,
    Ids,
    Region,
    ids_in,
    next_chunk,
    num_pieces_for,
    regions_at,
)
from vllm_commext.nixl.transport.posting import Posting, pause
from vllm_commext.nixl.wire.description import FENCES, STREAM_HEADERS, STREAM_PIECES

FINEST_SECONDS = 1e-3
"""Between two looks at one row, where a chunk is expected within ``FINE`` times as long."""
FINE = 100
LONGEST_SECONDS = 0.1  # between any two looks, so that an abort or a preemption is noticed
EARLY, LATE = 0.9, 1.5
"""Times the expected time: from when to when looks follow each other as fast as they may."""
FIRST = 12
"""Looks for the first chunk, of which nothing is known, are this shard of the time apart that has
passed."""


def wait_seconds(passed: float, expected: float | None) -> float:
    """Until the next look.

    Args:
        passed: since the last chunk was seen, or since the first look.
        expected: from one chunk to the next; None where nothing is known.
    """
    if expected is None:
        return min(max(passed / FIRST, FINEST_SECONDS), LONGEST_SECONDS)
    finest = max(expected / FINE, FINEST_SECONDS)
    if passed < EARLY * expected:
        wait = max((EARLY * expected - passed) / 2, finest)
    elif passed < LATE * expected:
        wait = finest
    else:
        wait = max(passed / FIRST, finest)
    return min(wait, LONGEST_SECONDS)


@dataclass
class PollSchedule:
    """The speed of one prompt, as its row has shown it.

    Attributes:
        since: when the last chunk was seen, or the first look.
        chunk_tokens: of the last chunk, 0 before there is one.
    """

    since: float
    num_tokens: int = 0
    chunk_tokens: int = 0
    chunk_seconds: float = 0.0

    def note(self, num_tokens: int, now: float) -> None:
        if num_tokens > self.num_tokens:
            self.chunk_tokens = num_tokens - self.num_tokens
            self.chunk_seconds = now - self.since
            self.num_tokens, self.since = num_tokens, now

    def next_tokens(self, num_tokens: int) -> int:
        return max(min(self.chunk_tokens, num_tokens - self.num_tokens), 1)

    def wait(self, num_tokens: int, now: float) -> float:
        expected = None
        if self.chunk_tokens:
            expected = self.chunk_seconds * self.next_tokens(num_tokens) / self.chunk_tokens
        return wait_seconds(now - self.since, expected)


class Wanted(NamedTuple):
    """Pieces of a group's region that are to be read: the first and how many."""

    group: int
    first: int
    num_pieces: int


@dataclass(eq=False)
class Look:
    """A row's header and block ids on their way into a cell; ``wanted``: which ids."""

    link: Link
    cell: int
    posting: Posting
    wanted: list[Wanted]
    is_wanted: bool = True


@dataclass(eq=False)
class Cursor:
    """The progress of a shard; times in seconds of ``time.perf_counter``.

    Attributes:
        first: tokens that this engine has already.
        target: the same after the chunk that is being read or is to be.
        ids: the peer's blocks as far as they are known, a group each, as its row has them.
        is_whole: the row has said that the blocks of the other groups are there, the *rest*.
        has_rest: they have been read, or there is no such group.
        candidate: another nonce that the last look has found.
        moved: when something was last new.
    """

    shard: ShardRead
    link: Link
    nonce: int
    regions: tuple[Region, ...]
    step: int
    first: int
    has_rest: bool
    done: int = 0
    target: int = 0
    ids: list[Ids] = field(default_factory=list)
    is_computed: bool = False
    is_whole: bool = False
    look: Look | None = None
    next_look: float = 0.0
    pairs: Pairs | None = None
    is_reading: bool = False
    has_read: bool = False
    candidate: int = ENDED
    num_restarts: int = 0
    num_refused: int = 0
    has_begun: bool = False
    moved: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._counts = self.has_rest
        self._begin()

    @property
    def num_read(self) -> int:
        """Tokens that are here and count though no more comes: none where a state or a window is
        read at the end alone."""
        return self.done if self._counts else 0

    def _begin(self) -> None:
        self.done = self.target = self.first
        self.ids: list[Ids] = [np.empty(0, dtype=np.uint32) for _ in self.groups]
        self.is_computed = self.is_whole = False
        self.schedule = PollSchedule(time.perf_counter())

    @property
    def groups(self) -> list[Group]:
        return self.link.plan.remote.groups

    @property
    def num_tokens(self) -> int:
        return min(self.shard.load.num_tokens, self.shard.remote.num_tokens)

    @property
    def takes_rest(self) -> bool:
        """True if the next chunk is the last one, with the blocks that do not stay."""
        return self.is_whole and not self.has_rest and self.target == self.num_tokens

    @property
    def has_more(self) -> bool:
        return self.target > self.done or self.takes_rest

    @property
    def is_over(self) -> bool:
        return self.done >= self.num_tokens and self.has_rest

    def start_again(self, nonce: int) -> None:
        self.nonce = nonce
        self._begin()
        self.num_restarts += 1
        self.num_refused, self.candidate = 0, ENDED

    def note_progress(self, header: Header) -> None:
        self.target = next_chunk(self.done, header.num_tokens, self.num_tokens, self.step)
        self.is_computed = header.num_tokens >= self.num_tokens
        self.is_whole = header.is_whole
        self.schedule.note(header.num_tokens, time.perf_counter())

    def note_read(self) -> None:
        self.has_rest = self.has_rest or self.takes_rest
        self.done, self.num_refused, self.moved = self.target, 0, time.perf_counter()

    @property
    def is_known(self) -> bool:
        return self.has_more and not self._unknown(self.target, takes_rest=self.takes_rest)

    def wanted(self) -> list[Wanted]:
        """Pieces with block ids that the next chunk needs and that are not known; where it is not
        known how far it goes, what it is likely to need; raises ProtocolError."""
        if self.has_more:
            return self._unknown(self.target, takes_rest=self.takes_rest)
        target = min(self.done + self.schedule.next_tokens(self.num_tokens), self.num_tokens)
        return self._unknown(target, takes_rest=self.is_computed)

    def _unknown(self, target: int, *, takes_rest: bool) -> list[Wanted]:
        found: list[Wanted] = []
        room = MAX_PIECES
        needed = self._needed(target, takes_rest=takes_rest)
        for number, (num_ids, known) in enumerate(zip(needed, self.ids, strict=True)):
            first = len(known) // PIECE_IDS
            count = min(num_pieces_for(num_ids) - first, room) if num_ids > len(known) else 0
            if count > 0:
                room -= count
                found.append(Wanted(number, first, count))
        return found

    def _needed(self, target: int, *, takes_rest: bool) -> Iterator[int]:
        for group, region, known in zip(self.groups, self.regions, self.ids, strict=True):
            needed = 0
            if group.kind == FULL:
                needed = num_blocks_for(target, group.block_size)
            elif takes_rest:
                needed = 1 + (int(known[0]) if len(known) else 0)
            if needed > region.num_pieces * PIECE_IDS:
                raise ProtocolError(
                    f"expected at most {region.num_pieces * PIECE_IDS} block ids of a group in the "
                    f"prefill engine's row, got {needed}"
                )
            yield needed

    def take(self, wanted: list[Wanted], arrived: Entries) -> None:
        """These pieces have arrived, one behind the other; what of them is of another nonce was not
        there yet."""
        for number, first, count in wanted:
            new, arrived = arrived[: count * PIECE_IDS], arrived[count * PIECE_IDS :]
            new, known = ids_in(new, self.nonce), self.ids[number]
            place = first * PIECE_IDS
            if place <= len(known) < place + len(new):  # else the prompt has begun again meanwhile
                self.ids[number] = np.concatenate([known[:place], new])

    def next_pairs(self) -> Pairs:
        """Plan the next chunk; raises ProtocolError."""
        load, plan = self.shard.load, self.link.plan
        own = [
            self._own(group, blocks)
            for group, blocks in zip(plan.local.groups, load.blocks, strict=True)
        ]
        theirs = [
            self._theirs(group, ids) for group, ids in zip(self.groups, self.ids, strict=True)
        ]
        return plan.pairs(
            own, theirs, num_tokens=self.target, num_remote_tokens=self.target, pause=pause
        )

    def _own(self, group: Group, blocks: Blocks) -> Blocks:
        end = num_blocks_for(self.target, group.block_size)
        if group.kind != FULL:
            return blocks if self.takes_rest else Blocks(end, [])
        begin = max(num_blocks_for(self.done, group.block_size), blocks.first)
        return Blocks(begin, blocks.block_ids[begin - blocks.first : end - blocks.first])

    def _theirs(self, group: Group, ids: Ids) -> list[int]:
        if group.kind == FULL:
            return ids[: num_blocks_for(self.target, group.block_size)].tolist()
        return ids[1 : 1 + int(ids[0])].tolist() if self.takes_rest else []


def cursor_of(shard: ShardRead, link: Link) -> Cursor:
    """A shard that begins to be read while its prompt is computed; raises ProtocolError."""
    remote, plan = shard.remote, link.plan
    if not {FENCES, STREAM_HEADERS, STREAM_PIECES} <= link.tables.keys():
        raise ProtocolError(
            "the request is to be read while it is computed, and one of the engines streams "
            "nothing: set stream_chunks in kv_connector_extra_config of both"
        )
    num_rows, num_slots = (link.tables[name].num_records for name in (STREAM_HEADERS, FENCES))
    if remote.stream_row >= num_rows or remote.fence_slot >= num_slots:
        raise ProtocolError(
            f"expected a row below {num_rows} and a fence below {num_slots}, got "
            f"{remote.stream_row} and {remote.fence_slot}"
        )
    regions = regions_at(remote.stream_regions, link.pieces_per_row)
    theirs, own = plan.remote.groups, plan.local.groups
    if len(regions) != len(theirs):
        raise ProtocolError(f"expected regions of {len(theirs)} groups, got {len(regions)}")
    has_rest = all(group.kind == FULL for group in (*theirs, *own))
    if not has_rest and shard.load.num_tokens != remote.num_tokens:
        raise ProtocolError(
            f"expected a state or a window after {shard.load.num_tokens} tokens, got that after "
            f"{remote.num_tokens}"
        )
    staying = [
        (group.block_size, blocks.first)
        for group, blocks in zip(own, shard.load.blocks, strict=True)
        if group.kind == FULL
    ]
    sizes = [group.block_size for group in (*own, *theirs) if group.kind == FULL]
    first = min((size * first for size, first in staying), default=shard.load.num_tokens)
    first = min(first, shard.load.num_tokens)
    return Cursor(
        shard, link.hold(), remote.fence_nonce, regions, math.lcm(*sizes), first, has_rest
    )
