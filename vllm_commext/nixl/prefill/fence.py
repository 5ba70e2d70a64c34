"""Fences: how a decode engine proves that what it read was still the request's.

A finished prefill gets a slot in its worker's table of 64-bit nonces, which is replaced *before*
the blocks are reported as free and read after them (docs/failures.md).
Blocks without a lease have generations instead, see ``reuse``.

The nonces of a slot follow from a key that is drawn at every start of the engine: the workers have
them in place before the request has finished, and who has seen some cannot tell a further one.
"""

import hashlib
import secrets
import struct
from collections import deque

import numpy as np
import numpy.typing as npt

from vllm_commext.anonymous_memory import AnonymousMemory, Offer
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import FENCES, GENERATIONS

NUM_SLOTS = 65536  # finished prefills that one engine can hold at a time
NUM_CELLS = 1024  # fences that one worker can read at a time
NONCE_BYTES = 8
KEY_BYTES = 32

Nonces = npt.NDArray[np.uint64]


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def first_nonces(key: bytes, num_slots: int = NUM_SLOTS) -> Nonces:
    """``[num_slots]`` uint64: the nonce in each slot at first."""
    stream = hashlib.shake_256(key).digest(NONCE_BYTES * num_slots)
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def next_nonce(key: bytes, slot: int, nonce: int) -> int:
    place = struct.pack("<QQ", slot, nonce)
    return int.from_bytes(
        hashlib.blake2b(place, key=key, digest_size=NONCE_BYTES).digest(), "little"
    )


class FenceSlots:
    """The scheduler side's slots; the key is that of the workers' tables."""

    def __init__(self, key: bytes, num_slots: int = NUM_SLOTS) -> None:
        self._key = key
        self._nonces = first_nonces(key, num_slots)
        self._free = deque(range(num_slots))

    def take(self) -> tuple[int, int] | None:
        if not self._free:
            return None
        slot = self._free.popleft()
        return slot, self.nonce_in(slot)

    def nonce_in(self, slot: int) -> int:
        return int(self._nonces[slot])

    def renew(self, slot: int) -> int:
        self._nonces[slot] = nonce = next_nonce(self._key, slot, self.nonce_in(slot))
        return nonce

    def give_back(self, slot: int) -> None:
        self.renew(slot)
        self._free.append(slot)


class FenceTable:
    """One worker's nonces: ``[NUM_SLOTS]`` uint64, zeros until ``arm``."""

    def __init__(self) -> None:
        self.nonces = np.zeros(NUM_SLOTS, dtype=np.uint64)
        self.table = Table(FENCES, self.nonces, NUM_CELLS)
        self._key = b""

    def arm(self, key: bytes) -> None:
        """Put the first nonces in place, once, before any request of this engine has finished."""
        self._key = key
        self.nonces[:] = first_nonces(key)

    def end(self, slot: int, nonce: int) -> int:
        """A request's blocks are about to be freed; the nonce that stands there now."""
        self.nonces[slot] = new = next_nonce(self._key, slot, nonce)
        return new


Generations = npt.NDArray[np.uint64]
MIN_CELLS = 4096  # generations that one worker can read at a time, or those of its longest prompt
_GENERATION_BYTES = 8


class GenerationTable:
    """One worker's generations.

    Attributes:
        generations: ``[num_blocks]`` uint64; written by the scheduler side alone.
        table: the same, for peers.
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
    """A worker's generations, in the scheduler's process; raises UnsupportedError."""
    memory = AnonymousMemory.open(offer)
    memory.forget_file()
    return np.frombuffer(memory.map, dtype=np.uint64)
