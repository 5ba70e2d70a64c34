"""Where in the ring records lie: its first quarter while readers keep up, all of it else."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.errors import CommextTimeoutError
from vllm_commext.shm.ring import RingReader, RingWriter
from vllm_commext.shm.segment import segment_bytes

CAPACITY = 64 << 10
WINDOW = CAPACITY // 4
HEADER = 32
LONGEST_UNREAD = CAPACITY - 4 * HEADER  # in four fragments


def span(num_bytes: int) -> int:
    """What a record of one fragment takes."""
    return HEADER + -(-num_bytes // HEADER) * HEADER


def make(n_readers: int = 1) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter.create(n_readers, CAPACITY)
    return writer, [RingReader.attach(writer.address, rank) for rank in range(n_readers)]


@pytest.mark.parametrize("size", [0, 100, 5000, WINDOW - HEADER])
def test_memory_beyond_the_window_stays_as_it_was_while_readers_keep_up(size: int) -> None:
    writer = RingWriter.create(2, CAPACITY)
    readers = [RingReader.attach(writer.address, 0)]
    segment = os.open(Path("/dev/shm") / writer.address.name, os.O_RDONLY)
    readers.append(RingReader.attach(writer.address, 1))
    for number in range(3 * CAPACITY // span(size)):
        record = bytes([1 + number % 255]) * size
        writer.write(record, timeout=0)
        assert [reader.read(timeout=0) for reader in readers] == [record, record]
    data_at = segment_bytes(CAPACITY, 2) - CAPACITY
    used = os.pread(segment, CAPACITY, data_at)
    os.close(segment)
    assert any(used[WINDOW // 2 : WINDOW])
    assert not any(used[WINDOW + HEADER :])
    assert writer.peers()[0].position > 10 * CAPACITY
    assert writer.counters()["high_water_bytes"] == span(size)


def test_records_that_nobody_reads_fill_the_whole_ring() -> None:
    writer, [reader] = make()
    records = [bytes([number]) * 1000 for number in range(CAPACITY // span(1000))]
    for record in records:
        writer.write(record, timeout=0)
    with pytest.raises(CommextTimeoutError):
        writer.write(bytes(1000), timeout=0)
    assert [reader.read(timeout=0) for _ in records] == records


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2 * WINDOW), max_size=12))
def test_a_record_as_long_as_the_ring_has_room_wherever_the_last_one_ended(
    sizes: list[int],
) -> None:
    writer, readers = make(2)
    for size in [*sizes, LONGEST_UNREAD]:
        record = os.urandom(size)
        writer.write(record, timeout=0)
        assert [reader.read(timeout=0) for reader in readers] == [record, record]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6 * CAPACITY), min_size=1, max_size=12))
def test_streamed_records_arrive_whole_however_far_the_readers_lag(sizes: list[int]) -> None:
    writer, readers = make(2)
    sent = [os.urandom(size) for size in sizes]
    got: list[list[object]] = [[], []]

    def read(rank: int) -> None:
        got[rank].extend(readers[rank].read(timeout=60) for _ in sizes)

    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for record in sent:
        writer.write(record, timeout=60)
    for thread in threads:
        thread.join(20)
    assert got == [sent, sent]
