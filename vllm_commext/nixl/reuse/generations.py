"""Generations: a number a block, which changes before the block's bytes do.

They stand in memory that a worker shares with its scheduler's process and has registered with NIXL.
The scheduler side raises a block's generation when vLLM's block pool hands the block out again,
which is before any worker is told to write into it; a peer reads the generations after the blocks.
Where it finds those that it was told with the blocks' ids, it has read what was on offer:

    scheduler: raise (R) -> step sent -> worker: overwrite (W)
    peer:      blocks read to the end (B) -> generation read (G)

R comes before W, since W is caused by a message that is sent after R; B ends before G begins.  If G
does not see R, G comes before R, so B before W.

A worker's memory has no name in any file system: the scheduler opens it through ``/proc`` of the
worker, so nothing is left behind by a process that ends.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import UnsupportedError

Generations = npt.NDArray[np.uint64]
TOKEN_BYTES = 16
MIN_CELLS = 4096
"""Generations that one worker can read at a time, or those of its longest prompt."""
_HEADER_BYTES = 64
_GENERATION_BYTES = 8


@dataclass(frozen=True)
class SharedGenerations:
    """Where a worker's generations are: a path that a process of the same host and user can open,
    the bytes that stand at its beginning, and the number of blocks."""

    path: str
    token: bytes
    num_blocks: int


class GenerationTable:
    """One worker's generations, which peers read, and cells, into which it reads those of peers.

    Attributes:
        generations: ``[num_blocks]`` uint64; written by the scheduler side alone.
        cells: ``[num_cells]`` uint64.
        shared: how the scheduler side finds them.
    """

    def __init__(self, num_blocks: int, num_cells: int) -> None:
        self._fd = os.memfd_create("commext-generations", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _num_bytes(num_blocks))
        memory = mmap.mmap(self._fd, _num_bytes(num_blocks))
        token = secrets.token_bytes(TOKEN_BYTES)
        memory[:TOKEN_BYTES] = token
        self.shared = SharedGenerations(f"/proc/{os.getpid()}/fd/{self._fd}", token, num_blocks)
        self.generations = _array(memory, num_blocks)
        self.cells: Generations = np.zeros(num_cells, dtype=np.uint64)
        self._free_cells = list(range(num_cells))

    def described(self) -> dict[str, int]:
        """What a worker's description says of it, by field of ``WorkerDescription``."""
        return {
            "generations": self.generations.ctypes.data,
            "num_generations": len(self.generations),
        }

    def take_cells(self, count: int) -> list[int] | None:
        """Cells to read so many generations into, in rising order; None while too few are free."""
        if count > len(self._free_cells):
            return None
        taken = sorted(self._free_cells[-count:])
        del self._free_cells[-count:]
        return taken

    def have(self, cells: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether these generations have arrived in these cells."""
        return np.array_equal(self.cells[cells], np.array(generations, dtype=np.uint64))

    def give_back_cells(self, cells: Sequence[int]) -> None:
        """Cells are free again: nothing is read into them any more."""
        self._free_cells += cells

    def close(self) -> None:
        """Let go of the memory's name; the scheduler side has opened it, or never will."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_shared(shared: SharedGenerations) -> Generations:
    """A worker's generations, in the scheduler's process.

    Raises:
        UnsupportedError: the worker runs on another host, or as another user.
    """
    num_bytes = _num_bytes(shared.num_blocks)
    try:
        fd = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise UnsupportedError(_elsewhere(shared, str(error))) from error
    if memory[:TOKEN_BYTES] != shared.token:
        raise UnsupportedError(_elsewhere(shared, "another file is there"))
    return _array(memory, shared.num_blocks)


def _elsewhere(shared: SharedGenerations, why: str) -> str:
    return (
        f"a worker's memory {shared.path} cannot be opened by the scheduler ({why}): expected all "
        "workers of the engine on one host, in one container, under one user"
    )


def _num_bytes(num_blocks: int) -> int:
    return _HEADER_BYTES + _GENERATION_BYTES * num_blocks


def _array(memory: mmap.mmap, num_blocks: int) -> Generations:
    return np.frombuffer(memory, dtype=np.uint64, count=num_blocks, offset=_HEADER_BYTES)
