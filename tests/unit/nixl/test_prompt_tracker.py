"""Which step completes a prompt, and with which blocks."""

from types import SimpleNamespace
from typing import Any

from vllm_commext.nixl.prefill.prompt_tracker import PromptTracker


def step(
    new: dict[str, tuple[int, list[list[int]]]] | None = None,
    cached: dict[str, tuple[int, list[list[int]] | None]] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
) -> Any:
    """What the scheduler tells of a step: request -> (computed tokens, blocks a group)."""
    running = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count, block_ids=ids)
            for name, (count, ids) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            new_block_ids=[ids for _, ids in running.values()],
            num_computed_tokens=[count for count, _ in running.values()],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
    )


def test_a_prompt_in_one_step() -> None:
    tracker = PromptTracker()
    tracker.add("r", 10)
    done = tracker.completed(step(new={"r": (0, [[1, 2], [7]])}, scheduled={"r": 10}))
    assert list(done) == [(10, [[1, 2], [7]])]
    assert list(tracker.completed(step(cached={"r": (10, None)}, scheduled={"r": 1}))) == []


def test_a_prompt_in_pieces_gathers_its_blocks() -> None:
    tracker = PromptTracker()
    tracker.add("r", 10)
    assert list(tracker.completed(step(new={"r": (0, [[1]])}, scheduled={"r": 4}))) == []
    assert list(tracker.completed(step(cached={"r": (4, [[5]])}, scheduled={"r": 4}))) == []
    done = tracker.completed(step(cached={"r": (8, [[3]])}, scheduled={"r": 2}))
    assert list(done) == [(10, [[1, 5, 3]])]


def test_a_preempted_prompt_begins_anew() -> None:
    tracker = PromptTracker()
    tracker.add("r", 6)
    assert list(tracker.completed(step(new={"r": (0, [[1]])}, scheduled={"r": 4}))) == []
    again = step(cached={"r": (0, [[8, 9]])}, scheduled={"r": 6}, resumed=("r",))
    assert list(tracker.completed(again)) == [(6, [[8, 9]])]


def test_other_and_ended_requests_are_not_followed() -> None:
    tracker = PromptTracker()
    tracker.add("r", 4)
    tracker.forget("r")
    both = {"r": (0, [[1]]), "other": (0, [[2]])}
    assert list(tracker.completed(step(new=both, scheduled={"r": 4, "other": 4}))) == []
