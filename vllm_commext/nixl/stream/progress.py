"""A prompt's progress in memory that peers read, a header and a list of block ids per row, and the
prefill worker's writes to it.

docs/design/chunk_streaming.md describes both. Ids are read in pieces of ``PIECE_IDS``, each beside
half of the nonce in one 64-bit word, its entry: one word alone says of which nonce it is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.layout import FULL, STATE, Group, Int32Array
from vllm_commext.nixl.geometry.plan import num_blocks_for
from vllm_commext.nixl.prefill.fence import FenceTable, GenerationTable
from vllm_commext.nixl.requests import Chunk, Hold, Listed, Restart
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import STREAM_HEADERS, STREAM_PIECES

NUM_ROWS = 256  # prompts that one engine can stream at a time, at most
MIN_ROWS = 16
MAX_TABLE_BYTES = 64 << 20
"""Limit of block ids in one worker: engines of very long prompts have fewer rows."""
NUM_CELLS = 64  # looks at rows that one worker can have under way
HEADER_WORDS = 8  # words of 64 bits, the last five unused: a header fills a cache line
HEADER_BYTES = 24
PIECE_IDS = 64
PIECE_BYTES = 8 * PIECE_IDS
MAX_PIECES = 64  # read at one look; the rest comes with the next one
Ids = npt.NDArray[np.uint32]
Entries = npt.NDArray[np.uint64]

_TOKEN_BITS = 32
_HALF = (1 << _TOKEN_BITS) - 1
WHOLE = 1 << 31  # in a mark: what other groups than those by position need is there, too
_TOKENS = WHOLE - 1


class Region(NamedTuple):
    """A group's part of a row, in pieces."""

    first: int
    num_pieces: int

    @property
    def place(self) -> int:
        return self.first * PIECE_IDS


def num_rows_of(pieces_per_row: int) -> int:
    fitting = MAX_TABLE_BYTES // (PIECE_BYTES * max(pieces_per_row, 1))
    return min(max(fitting, MIN_ROWS), NUM_ROWS)


def regions_of(groups: Sequence[Group], max_tokens: int) -> tuple[Region, ...]:
    sizes = [_num_pieces(group, max_tokens) for group in groups]
    firsts = accumulate(sizes, initial=0)
    return tuple(Region(first, size) for first, size in zip(firsts, sizes, strict=False))


def _num_pieces(group: Group, max_tokens: int) -> int:
    if group.kind == STATE:
        return 1
    count = 0 if group.kind == FULL else 1
    return num_pieces_for(count + num_blocks_for(max_tokens, group.block_size))


def regions_at(firsts: Sequence[int], pieces_per_row: int) -> tuple[Region, ...]:
    """Regions of a peer that tells their begins; raises ProtocolError."""
    edges = [*firsts, pieces_per_row]
    if edges[0] != 0 or any(begin >= end for begin, end in pairwise(edges)):
        raise ProtocolError(
            f"expected regions one behind the other in {pieces_per_row} pieces, got {[*firsts]}"
        )
    return tuple(Region(begin, end - begin) for begin, end in pairwise(edges))


def num_pieces_for(num_blocks: int) -> int:
    return num_blocks_for(num_blocks, PIECE_IDS)


def mark_of(nonce: int, num_tokens: int) -> int:
    return (nonce & _HALF) << _TOKEN_BITS | num_tokens


def tokens_in(mark: int, nonce: int) -> int:
    return mark & _TOKENS if mark >> _TOKEN_BITS == nonce & _HALF else 0


def is_whole(mark: int, nonce: int) -> bool:
    return bool(mark & WHOLE) and mark >> _TOKEN_BITS == nonce & _HALF


def entries_of(nonce: int, block_ids: Sequence[int]) -> Entries:
    half = np.uint64((nonce & _HALF) << _TOKEN_BITS)
    return np.array(block_ids, dtype=np.uint64) | half


def ids_in(entries: Entries, nonce: int) -> Ids:
    """The block ids before the first entry that is not of the nonce."""
    others = np.flatnonzero(entries >> np.uint64(_TOKEN_BITS) != np.uint64(nonce & _HALF))
    return entries[: others[0] if len(others) else len(entries)].astype(np.uint32)


def pieces(row: int, pieces_per_row: int, first: int, num_pieces: int) -> Int32Array:
    begin = row * pieces_per_row + first
    return np.arange(begin, begin + num_pieces, dtype=np.int32)


def next_chunk(done: int, ready: int, num_tokens: int, step: int) -> int:
    """Tokens that are read after the next chunk, ``done`` if there is none yet; a ``step`` is whole
    blocks on both sides."""
    if ready >= num_tokens:
        return num_tokens
    return max(done, ready // step * step)


ENDED = 0  # in the nonce's place: the request's blocks are free, or going to be


@dataclass(frozen=True)
class Header:
    """A row's header: ``num_tokens`` can be read under ``nonce``; if ``is_whole``, all theirs."""

    tag: int
    nonce: int
    num_tokens: int
    is_whole: bool = False


def header_of(words: Entries) -> Header:
    tag, nonce, mark = map(int, words[:3])
    return Header(tag, nonce, tokens_in(mark, nonce), is_whole(mark, nonce))


class ProgressTable:
    """Rows; safe for threads.

    Attributes:
        headers: ``[num_rows, HEADER_WORDS]`` uint64, see the top.
        entries: ``[num_rows, pieces_per_row * PIECE_IDS]`` uint64, block ids.
        tables: the same, for peers; a cell for a header goes with ``MAX_PIECES`` cells for pieces.
    """

    def __init__(self, pieces_per_row: int, num_rows: int | None = None) -> None:
        num_rows = num_rows or num_rows_of(pieces_per_row)
        self.headers = np.zeros((num_rows, HEADER_WORDS), dtype=np.uint64)
        self.entries = np.zeros((num_rows, pieces_per_row * PIECE_IDS), dtype=np.uint64)
        pieces = self.entries.reshape(-1, PIECE_IDS)
        self.tables = (
            Table(STREAM_HEADERS, self.headers, NUM_CELLS, HEADER_BYTES),
            Table(STREAM_PIECES, pieces, NUM_CELLS * MAX_PIECES),
        )
        self._lock = threading.Lock()

    def begin(self, row: int, nonce: int) -> None:
        """A request gets a row: its tag is its first nonce.  Safe to repeat."""
        if int(self.headers[row, 0]) != nonce:
            self._enter(row, nonce, tag=nonce)

    def restart(self, row: int, nonce: int) -> None:
        self._enter(row, nonce)

    def end(self, row: int) -> None:
        self._enter(row, ENDED)

    def _enter(self, row: int, nonce: int, tag: int | None = None) -> None:
        with self._lock:
            self.headers[row, 2] = mark_of(nonce, 0)
            if tag is not None:
                self.headers[row, 0] = tag
        with self._lock:  # what was stored under the lock before is seen before
            self.headers[row, 1] = nonce

    def publish(self, row: int, nonce: int, listed: Listed, num_tokens: int) -> None:
        """A chunk is computed: its blocks' ids, then how many tokens there are now.  Nothing where
        the row's nonce is another one by now."""
        if self._list(row, nonce, listed):
            with self._lock:
                if int(self.headers[row, 1]) == nonce:
                    self.headers[row, 2] = mark_of(nonce, num_tokens)

    def complete(self, row: int, nonce: int, listed: Listed) -> None:
        if self._list(row, nonce, listed):
            with self._lock:
                if int(self.headers[row, 1]) == nonce:
                    self.headers[row, 2] = int(self.headers[row, 2]) | WHOLE

    def _list(self, row: int, nonce: int, listed: Listed) -> bool:
        with self._lock:
            if int(self.headers[row, 1]) != nonce:
                return False
            for place, block_ids in listed:
                self.entries[row, place : place + len(block_ids)] = entries_of(nonce, block_ids)
        return True


class Publisher:
    """Publishes one worker's chunks; safe for threads."""

    def __init__(self, progress: ProgressTable, fences: FenceTable, *, is_on_device: bool) -> None:
        self._progress = progress
        self._fences = fences
        self._is_on_device = is_on_device
        self._lock = threading.Lock()
        self._launched: deque[tuple[torch.Event, Sequence[Chunk | Hold]]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def prepare(self, chunks: list[Chunk], restarts: list[Restart]) -> None:
        """A step's kernels are going to be launched.  Of prompts that were preempted the fence is
        replaced first, so that no reader relies on what it reads from now on."""
        for one in restarts:
            self._progress.restart(one.row, self._fences.end(one.slot, one.nonce))
        for chunk in chunks:
            if chunk.begins:
                self._progress.begin(chunk.row, chunk.nonce)

    def launched(self, chunks: list[Chunk]) -> None:
        self.prepare([chunk for chunk in chunks if chunk.begins], [])  # where vLLM did not say so
        self._publish_behind(chunks)

    def ended(self, holds: Sequence[Hold]) -> None:
        self._publish_behind([hold for hold in holds if hold.listed])

    def _publish_behind(self, told: Sequence[Chunk | Hold]) -> None:
        if not self._is_on_device:
            self._publish(told)
        elif told:
            event = torch.Event()
            event.record()
            with self._lock:
                self._launched.append((event, told))

    def poll(self) -> None:
        with self._lock:
            while self._launched and self._launched[0][0].query():
                self._publish(self._launched.popleft()[1])

    def _publish(self, told: Sequence[Chunk | Hold]) -> None:
        for one in told:
            if isinstance(one, Chunk):
                self._progress.publish(one.row, one.nonce, one.listed, one.num_tokens)
            else:
                self._progress.complete(one.stream_row, one.fence_nonce, one.listed)


class WorkerTables:
    """``progress`` is None without streaming, ``generations`` without reuse."""

    def __init__(
        self, progress: ProgressTable | None = None, generations: GenerationTable | None = None
    ) -> None:
        self.fences = FenceTable()
        self.progress = progress
        self.generations = generations
        tables = [self.fences.table]
        tables += progress.tables if progress is not None else ()
        tables += [generations.table] if generations is not None else []
        self.by_name = {table.name: table for table in tables}

    def register(self, agent: NixlAgent) -> None:
        for table in self.by_name.values():
            table.register(agent)

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        return {name: table.place for name, table in self.by_name.items()}

    def end(self, hold: Hold) -> None:
        if hold.fence_slot >= 0:
            self.fences.end(hold.fence_slot, hold.fence_nonce)
        if hold.stream_row >= 0 and self.progress is not None:
            self.progress.end(hold.stream_row)
