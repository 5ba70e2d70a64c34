"""One worker's memory for chunk streaming: rows that peers read."""

import threading
from dataclasses import dataclass

import numpy as np

from vllm_commext.nixl.requests import Listed
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
from vllm_commext.nixl.wire.tables import STREAM_HEADERS, STREAM_PIECES

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
