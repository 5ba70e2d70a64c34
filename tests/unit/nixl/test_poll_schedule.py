"""When a prompt's row is looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.stream.cursor import (
    EARLY,
    FINE,
    FINEST_SECONDS,
    FIRST,
    LATE,
    LONGEST_SECONDS,
    PollSchedule,
    wait_seconds,
)

SECONDS = st.floats(1e-4, 30.0)


def looks_until(end: float, expected: float | None) -> list[float]:
    """The times of the looks at a row whose next chunk is computed at ``end``."""
    times = [0.0]
    while times[-1] < end:
        times.append(times[-1] + wait_seconds(times[-1], expected))
    return times


@given(SECONDS, st.none() | SECONDS)
def test_looks_never_stop_and_are_never_closer_than_the_finest(
    passed: float, expected: float | None
) -> None:
    assert FINEST_SECONDS <= wait_seconds(passed, expected) <= LONGEST_SECONDS


@given(SECONDS, st.floats(EARLY, LATE))
def test_a_chunk_around_the_expected_time_is_seen_soon(expected: float, part: float) -> None:
    end = part * expected
    seen = looks_until(end, expected)[-1]
    # The look before was up to two of the finest waits before the time from when they are fine.
    assert seen - end <= max(FINEST_SECONDS, expected / FINE) * (1 + 1e-6)


@given(SECONDS, st.none() | SECONDS)
def test_a_chunk_at_any_time_is_seen_within_a_part_of_it(
    end: float, expected: float | None
) -> None:
    seen = looks_until(end, expected)[-1]
    if expected is None or end > LATE * expected:
        finest = max(FINEST_SECONDS, (expected or 0.0) / FINE)
        assert seen - end <= max(finest, end / FIRST) * (1 + 1e-6)


@given(st.floats(0.01, 10.0), st.floats(1.0, 1.1))
def test_what_comes_as_expected_takes_fewer_looks_than_one_each_5_ms(
    expected: float, part: float
) -> None:
    num_looks = len(looks_until(part * expected, expected))
    assert num_looks <= 30 + expected / LONGEST_SECONDS


def test_a_chunk_is_expected_after_as_long_as_its_tokens_take() -> None:
    schedule = PollSchedule(since=10.0)
    assert schedule.wait(5000, 10.1) == pytest.approx(0.1 / FIRST)
    assert schedule.next_tokens(5000) == 1
    schedule.note(0, 10.05)
    assert schedule.since == 10.0
    schedule.note(4000, 10.4)
    schedule.note(4000, 10.45)
    assert (schedule.since, schedule.chunk_tokens) == (10.4, 4000)
    assert schedule.next_tokens(5000) == 1000
    assert schedule.next_tokens(9000) == 4000
    assert schedule.wait(5000, 10.4) == pytest.approx(wait_seconds(0.0, 0.1))
    assert schedule.wait(9000, 10.5) == pytest.approx(wait_seconds(0.1, 0.4))
    schedule.note(5000, 10.5)
    assert schedule.next_tokens(5000) == 1
    assert schedule.wait(5000, 10.5) == FINEST_SECONDS
