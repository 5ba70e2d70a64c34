"""The ring with both ends in one process: content, order, bounds, timeouts, cancellation."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.inquiry import wait_for
from tests.kit.threads import in_thread
from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.shm.ring import (
    STATE_NAMES,
    PeerLostError,
    QueueCancelledError,
    RingReader,
    RingWriter,
)
from vllm_commext.shm.segment import segment_bytes

CAPACITY = 4096


def make(n_readers: int = 1, capacity: int = CAPACITY) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter.create(n_readers, capacity)
    readers = [RingReader.attach(writer.address, rank) for rank in range(n_readers)]
    writer.wait_attached(timeout=60)
    return writer, readers


def until_asleep(end: RingReader | RingWriter) -> None:
    wait_for(lambda: end.counters()["sleeps"])


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"x",
        b"y" * (CAPACITY - 1),
        (b"", b""),
        (b"head", bytearray(b"body"), memoryview(b"tail"), b""),
        tuple(bytes([i % 256]) for i in range(100)),
    ],
)
def test_a_record_arrives_as_it_was(record: bytes | tuple[bytes, ...]) -> None:
    writer, [reader] = make()
    thread, _ = in_thread(lambda: writer.write(record, timeout=60))
    received = reader.read(timeout=60)
    thread.join(5)
    assert received == (record if isinstance(record, bytes) else [bytes(p) for p in record])
    if not isinstance(record, bytes):
        kinds = [bytes if isinstance(part, bytes) else bytearray for part in record]
        assert [type(part) for part in received] == kinds


def test_what_cannot_be_a_record_is_refused_and_the_ring_goes_on() -> None:
    writer, [reader] = make()
    with pytest.raises(ValueError, match="1 to 124 parts in this ring, not 125"):
        writer.write((b"",) * 125)
    with pytest.raises(ValueError, match="1 to 124 parts in this ring, not 0"):
        writer.write(())
    with pytest.raises(TypeError):
        writer.write((b"", 3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="NaN"):
        writer.write(b"", timeout=float("nan"))
    writer.write(b"good")
    assert reader.read(timeout=60) == b"good"


def test_a_reader_gets_what_is_there_after_cancel_and_after_the_writer_left() -> None:
    writer, [reader] = make()
    writer.write(b"one")
    writer.write(b"two")
    writer.close()
    with pytest.raises(QueueCancelledError):
        writer.write(b"three")
    assert reader.read() == b"one"
    reader.cancel()
    assert reader.read() == b"two"
    with pytest.raises(QueueCancelledError):
        reader.read()


def test_an_end_that_leaves_wakes_who_waits_for_it() -> None:
    writer, [reader] = make()
    thread, results = in_thread(reader.read)
    until_asleep(reader)
    writer.close()
    thread.join(10)
    assert [type(result) for result in results] == [PeerLostError]
    assert "writer (shut down, at message 0) has shut down its end" in str(results[0])


def test_a_full_ring_names_the_reader_that_left() -> None:
    writer, readers = make(n_readers=3)
    for reader in (readers[0], readers[2]):
        in_thread(lambda r=reader: r.read(timeout=60))
    readers[1].close()
    with pytest.raises(PeerLostError, match=r"reader 1 \(shut down, at message 0\)"):
        writer.write(b"x" * 2 * CAPACITY, timeout=60)


def test_an_end_in_use_refuses_a_second_thread() -> None:
    writer, [reader] = make()
    thread, results = in_thread(reader.read)
    until_asleep(reader)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        reader.read()
    writer.write(b"for the first")
    thread.join(10)
    assert results == [b"for the first"]


def test_the_writer_wakes_nobody_when_nobody_sleeps_and_all_with_one_call() -> None:
    writer, readers = make(n_readers=4)
    for _ in range(10):
        writer.write(b"x")
        assert [r.read(timeout=60) for r in readers] == [b"x"] * 4
    assert writer.counters()["wake_ups"] == 0
    threads = [in_thread(lambda r=r: r.read(timeout=60)) for r in readers]
    for reader in readers:
        until_asleep(reader)
    writer.write(b"y")
    for thread, results in threads:
        thread.join(10)
        assert results == [b"y"]
    assert writer.counters()["wake_ups"] == 1


def test_counters_and_peers_tell_who_is_behind() -> None:
    writer, readers = make(n_readers=2)
    for _ in range(3):
        writer.write(b"x" * 100)
    readers[0].read(timeout=60)
    assert writer.counters()["messages"] == 3
    assert writer.counters()["bytes"] == 300
    assert writer.counters()["slowest_reader"] == 1
    assert writer.counters()["high_water_bytes"] == 3 * (32 + 128)
    assert [peer.sequence for peer in readers[1].peers()] == [3, 1, 0]
    assert writer.slowest_reader().rank == 1
    for _ in range(3):
        readers[1].read(timeout=60)
    assert writer.slowest_reader().rank == 0
    assert writer.peers()[1].high_water_bytes == 3 * (32 + 128)
    assert "reader 1 (pid" in writer.describe_peers()
    assert str(replace(writer.peers()[1], state=len(STATE_NAMES))) == "reader 0 (damaged)"


def test_an_address_survives_pickling_and_a_place_is_taken_once() -> None:
    writer, _ = make()
    again = RingWriter.create(2, CAPACITY)
    address = pickle.loads(pickle.dumps(again.address))
    first = RingReader.attach(address, 1)
    with pytest.raises(ProtocolError, match="place is taken already"):
        RingReader.attach(address, 1)
    with pytest.raises(ProtocolError, match="all 1 readers have attached already"):
        RingReader.attach(writer.address, 0)
    assert first.peers()[2].pid == os.getpid()


# --- where records lie: in the first quarter while readers keep up, in all of the ring else

WIDE = 64 << 10
WINDOW = WIDE // 4
HEADER = 32
LONGEST_UNREAD = WIDE - 4 * HEADER  # in four fragments


def span(num_bytes: int) -> int:
    return HEADER + -(-num_bytes // HEADER) * HEADER


@pytest.mark.parametrize("size", [0, 100, 5000, WINDOW - HEADER])
def test_memory_beyond_the_window_stays_as_it_was_while_readers_keep_up(size: int) -> None:
    writer = RingWriter.create(2, WIDE)
    readers = [RingReader.attach(writer.address, 0)]
    segment = os.open(Path("/dev/shm") / writer.address.name, os.O_RDONLY)
    readers.append(RingReader.attach(writer.address, 1))
    for number in range(3 * WIDE // span(size)):
        record = bytes([1 + number % 255]) * size
        writer.write(record, timeout=0)
        assert [reader.read(timeout=0) for reader in readers] == [record, record]
    data_at = segment_bytes(WIDE, 2) - WIDE
    used = os.pread(segment, WIDE, data_at)
    os.close(segment)
    assert any(used[WINDOW // 2 : WINDOW])
    assert not any(used[WINDOW + HEADER :])
    assert writer.peers()[0].position > 10 * WIDE
    assert writer.counters()["high_water_bytes"] == span(size)


def test_records_that_nobody_reads_fill_the_whole_ring() -> None:
    writer, [reader] = make(capacity=WIDE)
    records = [bytes([number]) * 1000 for number in range(WIDE // span(1000))]
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
    writer, readers = make(2, WIDE)
    for size in [*sizes, LONGEST_UNREAD]:
        record = os.urandom(size)
        writer.write(record, timeout=0)
        assert [reader.read(timeout=0) for reader in readers] == [record, record]
