"""The steps of a long wait."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.shm.ring import next_steps

# Whole seconds add up without rounding.
SECONDS = st.integers(1, 1000).map(float)


@given(waited=SECONDS, interval=SECONDS, limit=SECONDS)
def test_steps_fill_the_time_to_the_limit(waited: float, interval: float, limit: float) -> None:
    steps = list(next_steps(waited, interval, limit))
    if waited >= limit:
        assert steps == []
        return
    assert [so_far for so_far, _, _ in steps] == [
        waited + sum(step for _, step, _ in steps[:number]) for number in range(len(steps))
    ]
    assert waited + sum(step for _, step, _ in steps) == limit
    assert {step for _, step, _ in steps[:-1]} <= {interval}
    assert 0 < steps[-1][1] <= interval
    assert [is_last for _, _, is_last in steps] == [False] * (len(steps) - 1) + [True]


def test_without_a_limit_there_is_always_a_next_step() -> None:
    steps = itertools.islice(next_steps(60.0, 60.0, None), 3)
    assert list(steps) == [(60.0, 60.0, False), (120.0, 60.0, False), (180.0, 60.0, False)]


def test_nothing_follows_on_a_wait_for_ever() -> None:
    assert list(next_steps(None, 60.0, None)) == []
