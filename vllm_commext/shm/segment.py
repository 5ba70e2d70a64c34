"""Named shared memory: reserved when created, refused if foreign, gone when its owner is.

Its writer keeps the file locked as long as it lives (`csrc/shm/file.h`), so that the next segment's
creator can remove those whose writer died before everyone had attached."""

import errno
import logging
import os
import re
import secrets
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from . import _shm_ring

LINE_BYTES = 128
PAGE_BYTES = 4096
FIXED_BYTES = 8 * LINE_BYTES
READER_BYTES = 2 * LINE_BYTES
MIN_CAPACITY_BYTES = 4 << 10
MAX_CAPACITY_BYTES = 1 << 30
MAX_READERS = 4096
SMALLEST_QUEUE_BYTES = 64 << 10
LARGEST_QUEUE_BYTES = 2 << 20
LARGEST_RING_BYTES = 16 << 20
logger = logging.getLogger("vllm.commext.shm")

SHM_FOLDER = Path("/dev/shm")
PREFIX = "vllm_commext"
NAME = re.compile(rf"{PREFIX}-(\d+)-[0-9a-f]{{32}}")
MIB = 1 << 20
ATTEMPTS = 5  # others may take a new file for abandoned before it is locked, hardly twice


def round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def segment_bytes(capacity_bytes: int, n_readers: int) -> int:
    """Length of the segment that holds a ring of this capacity for this many readers.

    ValueError if there can be no such ring; `csrc/shm/layout.h` has the parts."""
    if not MIN_CAPACITY_BYTES <= capacity_bytes <= MAX_CAPACITY_BYTES:
        raise ValueError(f"capacity: expected 4 KiB to 1 GiB, got {capacity_bytes} bytes")
    if capacity_bytes & (capacity_bytes - 1):
        raise ValueError(f"capacity: expected a power of two, got {capacity_bytes} bytes")
    if not 1 <= n_readers <= MAX_READERS:
        raise ValueError(f"n_readers: expected 1 to {MAX_READERS}, got {n_readers}")
    return round_up(FIXED_BYTES + n_readers * READER_BYTES, PAGE_BYTES) + capacity_bytes


def capacity_for(
    nominal_bytes: int, free_bytes: int, largest_bytes: int = LARGEST_QUEUE_BYTES
) -> int:
    """Return the ring's capacity for a queue that was asked to hold `nominal_bytes`.

    A power of two of 64 KiB to `largest_bytes`: the quarter of it that is used while readers keep
    up is enough for streaming and small enough for the cores' caches. And no more than a sixteenth
    of what is free in /dev/shm, so that all queues of a server find room in a small one."""
    wanted = max(nominal_bytes, SMALLEST_QUEUE_BYTES)
    limit = min(largest_bytes, max(free_bytes // 16, SMALLEST_QUEUE_BYTES))
    above = 1 << (wanted - 1).bit_length()
    return min(above, 1 << (limit.bit_length() - 1))


class Segment(NamedTuple):
    """An open segment. The caller closes `fd`, in bytes `num_bytes` long, under `name`."""

    name: str
    fd: int
    num_bytes: int


def create_segment(num_bytes: int) -> Segment:
    """Make a zeroed segment of `num_bytes`, all reserved, readable by this user alone.

    Raises MemoryError if /dev/shm has no room for it.
    """
    remove_abandoned()
    for attempt in range(ATTEMPTS):
        name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(16)}"
        try:
            fd = _shm_ring.create_file(str(SHM_FOLDER / name), num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise MemoryError(_no_room(num_bytes)) from error
            if error.errno != errno.EAGAIN or attempt == ATTEMPTS - 1:
                raise
        else:
            return Segment(name, fd, num_bytes)
    raise AssertionError("the last attempt returns or raises")


def free_shm_bytes() -> int:
    """Return the bytes that this user can still take of /dev/shm; maxsize without a limit."""
    info = os.statvfs(SHM_FOLDER)
    return info.f_bavail * info.f_frsize if info.f_blocks else sys.maxsize


def _no_room(num_bytes: int) -> str:
    return (
        f"no room in {SHM_FOLDER} for a queue: {num_bytes / MIB:.2f} MiB needed, "
        f"{free_shm_bytes() / MIB:.2f} MiB free. Give it more (docker run "
        "--shm-size=1g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory there), or "
        "remove what fills it."
    )


def open_segment(name: str, num_bytes: int) -> Segment:
    """Open the segment of this name. Raises ValueError unless it is a private file of this user and
    length, FileNotFoundError if its creator has gone or everyone has attached already."""
    if not NAME.fullmatch(name):
        raise ValueError(f"not the name of a queue's segment: {name!r}")
    fd = os.open(SHM_FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _check_file(name, os.fstat(fd), num_bytes)
    except ValueError:
        os.close(fd)
        raise
    return Segment(name, fd, num_bytes)


def _check_file(name: str, info: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ValueError(
            f"{SHM_FOLDER / name}: expected a regular file of user {os.geteuid()} with mode 0600, "
            f"got mode {info.st_mode:o} of user {info.st_uid}; it was not made by this queue"
        )
    if info.st_size < num_bytes:  # it is longer while the writer has spilled something
        raise ValueError(
            f"{SHM_FOLDER / name}: expected {num_bytes} bytes, got {info.st_size}; the handle and "
            "the segment do not belong together"
        )


def unlink_segment(name: str) -> None:
    """Take the name away, if it is there; those who have the segment mapped keep it."""
    (SHM_FOLDER / name).unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Remove the segments of this user whose writers died before everyone had attached."""
    for entry in os.scandir(SHM_FOLDER):
        match = NAME.fullmatch(entry.name)
        if match is not None and _shm_ring.remove_abandoned(entry.path):
            logger.info("removed %s, whose creator (pid %s) is dead", entry.name, match[1])
