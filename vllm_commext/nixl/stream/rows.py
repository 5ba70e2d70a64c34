"""How a prompt's progress stands in memory that peers read: a header and a list of block ids a row.

A header is three 64-bit words: the tag, which stays as long as a request has the row; the nonce of
its fence, which is replaced when the request is preempted; and the mark, the number of tokens whose
KV can be read.  The mark carries half of the nonce too, so that one word alone says of which nonce
it is, in whatever order the words are read.

The list of block ids is divided into regions, one for each group of the cache, which begin with
whole pieces; ids are read in pieces of ``PIECE_IDS``.  Each has half of the nonce beside it in one
64-bit word, its entry, so that ids can be read together with the header: what is not of the nonce
was not there yet.  Blocks of a group that all stay until the
prompt is computed are listed by position, chunk by chunk.  What other groups need, the blocks of a
window or of a state, is known at the end alone: their regions then get the number of these blocks
and the blocks, and a bit of the mark says so.

Pure.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.descriptors import Int32Array
from vllm_commext.nixl.geometry.layout import FULL, STATE, Group
from vllm_commext.nixl.geometry.plan import num_blocks_for

NUM_ROWS = 256
"""Prompts that one engine can stream at a time, at most."""
MIN_ROWS = 16
MAX_TABLE_BYTES = 64 << 20
"""Of block ids in one worker: engines of very long prompts have fewer rows."""
NUM_CELLS = 64
"""Looks at rows that one worker can have under way."""
HEADER_WORDS = 8
"""Of 64 bits, the last five unused: a header fills a cache line."""
HEADER_BYTES = 24
PIECE_IDS = 64
PIECE_BYTES = 8 * PIECE_IDS
MAX_PIECES = 64
"""Read at one look; the rest comes with the next one."""
Ids = npt.NDArray[np.uint32]
Entries = npt.NDArray[np.uint64]

_TOKEN_BITS = 32
_HALF = (1 << _TOKEN_BITS) - 1
WHOLE = 1 << 31
"""In a mark: what other groups than those by position need is there, too."""
_TOKENS = WHOLE - 1


class Region(NamedTuple):
    """A group's part of a row, in pieces."""

    first: int
    num_pieces: int

    @property
    def place(self) -> int:
        """Of its first id in the row."""
        return self.first * PIECE_IDS


def num_rows_of(pieces_per_row: int) -> int:
    """Rows of a progress table whose rows have so many pieces."""
    fitting = MAX_TABLE_BYTES // (PIECE_BYTES * max(pieces_per_row, 1))
    return min(max(fitting, MIN_ROWS), NUM_ROWS)


def regions_of(groups: Sequence[Group], max_tokens: int) -> tuple[Region, ...]:
    """Regions that hold the blocks of prompts of up to so many tokens."""
    sizes = [_num_pieces(group, max_tokens) for group in groups]
    firsts = accumulate(sizes, initial=0)
    return tuple(Region(first, size) for first, size in zip(firsts, sizes, strict=False))


def _num_pieces(group: Group, max_tokens: int) -> int:
    if group.kind == STATE:
        return 1
    count = 0 if group.kind == FULL else 1
    return num_pieces_for(count + num_blocks_for(max_tokens, group.block_size))


def regions_at(firsts: Sequence[int], pieces_per_row: int) -> tuple[Region, ...]:
    """The same of a peer that says where each begins.

    Raises:
        ProtocolError: they do not lie one behind the other in a row.
    """
    edges = [*firsts, pieces_per_row]
    if edges[0] != 0 or any(begin >= end for begin, end in pairwise(edges)):
        raise ProtocolError(
            f"expected regions one behind the other in {pieces_per_row} pieces, got {[*firsts]}"
        )
    return tuple(Region(begin, end - begin) for begin, end in pairwise(edges))


def num_pieces_for(num_blocks: int) -> int:
    """Pieces that hold so many block ids."""
    return num_blocks_for(num_blocks, PIECE_IDS)


def mark_of(nonce: int, num_tokens: int) -> int:
    """The mark that says that ``num_tokens`` tokens can be read under the nonce."""
    return (nonce & _HALF) << _TOKEN_BITS | num_tokens


def tokens_in(mark: int, nonce: int) -> int:
    """Tokens that a mark says can be read under the nonce; 0 where it is another nonce's."""
    return mark & _TOKENS if mark >> _TOKEN_BITS == nonce & _HALF else 0


def is_whole(mark: int, nonce: int) -> bool:
    """Whether a mark says that all groups' blocks can be read under the nonce."""
    return bool(mark & WHOLE) and mark >> _TOKEN_BITS == nonce & _HALF


def entries_of(nonce: int, block_ids: Sequence[int]) -> Entries:
    """Block ids as a row holds them under a nonce."""
    half = np.uint64((nonce & _HALF) << _TOKEN_BITS)
    return np.array(block_ids, dtype=np.uint64) | half


def ids_in(entries: Entries, nonce: int) -> Ids:
    """The block ids before the first entry that is not of the nonce."""
    others = np.flatnonzero(entries >> np.uint64(_TOKEN_BITS) != np.uint64(nonce & _HALF))
    return entries[: others[0] if len(others) else len(entries)].astype(np.uint32)


def pieces(row: int, pieces_per_row: int, first: int, num_pieces: int) -> Int32Array:
    """Indices, in the list of all rows' pieces, of some of a row's."""
    begin = row * pieces_per_row + first
    return np.arange(begin, begin + num_pieces, dtype=np.int32)


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
