"""The blocks that an engine has on offer: which block holds what, under which generation.

The engine's thread puts blocks in and takes them out; the side channel's thread looks them up.
"""

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_commext.nixl.reuse.generations import Generations


@dataclass(frozen=True)
class Run:
    """Blocks that hold the beginning of a prompt, by position, and the generation of each."""

    block_ids: list[int]
    generations: list[int]


class OfferTable:
    """Safe for threads.

    Args:
        tables: the generations of each worker, ``[num_blocks]`` uint64 each.  All hold the same;
            where they begin is drawn, so that no start of an engine repeats another's.
    """

    def __init__(self, tables: Sequence[Generations]) -> None:
        self._tables = tables
        self._lock = threading.Lock()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        first = np.uint64(secrets.randbits(63))
        for table in tables:
            table[:] = first

    def __len__(self) -> int:
        """Blocks on offer."""
        return len(self._hash_of)

    def offer(self, hashes: Iterable[bytes], block_ids: Iterable[int]) -> None:
        """These blocks hold what these hashes say, until ``drop``.  Of two blocks that hold the
        same, the one offered last is found: it is likely to be the last to go."""
        with self._lock:
            for one, block_id in zip(hashes, block_ids, strict=True):
                self._hash_of[block_id] = one
                self._block_of[one] = block_id

    def drop(self, block_id: int) -> None:
        """The block is about to get other bytes: whoever reads it meanwhile finds that out."""
        with self._lock:
            for table in self._tables:
                table[block_id] += np.uint64(1)
            one = self._hash_of.pop(block_id, None)
            if one is not None and self._block_of.get(one) == block_id:
                del self._block_of[one]

    def clear(self) -> None:
        """Nothing is on offer, nor was anything that is being read: another model's weights."""
        with self._lock:
            for table in self._tables:
                table += np.uint64(1)
            self._block_of.clear()
            self._hash_of.clear()

    def find(self, hashes: Iterable[bytes]) -> Run:
        """The blocks with these hashes, up to the first that is not on offer."""
        found = list[int]()
        with self._lock:
            for one in hashes:
                block_id = self._block_of.get(one)
                if block_id is None:
                    break
                found.append(block_id)
            generations = self._tables[0][found].tolist() if found else []
        return Run(found, generations)
