"""Fences: a reader that relies on an epoch never relies on blocks that were freed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.nixl.fence import NUM_CELLS, FenceBoard, FenceSlots, is_fresh


def test_slots_run_out_and_come_back_with_the_next_ticket() -> None:
    slots = FenceSlots(num_slots=2)
    assert [slots.take(name) for name in "abc"] == [(0, 0), (1, 0), None]
    slots.give_back("a")
    slots.give_back("a")
    slots.give_back("never taken")
    assert slots.take("d") == (0, 1)
    assert slots.take("e") is None


def test_cells_run_out_and_come_back() -> None:
    board = FenceBoard()
    cells = [board.take_cell() for _ in range(NUM_CELLS)]
    assert sorted(cell for cell in cells if cell is not None) == list(range(NUM_CELLS))
    assert board.take_cell() is None
    board.cells[5] = 77
    assert board.read_cell(5) == 77
    assert board.take_cell() == 5


@given(st.integers(0, 2**32), st.integers(1, 4), st.lists(st.integers(0, 2), max_size=80))
@settings(max_examples=80, deadline=None)
def test_a_reader_is_right_at_every_moment(seed: int, num_slots: int, moves: list[int]) -> None:
    """0: a prefill ends; 1: its worker raises the epoch, after which blocks may be freed; 2: the
    scheduler hears of it.  A fence is fresh exactly as long as the worker has not raised it."""
    numbers = random.Random(seed)
    slots, board = FenceSlots(num_slots), FenceBoard()
    held: dict[str, tuple[int, int]] = {}
    ended: dict[str, tuple[int, int]] = {}
    past: list[tuple[int, int]] = []
    for place, move in enumerate(moves):
        if move == 0 and (fence := slots.take(f"r{place}")) is not None:
            held[f"r{place}"] = fence
        elif move == 1 and held:
            name = numbers.choice(sorted(held))
            ended[name] = held.pop(name)
            board.end(*ended[name])
        elif move == 2 and ended:
            name = numbers.choice(sorted(ended))
            past.append(ended.pop(name))
            slots.give_back(name)
        for slot, ticket in held.values():
            assert is_fresh(int(board.epochs[slot]), ticket)
        for slot, ticket in [*ended.values(), *past]:
            assert not is_fresh(int(board.epochs[slot]), ticket)
