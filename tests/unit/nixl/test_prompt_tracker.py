"""Which step completes a prompt, and with which blocks."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.stream_requests import step
from vllm_commext.nixl.prefill.prefill_state import PrefillState, completes, progress_in


def completed(state: PrefillState, made: Any) -> list[list[list[int]]]:
    """The prompt's blocks, where the step completes it."""
    return [state.block_ids for progress in progress_in(made) if completes(state, progress)]


def prompt(num_tokens: int) -> PrefillState:
    request: Any = SimpleNamespace(request_id="r", num_prompt_tokens=num_tokens)
    return PrefillState(request)


def test_a_prompt_in_one_step() -> None:
    state = prompt(10)
    done = completed(state, step(new={"r": (0, [[1, 2], [7]], 10)}))
    assert done == [[[1, 2], [7]]]
    assert completed(state, step(cached={"r": (10, None, 1)})) == []


def test_a_prompt_in_pieces_gathers_its_blocks() -> None:
    state = prompt(10)
    assert completed(state, step(new={"r": (0, [[1]], 4)})) == []
    assert completed(state, step(cached={"r": (4, [[5]], 4)})) == []
    done = completed(state, step(cached={"r": (8, [[3]], 2)}))
    assert done == [[[1, 5, 3]]]


def test_a_preempted_prompt_begins_anew() -> None:
    state = prompt(6)
    assert completed(state, step(new={"r": (0, [[1]], 4)})) == []
    again = step(cached={"r": (0, [[8, 9]], 6)}, resumed=("r",))
    assert completed(state, again) == [[[8, 9]]]


def test_a_prompt_that_is_listed_as_new_again_begins_anew() -> None:
    state = prompt(6)
    assert completed(state, step(new={"r": (0, [[1]], 4)})) == []
    assert completed(state, step(new={"r": (0, [[8, 9]], 6)})) == [[[8, 9]]]


@pytest.mark.parametrize("how", ["new", "cached"])
def test_a_step_without_tokens_of_a_prompt_does_not_complete_it(how: str) -> None:
    state = prompt(6)
    made: Any = step(**{how: {"r": (5, [[1]], 0)}})
    made.num_scheduled_tokens = {}
    assert completed(state, made) == []
