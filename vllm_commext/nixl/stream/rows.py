"""How a prompt's progress stands in memory that peers read: a header and a list of block ids a row.

A header is three 64-bit words: the tag, which stays as long as a request has the row; the nonce of
its fence, which is replaced when the request is preempted; and the mark, the number of tokens whose
KV can be read.  The mark carries half of the nonce too, so that one word alone says of which nonce
it is, in whatever order the words are read.  Block ids are read in pieces of ``PIECE_IDS``.

Pure.
"""

from __future__ import annotations

import numpy as np

from vllm_commext.nixl.geometry.descriptors import Int32Array
from vllm_commext.nixl.geometry.plan import num_blocks_for

NUM_ROWS = 256
"""Prompts that one engine can stream at a time."""
NUM_CELLS = 64
"""Looks at rows that one worker can have under way."""
HEADER_WORDS = 8
"""Of 64 bits, the last five unused: a header fills a cache line."""
HEADER_BYTES = 24
PIECE_IDS = 64
PIECE_BYTES = 4 * PIECE_IDS
MAX_PIECES = 64
"""Read at one look; the rest comes with the next one."""
_TOKEN_BITS = 32
_TOKENS = (1 << _TOKEN_BITS) - 1


def num_pieces_for(num_blocks: int) -> int:
    """Pieces that hold so many block ids."""
    return num_blocks_for(num_blocks, PIECE_IDS)


def mark_of(nonce: int, num_tokens: int) -> int:
    """The mark that says that ``num_tokens`` tokens can be read under the nonce."""
    return (nonce & _TOKENS) << _TOKEN_BITS | num_tokens


def tokens_in(mark: int, nonce: int) -> int:
    """Tokens that a mark says can be read under the nonce; 0 where it is another nonce's."""
    return mark & _TOKENS if mark >> _TOKEN_BITS == nonce & _TOKENS else 0


def pieces(row: int, pieces_per_row: int, first: int, end: int) -> Int32Array:
    """Indices, in the list of all rows' pieces, of those that hold the block ids at the positions
    ``[first, end)`` of a row, at most ``MAX_PIECES``."""
    begin = first // PIECE_IDS
    stop = min(num_pieces_for(end), begin + MAX_PIECES)
    return np.arange(row * pieces_per_row + begin, row * pieces_per_row + stop, dtype=np.int32)


def next_chunk(done: int, ready: int, num_tokens: int, step: int) -> int:
    """Tokens that are read after the next chunk, ``done`` where there is none yet.

    Args:
        done: tokens that have been read.
        ready: tokens that can be read.
        num_tokens: tokens that are wanted.
        step: tokens in which chunks are counted: whole blocks on both sides.
    """
    if ready >= num_tokens:
        return num_tokens
    return max(done, ready // step * step)
