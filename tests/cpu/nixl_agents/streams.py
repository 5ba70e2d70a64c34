"""A prompt that is read while it is computed, between two workers, in steps of a test."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.cpu.nixl_agents.harness import BLOCK_SIZE, HEAD_BYTES, NUM_HEADS, STRIDE_BYTES, load_of
from vllm_commext.nixl.requests import Chunk, Hold

CHUNKS = ((9, 4), (11, 2), (7, 15), (20, 3))
"""The prompt's blocks, chunk by chunk; its last one is filled by half."""
BLOCKS = tuple(itertools.chain(*CHUNKS))
NUM_TOKENS = BLOCK_SIZE * len(BLOCKS) - BLOCK_SIZE // 2
OWN_BLOCKS = (5, 1, 12, 8, 3, 21, 0, 17)
"""Where the decode worker wants them."""


class Prompt:
    """Nothing of it is in the prefill worker's cache before its step."""

    def __init__(self, make_engine: Callable[..., Any], **settings: Any) -> None:
        self.prefill = make_engine("p", seed=1, serve=True, stream_chunks=True)
        self.right = [row.copy() for row in self.prefill.memory]
        for row in self.prefill.memory:
            row[:] = 0
        self.decode = make_engine("d", seed=2, **{"stream_chunks": True, **settings})
        self.before = [row.copy() for row in self.decode.memory]
        self.begin(1)

    def begin(self, number: int) -> None:
        """The prompt of this number, whose row and slot are its own."""
        self.number, self.nonce = number, 77 * number
        self.prefill.tables.fences.nonces[number] = self.nonce
        self.prefill.publisher.launched([Chunk(number, self.nonce, (), 0, begins=True)])

    def compute(self, chunk: int) -> None:
        """The step of one chunk."""
        for row, right in zip(self.prefill.memory, self.right, strict=True):
            for begin in (block * STRIDE_BYTES for block in CHUNKS[chunk]):
                row[begin : begin + STRIDE_BYTES] = right[begin : begin + STRIDE_BYTES]
        end = min(2 * BLOCK_SIZE * (chunk + 1), NUM_TOKENS)
        told = Chunk(self.number, self.nonce, ((2 * chunk, CHUNKS[chunk]),), end)
        self.prefill.publisher.launched([told])

    def compute_all(self, first: int = 0) -> None:
        for chunk in range(first, len(CHUNKS)):
            self.compute(chunk)

    def preempt(self) -> None:
        """Its blocks go to others, which overwrite them."""
        self.nonce += 1000
        self.prefill.tables.fences.nonces[self.number] = self.nonce
        self.prefill.tables.progress.restart(self.number, self.nonce)
        for row in self.prefill.memory:
            row[:] = 255

    def finish(self, *, lease_seconds: float = 600.0) -> None:
        """It has ended; without a lease, it was aborted."""
        hold = Hold(f"p{self.number}", lease_seconds, self.number, self.nonce, self.number)
        self.prefill.thread.submit(hold)

    def wait_freed(self) -> None:
        self.prefill.wait(lambda: f"p{self.number}" in self.prefill.collect().sent)

    def load(self, name: str = "d", first: int = 0) -> None:
        """Begin to read it; its first blocks are here."""
        tag = 77 * self.number
        place = {"fence_slot": self.number, "fence_nonce": tag}
        place |= {"stream_row": self.number, "stream_tag": tag, "stream_regions": (0,)}
        remote = self.prefill.remote(f"p{self.number}", [], num_tokens=NUM_TOKENS, **place)
        load = load_of(name, remote, OWN_BLOCKS[first:], first)
        load.num_tokens = NUM_TOKENS
        self.decode.thread.submit(load)

    def wait(self, name: str = "d") -> str:
        """Until a load has ended; why it has failed, "" where it has not."""
        self.decode.wait(lambda: name in self.decode.collect().received)
        if name not in self.decode.outcomes.failed:
            return ""
        (reason,) = self.decode.recorded["failures"]
        return reason

    def has(self, begin: int, end: int) -> bool:
        """Whether its blocks in ``[begin, end)`` are at the decode worker, but for the empty half
        of the last one."""
        return all(
            np.array_equal(row[: len(theirs)], theirs)
            for row, theirs in _halves(self.decode.memory, self.right, begin, end)
        )

    def is_untouched_but(self, num_blocks: int) -> bool:
        """Whether nothing was written beyond its first blocks."""
        touched = {OWN_BLOCKS[position] for position in range(num_blocks)}
        return all(
            np.array_equal(one, other)
            for row, before in zip(self.decode.memory, self.before, strict=True)
            for block, (one, other) in enumerate(
                zip(row.reshape(-1, STRIDE_BYTES), before.reshape(-1, STRIDE_BYTES), strict=True)
            )
            if block not in touched
        )


def _halves(memory: Sequence[Any], source: Sequence[Any], begin: int, end: int) -> Any:
    """Head by head, what the blocks hold here and there."""
    for row, theirs in zip(memory, source, strict=True):
        for position, head in itertools.product(range(begin, end), range(NUM_HEADS)):
            tokens = min(BLOCK_SIZE, NUM_TOKENS - position * BLOCK_SIZE)
            num_bytes = HEAD_BYTES // BLOCK_SIZE * tokens
            own = OWN_BLOCKS[position] * STRIDE_BYTES + head * HEAD_BYTES
            other = BLOCKS[position] * STRIDE_BYTES + head * HEAD_BYTES
            yield row[own : own + HEAD_BYTES], theirs[other : other + num_bytes]
