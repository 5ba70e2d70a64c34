"""When a prompt's row is looked at, and which of its block ids a decode engine asks for and
believes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.geometry.layout import FULL, WINDOW, Group
from vllm_commext.nixl.stream.cursor import (
    EARLY,
    FINE,
    FINEST_SECONDS,
    FIRST,
    LATE,
    LONGEST_SECONDS,
    Cursor,
    PollSchedule,
    Wanted,
    wait_seconds,
)
from vllm_commext.nixl.stream.progress import PIECE_IDS, Header, entries_of, regions_of

NONCE, LATER = 77, 78
BLOCK = 4
NUM_TOKENS = 600 * BLOCK


def cursor_over(*groups: Group) -> Cursor:
    link: Any = SimpleNamespace(plan=SimpleNamespace(remote=SimpleNamespace(groups=[*groups])))
    sizes = SimpleNamespace(num_tokens=NUM_TOKENS)
    part: Any = SimpleNamespace(load=sizes, remote=sizes)
    has_rest = all(group.kind == FULL for group in groups)
    return Cursor(part, link, NONCE, regions_of(groups, NUM_TOKENS), BLOCK, 0, has_rest)


@pytest.fixture(name="cursor")
def _cursor() -> Cursor:
    return cursor_over(Group(FULL, BLOCK))


def say(cursor: Cursor, num_blocks: int, *, is_whole: bool = False) -> None:
    """The row's header says that so many blocks are computed."""
    cursor.note_progress(Header(NONCE, cursor.nonce, num_blocks * BLOCK, is_whole))


def entries(first: int, num_blocks: int, nonce: int = NONCE) -> Any:
    """What pieces from a block on hold; its id is its position."""
    listed = entries_of(nonce, range(first, num_blocks))
    size = -(-(num_blocks - first) // PIECE_IDS) * PIECE_IDS
    return np.concatenate([listed, np.zeros(size - len(listed), dtype=np.uint64)])


def test_a_look_asks_for_what_the_next_chunk_is_likely_to_need(cursor: Cursor) -> None:
    assert cursor.wanted() == [Wanted(0, 0, 1)]
    say(cursor, 200)
    cursor.take(cursor.wanted(), entries(0, 64))
    assert not cursor.is_known
    assert cursor.wanted() == [Wanted(0, 1, 3)]
    cursor.take(cursor.wanted(), entries(64, 200))
    assert cursor.is_known
    cursor.note_read()
    assert cursor.wanted() == [Wanted(0, 3, 4)]


def test_ids_that_were_not_there_yet_are_asked_for_again(cursor: Cursor) -> None:
    say(cursor, 70)
    wanted = cursor.wanted()
    cursor.take(wanted, entries(0, 65))
    assert not cursor.is_known
    assert cursor.ids[0].tolist() == list(range(65))
    cursor.take(wanted, entries(0, 3))
    assert cursor.ids[0].tolist() == list(range(65))
    cursor.take(cursor.wanted(), entries(64, 70))
    assert cursor.is_known


def test_ids_of_a_prompt_that_has_begun_again_are_not_taken_for_others(cursor: Cursor) -> None:
    say(cursor, 100)
    cursor.take(cursor.wanted(), entries(0, 100))
    say(cursor, 200)
    wanted = cursor.wanted()
    assert wanted == [Wanted(0, 1, 3)]
    cursor.start_again(LATER)
    cursor.take(wanted, entries(64, 200, LATER))
    assert cursor.ids[0].tolist() == []
    say(cursor, 100)
    cursor.take(cursor.wanted(), entries(0, 100))
    assert cursor.ids[0].tolist() == []


def test_a_rest_is_asked_for_as_soon_as_the_prompt_is_computed() -> None:
    cursor = cursor_over(Group(FULL, BLOCK), Group(WINDOW, BLOCK))
    say(cursor, 600)
    cursor.take(cursor.wanted(), entries(0, 600))
    cursor.note_read()
    assert cursor.wanted() == [Wanted(1, 0, 1)]
    cursor.take(cursor.wanted(), np.zeros(PIECE_IDS, dtype=np.uint64))
    say(cursor, 600, is_whole=True)
    assert not cursor.is_known
    listed = entries_of(NONCE, [70, *range(70)])
    cursor.take(cursor.wanted(), listed[:PIECE_IDS])
    assert cursor.wanted() == [Wanted(1, 1, 1)]
    cursor.take(cursor.wanted(), np.concatenate([listed[PIECE_IDS:], listed[:57]]))
    assert cursor.is_known


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
