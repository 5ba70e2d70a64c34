"""Which step completes a prompt, and with which blocks."""

from types import SimpleNamespace
from typing import Any

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
