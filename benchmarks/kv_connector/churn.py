"""Block lists as they come about in service: vLLM's ``BlockPool`` on both sides, requests that come
and go.

The prefill engine keeps ``NUM_OFFERED`` finished prompts, of which the decode engine takes one at
random whenever it has room; then their blocks are freed there.  In the decode engine all running
requests grow by one block a step, until each has its answer, and its blocks are freed as vLLM does,
the last one first.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

MEAN_PROMPT_BLOCKS, MAX_PROMPT_BLOCKS = 430, 3000
MEAN_ANSWER_BLOCKS, MAX_ANSWER_BLOCKS = 32, 256
NUM_OFFERED = 16
BLOCK_TOKENS = 16

_hashes = itertools.count()


class Pool:
    """A pool of ``num_blocks`` blocks; with ``caching``, full blocks stay known by their hash, and
    then vLLM uses the blocks that were freed first before others, else those freed last."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self._caching = caching
        self._pool = BlockPool(num_blocks, caching, BLOCK_TOKENS)

    @property
    def num_free(self) -> int:
        return self._pool.get_num_free_blocks()

    def take(self, count: int) -> list[Any]:
        return self._pool.get_new_blocks(count)

    def fill(self, blocks: list[Any], first: int, end: int) -> None:
        """The blocks ``[first, end)`` of a request are full."""
        if self._caching and first < end:
            names = [next(_hashes).to_bytes(32, "big") for _ in range(first, end)]
            request: Any = SimpleNamespace(block_hashes=[b""] * first + names)
            self._pool.cache_full_blocks(request, blocks, first, end, BLOCK_TOKENS, 0)

    def free(self, blocks: list[Any]) -> None:
        self._pool.free_blocks(reversed(blocks))


@dataclass
class _Running:
    blocks: list[Any]
    num_left: int


def length(dice: random.Random, mean: int, longest: int) -> int:
    """Blocks of a prompt or an answer, exponentially distributed."""
    return min(longest, 1 + int(dice.expovariate(1 / mean)))


class Service:
    """Both engines."""

    def __init__(self, num_blocks: int, seed: int, *, caching: bool) -> None:
        self._dice = random.Random(seed)
        self._prefill = Pool(num_blocks, caching=caching)
        self._decode = Pool(num_blocks, caching=caching)
        self._offered = [self._prompt() for _ in range(NUM_OFFERED)]
        self._running: list[_Running] = []

    def requests(self) -> Iterator[tuple[list[int], list[int]]]:
        """Block ids (decode, prefill) of one request after the other."""
        while True:
            place = self._dice.randrange(NUM_OFFERED)
            if self._decode.num_free < len(self._offered[place]) + 2 * len(self._running):
                self._step()
                continue
            remote, self._offered[place] = self._offered[place], []
            local = self._admit(len(remote))
            yield [one.block_id for one in local], [one.block_id for one in remote]
            self._prefill.free(remote)
            self._offered[place] = self._prompt()

    def _prompt(self) -> list[Any]:
        count = length(self._dice, MEAN_PROMPT_BLOCKS, MAX_PROMPT_BLOCKS)
        blocks = self._prefill.take(count)
        self._prefill.fill(blocks, 0, count - 1)
        return blocks

    def _admit(self, count: int) -> list[Any]:
        blocks = self._decode.take(count)
        self._decode.fill(blocks, 0, count - 1)
        answer = length(self._dice, MEAN_ANSWER_BLOCKS, MAX_ANSWER_BLOCKS)
        self._running.append(_Running(list(blocks), answer))
        return blocks

    def _step(self) -> None:
        for one in self._running:
            one.num_left -= 1
            if one.num_left < 0:
                self._decode.free(one.blocks)
                continue
            one.blocks += self._decode.take(1)
            self._decode.fill(one.blocks, len(one.blocks) - 2, len(one.blocks) - 1)
        self._running = [one for one in self._running if one.num_left >= 0]
