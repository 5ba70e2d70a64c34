import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.shm.layout import (
    FIXED_BYTES,
    LARGEST_RING_BYTES,
    LINE_BYTES,
    MAX_READERS,
    PAGE_BYTES,
    READER_BYTES,
    capacity_for,
    round_up,
    segment_bytes,
)

CAPACITIES = st.integers(12, 30).map(lambda bits: 1 << bits)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_round_up_is_the_least_multiple_that_fits(num_bytes: int, multiple: int) -> None:
    result = round_up(num_bytes, multiple)
    assert result % multiple == 0
    assert num_bytes <= result < num_bytes + multiple


@given(CAPACITIES, st.integers(1, MAX_READERS))
def test_a_segment_holds_all_its_lines_and_the_ring(capacity: int, n_readers: int) -> None:
    head = segment_bytes(capacity, n_readers) - capacity
    assert head % PAGE_BYTES == 0
    assert head >= FIXED_BYTES + n_readers * READER_BYTES
    assert head - (FIXED_BYTES + n_readers * READER_BYTES) < PAGE_BYTES
    assert READER_BYTES % LINE_BYTES == 0


@pytest.mark.parametrize("capacity", [0, -4096, 2048, 4097, 12288, 1 << 31])
def test_an_impossible_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity: expected"):
        segment_bytes(capacity, 1)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_queues_ring_is_small_and_leaves_room_for_others(nominal: int, free: int) -> None:
    capacity = capacity_for(nominal, free)
    segment_bytes(capacity, 1)  # it is a possible one
    assert 64 << 10 <= capacity <= 2 << 20
    assert capacity <= max(free // 16, 64 << 10)
    assert capacity < 2 * max(nominal, 64 << 10)
    roomy = capacity_for(nominal, 1 << 40)
    assert roomy >= min(nominal, 2 << 20)


def test_a_ring_takes_a_sixteenth_of_what_is_free_and_no_more() -> None:
    found = [capacity_for(1 << 30, free) for free in ((32 << 20) - 1, 32 << 20)]
    assert found == [1 << 20, 2 << 20]
    assert capacity_for(1 << 30, 1 << 40, LARGEST_RING_BYTES) == LARGEST_RING_BYTES == 16 << 20
    assert capacity_for((64 << 10) + 1, 1 << 40) == 128 << 10


def test_eight_workers_queues_fit_a_tiny_dev_shm() -> None:
    free = 1 << 20
    for n_readers in [8, *[1] * 8, 7]:  # calls, the answers, a group's broadcasts
        free -= segment_bytes(capacity_for(240 << 20, free), n_readers)
    assert free > 0


@pytest.mark.parametrize("n_readers", [0, -1, MAX_READERS + 1])
def test_an_impossible_number_of_readers_is_refused(n_readers: int) -> None:
    segment_bytes(4096, MAX_READERS)
    with pytest.raises(ValueError, match="n_readers: expected"):
        segment_bytes(4096, n_readers)
