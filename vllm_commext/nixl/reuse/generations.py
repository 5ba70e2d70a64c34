"""Generations: a number a block, which changes before the block's bytes do.

They stand in memory that a worker shares with its scheduler's process and has registered with NIXL.
The scheduler side raises a block's generation when vLLM's block pool hands the block out again,
which is before any worker is told to write into it; a peer reads the generations after the blocks.
Where it finds those that it was told with the blocks' ids, it has read what was on offer:

    scheduler: raise (R) -> step sent -> worker: overwrite (W)
    peer:      blocks read to the end (B) -> generation read (G)

R comes before W, since W is caused by a message that is sent after R; B ends before G begins.  If G
does not see R, G comes before R, so B before W.
"""

import numpy as np
import numpy.typing as npt

from vllm_commext.anonymous_memory import AnonymousMemory, Offer
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import GENERATIONS

Generations = npt.NDArray[np.uint64]
MIN_CELLS = 4096
"""Generations that one worker can read at a time, or those of its longest prompt."""
_GENERATION_BYTES = 8


class GenerationTable:
    """One worker's generations.

    Attributes:
        generations: ``[num_blocks]`` uint64; written by the scheduler side alone.
        table: the same, for peers.
        offer: how the scheduler side finds them.
    """

    def __init__(self, num_blocks: int, num_cells: int) -> None:
        self._memory = AnonymousMemory.create("commext-generations", _GENERATION_BYTES * num_blocks)
        self.offer = self._memory.offer
        self.generations: Generations = np.frombuffer(self._memory.map, dtype=np.uint64)
        self.table = Table(GENERATIONS, self.generations, num_cells)

    def close(self) -> None:
        """Let go of the memory's name; the scheduler side has opened it, or never will."""
        self._memory.forget_file()


def open_generations(offer: Offer) -> Generations:
    """A worker's generations, in the scheduler's process.

    Raises:
        UnsupportedError: the worker runs on another host, or as another user.
    """
    memory = AnonymousMemory.open(offer)
    memory.forget_file()
    return np.frombuffer(memory.map, dtype=np.uint64)
