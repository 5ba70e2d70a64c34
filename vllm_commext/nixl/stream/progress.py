"""One worker's memory for chunk streaming: rows that peers read, and what a prefill worker writes
there once it has been computed.

A step's kernels are only launched when vLLM says that the step is done; an event that is recorded
behind them tells of their end. On a CPU the launch is the end.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.requests import Chunk, Hold, Listed, Restart
from vllm_commext.nixl.stream.rows import (
    HEADER_BYTES,
    HEADER_WORDS,
    MAX_PIECES,
    NUM_CELLS,
    PIECE_IDS,
    WHOLE,
    Entries,
    entries_of,
    is_whole,
    mark_of,
    num_rows_of,
    tokens_in,
)
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import STREAM_HEADERS, STREAM_PIECES

ENDED = 0
"""In the nonce's place: the request's blocks are free, or going to be."""


@dataclass(frozen=True)
class Header:
    """What a row's header said; ``num_tokens`` can be read under ``nonce``, and where it
    ``is_whole`` all that belongs to them."""

    tag: int
    nonce: int
    num_tokens: int
    is_whole: bool = False


def header_of(words: Entries) -> Header:
    """What a header's words say."""
    tag, nonce, mark = map(int, words[:3])
    return Header(tag, nonce, tokens_in(mark, nonce), is_whole(mark, nonce))


class ProgressTable:
    """Rows; safe for threads.

    Attributes:
        headers: ``[num_rows, HEADER_WORDS]`` uint64, see ``rows``.
        entries: ``[num_rows, pieces_per_row * PIECE_IDS]`` uint64, block ids.
        tables: the same, for peers; a cell for a header goes with ``MAX_PIECES`` cells for pieces.

    Args:
        pieces_per_row: what the longest prompt takes, see ``rows.regions_of``.
        num_rows: prompts that can be streamed at a time; by default as ``rows`` has it.
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
        """The row's request is preempted, and goes on from its first token under another nonce."""
        self._enter(row, nonce)

    def end(self, row: int) -> None:
        """The row's request is not to be read any more."""
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
        """The prompt has ended: what other groups need, too."""
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


class Event(Protocol):
    """What tells that work on a device has ended."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class Publisher:
    """Publishes one worker's chunks; safe for threads.

    Args:
        progress: the worker's rows.
        fences: its fences.
        is_on_device: the cache is not in host memory.
    """

    def __init__(self, progress: ProgressTable, fences: FenceTable, *, is_on_device: bool) -> None:
        self._progress = progress
        self._fences = fences
        self._is_on_device = is_on_device
        self._lock = threading.Lock()
        self._launched: deque[tuple[Event, Sequence[Chunk | Hold]]] = deque()

    def __len__(self) -> int:
        """Steps whose end is not known yet."""
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
        """They are launched."""
        self.prepare([chunk for chunk in chunks if chunk.begins], [])  # where vLLM did not say so
        self._publish_behind(chunks)

    def ended(self, holds: Sequence[Hold]) -> None:
        """Prompts have ended: what is known of their blocks since then is published behind their
        last chunks."""
        self._publish_behind([hold for hold in holds if hold.listed])

    def _publish_behind(self, told: Sequence[Chunk | Hold]) -> None:
        """Publish when all that has been launched so far has ended."""
        if not self._is_on_device:
            self._publish(told)
        elif told:
            event: Any = torch.Event()
            event.record()
            with self._lock:
                self._launched.append((event, told))

    def poll(self) -> None:
        """Publish what has been computed meanwhile."""
        with self._lock:
            while self._launched and self._launched[0][0].query():
                self._publish(self._launched.popleft()[1])

    def _publish(self, told: Sequence[Chunk | Hold]) -> None:
        for one in told:
            if isinstance(one, Chunk):
                self._progress.publish(one.row, one.nonce, one.listed, one.num_tokens)
            else:
                self._progress.complete(one.stream_row, one.fence_nonce, one.listed)
