"""What is not our segment is refused, and a full /dev/shm is an exception."""

import errno
import mmap
import os
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.shm import _shm_ring
from vllm_commext.shm.ring import RingReader, RingWriter
from vllm_commext.shm.segment import (
    ATTEMPTS,
    LARGEST_RING_BYTES,
    MAX_READERS,
    capacity_for,
    create_segment,
    segment_bytes,
    unlink_segment,
)

from .conftest import unshared

CAPACITY = 4096
HEAD_AT, DATA_AT = 256, 4096


def path_of(writer: RingWriter) -> Path:
    return Path("/dev/shm") / writer.address.name


def overwrite(writer: RingWriter, offset: int, content: bytes) -> None:
    with path_of(writer).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset : offset + len(content)] = content


def test_a_segment_is_private_and_reserved_at_once() -> None:
    writer = RingWriter.create(1, 1 << 20)
    info = path_of(writer).stat()
    assert info.st_mode & 0o777 == 0o600
    assert info.st_blocks * 512 >= segment_bytes(1 << 20, 1)
    writer.close()
    assert not path_of(writer).exists()


@pytest.mark.parametrize(
    ("offset", "content", "complaint"),
    [
        (0, b"\0" * 8, "magic number"),
        (8, struct.pack("<I", 99), "layout version"),
        (12, struct.pack("<I", 2), "number of readers"),
        (16, struct.pack("<Q", 8192), "capacity"),
        (24, struct.pack("<Q", 1), "length"),
        (32, b"\0" * 16, "another queue"),
    ],
)
def test_a_damaged_header_is_refused(offset: int, content: bytes, complaint: str) -> None:
    writer = RingWriter.create(1, CAPACITY)
    overwrite(writer, offset, content)
    with pytest.raises(ProtocolError, match=complaint):
        RingReader.attach(writer.address, 0)


def test_an_address_that_is_not_the_segments_is_refused() -> None:
    writer = RingWriter.create(2, CAPACITY)
    address = writer.address
    for wrong, complaint in [
        (replace(address, capacity_bytes=8192), "belong together"),
        (replace(address, n_readers=20), "belong together"),
        (replace(address, nonce=b"n"), "16 bytes"),
        (replace(address, version=1), "layout version 1, this process's 5"),
        (replace(address, name="../../etc/passwd"), "not the name"),
        (replace(address, name=address.name[:-1] + "g"), "not the name"),
        (replace(address, capacity_bytes=5000), "power of two"),
    ]:
        with pytest.raises(ProtocolError, match=complaint):
            RingReader.attach(wrong, 0)
    for rank in (-1, 2):
        with pytest.raises(ProtocolError, match="rank: expected 0 to 1"):
            RingReader.attach(address, rank)


def test_a_segment_that_others_may_open_is_refused() -> None:
    writer = RingWriter.create(1, CAPACITY)
    path_of(writer).chmod(0o644)
    with pytest.raises(ProtocolError, match="mode 0600"):
        RingReader.attach(writer.address, 0)


def test_c_and_python_agree_on_every_size() -> None:
    fd = os.memfd_create("sizes")
    os.truncate(fd, segment_bytes(CAPACITY, 300))
    for n_readers in range(1, 300):
        num_bytes = segment_bytes(CAPACITY, n_readers)
        _shm_ring.Ring(fd, num_bytes, CAPACITY, n_readers, -1, b"n" * 16, 0)
        with pytest.raises(ValueError, match="shorter than its ring"):
            _shm_ring.Ring(fd, num_bytes - 1, CAPACITY, n_readers, -1, b"n" * 16, 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "content", "complaint"),
    [
        (HEAD_AT, struct.pack("<Q", 64 * CAPACITY), "writer's cursor is outside"),
        (HEAD_AT, struct.pack("<Q", 33), "writer's cursor is outside"),
        (DATA_AT, struct.pack("<Q", 7), "out of sequence"),
        (DATA_AT + 8, struct.pack("<Q", 1 << 50), "impossibly long"),
        (DATA_AT + 8, struct.pack("<Q", 77), "do not add up"),
        (DATA_AT + 16, struct.pack("<I", 1 << 31), "beyond what was published"),
        (DATA_AT + 20, struct.pack("<I", 0), "impossible number of parts"),
        (DATA_AT + 20, struct.pack("<I", 1000), "table is cut short"),
        (DATA_AT + 20, struct.pack("<I", 3), "longer than the record"),
        (DATA_AT + 24, struct.pack("<I", 2), "wrong place"),
        (DATA_AT + 24, struct.pack("<I", 8), "begins again before it is written"),
        (DATA_AT + 28, struct.pack("<I", 0), "header is damaged"),
        (DATA_AT + 32, struct.pack("<Q", 1 << 40), "longer than the record"),
        (DATA_AT + 32, struct.pack("<Q", 1), "shorter than the record"),
    ],
)
def test_a_damaged_record_is_never_followed(offset: int, content: bytes, complaint: str) -> None:
    writer = RingWriter.create(2, CAPACITY)
    reader = RingReader.attach(writer.address, 0)
    writer.write((b"a" * 40, b"b" * 40))
    overwrite(writer, offset, content)
    for _ in range(2):  # and the second attempt says so too
        with pytest.raises(ProtocolError, match=complaint):
            reader.read(timeout=60)


def memory_in_use() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize(
    ("num_bytes", "complaint"),
    [(1 << 38, "impossibly long"), (1 << 50, "impossibly long"), (1 << 32, "no memory")],
)
def test_a_record_that_says_to_be_long_is_an_error_of_ours_and_takes_no_memory(
    num_bytes: int, complaint: str, n_parts: int
) -> None:
    writer = RingWriter.create(2, CAPACITY)
    reader = RingReader.attach(writer.address, 0)
    writer.write(b"x" * 100 if n_parts == 1 else (b"x" * 50, b"y" * 50))
    overwrite(writer, DATA_AT + 8, struct.pack("<Q", num_bytes))
    overwrite(writer, DATA_AT + 24, struct.pack("<I", 1))  # the first of several fragments
    overwrite(writer, DATA_AT + 32, struct.pack("<QQ", 50, num_bytes - 66))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_in_use() + (1 << 30), limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(ProtocolError, match=complaint):
                reader.read(timeout=60)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_damaged_readers_cursor_stops_the_writer() -> None:
    writer = RingWriter.create(1, CAPACITY)
    overwrite(writer, 1024, struct.pack("<Q", 1 << 60))
    with pytest.raises(ProtocolError, match="reader's cursor is outside"):
        writer.write(b"x" * 2 * CAPACITY, timeout=60)


@pytest.mark.parametrize(
    ("raised", "num_calls"),
    [
        ([errno.EAGAIN] * (ATTEMPTS - 1), ATTEMPTS),
        ([errno.EAGAIN] * ATTEMPTS, ATTEMPTS),
        ([errno.EACCES], 1),
    ],
)
def test_only_a_file_that_was_taken_for_abandoned_is_made_again(
    monkeypatch: pytest.MonkeyPatch, raised: list[int], num_calls: int
) -> None:
    real, calls = _shm_ring.create_file, []

    def create_file(path: str, num_bytes: int) -> int:
        calls.append(path)
        if len(calls) <= len(raised):
            raise OSError(raised[len(calls) - 1], "not made")
        return real(path, num_bytes)

    monkeypatch.setattr(_shm_ring, "create_file", create_file)
    if len(raised) < num_calls:
        made = create_segment(4096)
        os.close(made.fd)
        unlink_segment(made.name)
    else:
        with pytest.raises(OSError, match="not made"):
            create_segment(4096)
    assert len(set(calls)) == num_calls


def in_a_small_dev_shm(size: str, code: str) -> list[str]:
    mount = f"import subprocess\nwords = 'mount -t tmpfs -o size={size} tmpfs /dev/shm'.split()\n"
    program = f"{mount}subprocess.run(words, check=True)\n{code}"
    command = [*unshared("-rm"), sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


FULL = """
import os
from vllm_commext.shm.ring import RingWriter
try:
    RingWriter.create(1, 1 << 20)
except MemoryError as error:
    print(error)
writer = RingWriter.create(1, 1 << 18)
writer.write(b"x" * 200_000)
print(len(os.listdir("/dev/shm")))
"""


def test_a_full_dev_shm_is_an_exception_with_a_remedy() -> None:
    error, left = in_a_small_dev_shm("1m", FULL)
    assert "1.00 MiB needed, 1.00 MiB free" in error
    assert "--shm-size" in error
    assert left == "1"


def test_an_impossible_segment_is_refused() -> None:
    segment_bytes(4096, MAX_READERS)
    for capacity in (0, -4096, 2048, 4097, 12288, 1 << 31):
        with pytest.raises(ValueError, match="capacity: expected"):
            segment_bytes(capacity, 1)
    for n_readers in (0, -1, MAX_READERS + 1):
        with pytest.raises(ValueError, match="n_readers: expected"):
            segment_bytes(4096, n_readers)


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
