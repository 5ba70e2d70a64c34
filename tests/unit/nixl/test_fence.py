"""Fences: a reader that relies on a nonce never relies on blocks that were freed."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from vllm_commext.nixl.prefill.fence import (
    KEY_BYTES,
    FenceSlots,
    FenceTable,
    first_nonces,
    new_key,
    next_nonce,
)

KEY = bytes(range(KEY_BYTES))


def test_slots_run_out_and_come_back_with_the_next_nonce() -> None:
    slots = FenceSlots(KEY, num_slots=2)
    first, second = map(int, first_nonces(KEY, 2))
    assert [slots.take() for _ in range(3)] == [(0, first), (1, second), None]
    slots.give_back(0)
    assert slots.take() == (0, next_nonce(KEY, 0, first))
    assert slots.take() is None


def test_nonces_differ_between_slots_uses_and_starts() -> None:
    """64 bits a nonce: two of these would be equal once in 300 million runs."""
    seen: set[int] = set()
    for key in (new_key(), new_key()):
        nonces = first_nonces(key, 1000)
        for _ in range(20):
            seen |= set(map(int, nonces))
            following = [next_nonce(key, slot, int(nonce)) for slot, nonce in enumerate(nonces)]
            nonces = np.array(following, dtype=np.uint64)
    assert len(seen) == 2 * 20 * 1000


@pytest.mark.parametrize("change", [0, 1, KEY_BYTES - 1])
def test_every_byte_of_the_key_counts(change: int) -> None:
    other = bytearray(KEY)
    other[change] ^= 1
    assert not (first_nonces(KEY) == first_nonces(bytes(other))).any()
    assert next_nonce(KEY, 3, 5) != next_nonce(bytes(other), 3, 5)


@given(st.integers(0, 2**32), st.integers(1, 4), st.lists(st.integers(0, 2), max_size=80))
@examples(25)
def test_a_reader_is_right_at_every_moment(seed: int, num_slots: int, moves: list[int]) -> None:
    """0: a prefill ends; 1: its worker replaces the nonce, after which blocks may be freed; 2: the
    scheduler hears of it.  A fence holds exactly as long as the worker has not replaced it."""
    numbers = random.Random(seed)
    key = numbers.randbytes(KEY_BYTES)
    slots, table = FenceSlots(key, num_slots), FenceTable()
    table.arm(key)
    held: dict[str, tuple[int, int]] = {}
    ended: dict[str, tuple[int, int]] = {}
    past: list[tuple[int, int]] = []
    for place, move in enumerate(moves):
        if move == 0 and (fence := slots.take()) is not None:
            held[f"r{place}"] = fence
        elif move == 1 and held:
            name = numbers.choice(sorted(held))
            ended[name] = held.pop(name)
            table.end(*ended[name])
        elif move == 2 and ended:
            name = numbers.choice(sorted(ended))
            past.append(ended.pop(name))
            slots.give_back(past[-1][0])
        for slot, nonce in held.values():
            assert int(table.nonces[slot]) == nonce
        for slot, nonce in [*ended.values(), *past]:
            assert int(table.nonces[slot]) != nonce
