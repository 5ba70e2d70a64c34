"""Within its budget a writer waits for nobody: what busy readers leave goes behind the ring."""

import os
import struct
from pathlib import Path

import pytest

from tests.kit.threads import together
from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.shm.queue import MessageQueue
from vllm_commext.shm.ring import RingReader, RingWriter
from vllm_commext.shm.segment import SHM_FOLDER, capacity_for, free_shm_bytes, segment_bytes

from .test_segment import in_a_small_dev_shm, overwrite, path_of

CAPACITY = 4096
BUDGET = 64 << 10
MIB = 1 << 20


def make(budget: int, n_readers: int = 1) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter.create(n_readers, CAPACITY, budget)
    return writer, [RingReader.attach(writer.address, rank) for rank in range(n_readers)]


def test_two_that_write_to_each_other_first_do_not_wait_for_each_other() -> None:
    """The executor writes the next batch while a worker writes the answer to the last one."""
    there, back = (MessageQueue(1, 1, max_chunk_bytes=4 << 20, max_chunks=10) for _ in range(2))
    large = os.urandom(4 << 20)

    def work(side: int) -> None:
        mine, theirs = ((there, back), (back, there))[side]
        reader = MessageQueue.create_from_handle(theirs.export_handle(), 0)
        for number in range(10):
            mine.enqueue((number, large), timeout=60)
        for number in range(10):
            assert reader.dequeue(timeout=60) == (number, large)

    together(work, 2)


def test_the_budget_is_kept_and_freed_by_the_slowest_reader() -> None:
    writer, readers = make(BUDGET, 2)
    record = b"x" * (BUDGET // 4)
    sent = 0
    with pytest.raises(CommextTimeoutError):  # noqa: PT012
        while True:
            writer.write(record, timeout=0)
            sent += 1
    assert BUDGET // len(record) <= sent <= BUDGET // len(record) + 1
    for _ in range(sent):
        readers[0].read(timeout=0)
    with pytest.raises(CommextTimeoutError):
        writer.write(record, timeout=0)
    for _ in range(sent):
        readers[1].read(timeout=0)
    writer.write(record, timeout=0)


@pytest.mark.parametrize("size", [5 * BUDGET // 8, 3 * BUDGET])
def test_what_would_go_beyond_the_budget_waits_and_what_is_longer_goes_alone(size: int) -> None:
    writer, [reader] = make(BUDGET)
    record = os.urandom(size)
    for _ in range(2):
        writer.write(record, timeout=0)
        with pytest.raises(CommextTimeoutError):
            writer.write(record, timeout=0)
        assert reader.read(timeout=0) == record


def test_a_record_that_was_begun_in_the_ring_ends_behind_it() -> None:
    writer, [reader] = make(BUDGET)
    parts = (b"a" * 1500, bytearray(b"b" * 5000), b"", b"c" * 700)
    writer.write(parts, timeout=0)
    assert 0 < writer.counters()["spilled_bytes"] < 7200
    assert reader.read(timeout=0) == list(parts)


def test_memory_of_what_was_read_is_given_back_while_others_still_wait() -> None:
    writer = RingWriter.create(1, CAPACITY, 1 << 30)
    fd = os.open(path_of(writer), os.O_RDONLY)
    reader = RingReader.attach(writer.address, 0)
    before = os.fstat(fd).st_blocks * 512
    record = bytes(MIB)
    writer.write(record, timeout=0)
    for _ in range(60):  # one is always under way
        writer.write(record, timeout=0)
        assert reader.read(timeout=0) == record
    assert os.fstat(fd).st_size > 60 * MIB
    assert os.fstat(fd).st_blocks * 512 - before < 20 * MIB
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "content", "complaint"),
    [
        (0, struct.pack("<Q", 1), "place behind the ring is damaged"),
        (0, struct.pack("<Q", 1 << 40), "place behind the ring is damaged"),
        (8, struct.pack("<Q", 1 << 39), "place behind the ring is damaged"),
        (8, struct.pack("<Q", 2000), "do not add up"),
        (-32 + 16, struct.pack("<I", 8), "place behind the ring is damaged"),
    ],
)
def test_a_damaged_place_is_never_followed(offset: int, content: bytes, complaint: str) -> None:
    writer = RingWriter.create(2, CAPACITY, BUDGET)
    reader = RingReader.attach(writer.address, 0)
    writer.write(b"a" * 6000, timeout=0)
    data_at = segment_bytes(CAPACITY, 2) - CAPACITY
    used = path_of(writer).read_bytes()[data_at:]
    place = next(
        at for at in range(0, CAPACITY, 32) if struct.unpack_from("<I", used, at + 24)[0] & 16
    )
    overwrite(writer, data_at + place + 32 + offset, content)
    with pytest.raises(ProtocolError, match=complaint):
        reader.read(timeout=60)


FULL = """
from vllm_commext.errors import CommextTimeoutError
from vllm_commext.shm.ring import RingReader, RingWriter
writer = RingWriter.create(1, 1 << 18, 1 << 30)
reader = RingReader.attach(writer.address, 0)
try:
    writer.write(b"x" * (4 << 20), timeout=0.2)
except CommextTimeoutError:
    print("waits")
writer.write(b"y" * (600 << 10), timeout=60)
print(reader.read(timeout=60) == b"y" * (600 << 10))
"""


def test_without_memory_behind_the_ring_the_writer_waits_as_without_a_budget() -> None:
    assert in_a_small_dev_shm("1m", FULL) == ["waits", "True"]


def test_a_dev_shm_without_a_limit_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: unlimited)
    assert capacity_for(240 * MIB, free_shm_bytes()) == 2 * MIB
    assert Path("/dev/shm") == SHM_FOLDER
