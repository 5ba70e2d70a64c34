"""Which step completes a prompt, and with which blocks."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.stream_requests import step
from vllm_commext.nixl.prefill.prefill_state import PrefillState, completes, progress_in

NEW, CACHED = "new", "cached"
Steps = list[tuple[str, int, list[list[int]], int]]
"""How each step lists the prompt: where it begins, its blocks, and its tokens."""


@pytest.mark.parametrize(
    ("steps", "resumed", "blocks"),
    [
        ([(NEW, 0, [[1, 2], [7]], 10), (CACHED, 10, [[], []], 1)], (), [[1, 2], [7]]),
        ([(NEW, 0, [[1]], 4), (CACHED, 4, [[5]], 4), (CACHED, 8, [[3]], 2)], (), [[1, 5, 3]]),
        ([(NEW, 0, [[1]], 4), (CACHED, 0, [[8, 9]], 10)], ("r",), [[8, 9]]),  # preempted
        ([(NEW, 0, [[1]], 4), (NEW, 0, [[8, 9]], 10)], (), [[8, 9]]),
        ([(NEW, 9, [[1]], 0)], (), None),
        ([(CACHED, 9, [[1]], 0)], (), None),
    ],
)
def test_the_step_that_computes_the_last_token_completes_a_prompt_once(
    steps: Steps, resumed: tuple[str, ...], blocks: list[list[int]] | None
) -> None:
    request: Any = SimpleNamespace(request_id="r", num_prompt_tokens=10)
    state, found = PrefillState(request), list[list[list[int]]]()
    for how, begin, block_ids, count in steps:
        again = resumed if how == CACHED else ()
        made: Any = step(**{how: {"r": (begin, block_ids, count)}}, resumed=again)
        made.num_scheduled_tokens = {"r": count} if count else {}
        for progress in progress_in(made):
            if completes(state, progress):
                found.append([[*group] for group in state.block_ids])
    assert found == ([blocks] if blocks else [])
