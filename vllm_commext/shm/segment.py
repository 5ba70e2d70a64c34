"""Named shared memory: reserved when created, refused if foreign, gone when its owner is.

A name carries its creator's pid namespace, pid and start time, so that whoever creates the next
segment can remove those whose creator died before everyone had attached.
"""

import errno
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from . import _shm_ring

logger = logging.getLogger("vllm.commext.shm")

SHM_FOLDER = Path("/dev/shm")
PREFIX = "vllm_commext"
NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-[0-9a-f]{{32}}")
MIB = 1 << 20


class Segment(NamedTuple):
    """An open segment. The caller closes `fd`, in bytes `num_bytes` long, under `name`."""

    name: str
    fd: int
    num_bytes: int


def create_segment(num_bytes: int) -> Segment:
    """A zeroed segment of `num_bytes`, all of it reserved, readable by this user alone.

    Raises MemoryError if /dev/shm has no room for it.
    """
    remove_abandoned()
    pid = os.getpid()
    namespace, start = _shm_ring.pid_namespace(), _shm_ring.process_start(pid)
    name = f"{PREFIX}-{namespace}-{pid}-{start}-{secrets.token_hex(16)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(SHM_FOLDER / name, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except BaseException as error:
        os.close(fd)
        unlink_segment(name)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryError(_no_room(num_bytes)) from error
        raise
    return Segment(name, fd, num_bytes)


def free_shm_bytes() -> int:
    """What this user can still take of /dev/shm."""
    info = os.statvfs(SHM_FOLDER)
    return info.f_bavail * info.f_frsize


def _no_room(num_bytes: int) -> str:
    return (
        f"no room in {SHM_FOLDER} for a queue: {num_bytes / MIB:.2f} MiB needed, "
        f"{free_shm_bytes() / MIB:.2f} MiB free. Give it more (docker run "
        "--shm-size=1g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory there), or "
        "remove what fills it."
    )


def open_segment(name: str, num_bytes: int) -> Segment:
    """The segment of this name. Raises ValueError unless it is a private file of this user and
    length, FileNotFoundError if its creator has gone or everyone has attached already.
    """
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
    if info.st_size != num_bytes:
        raise ValueError(
            f"{SHM_FOLDER / name}: expected {num_bytes} bytes, got {info.st_size}; the handle and "
            "the segment do not belong together"
        )


def unlink_segment(name: str) -> None:
    """Take the name away; those who have the segment mapped keep it. Done twice is well."""
    (SHM_FOLDER / name).unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Remove the segments of this user whose creators died before everyone had attached."""
    namespace, user = _shm_ring.pid_namespace(), os.geteuid()
    for entry in os.scandir(SHM_FOLDER):
        match = NAME.fullmatch(entry.name)
        if match is None or int(match[1]) != namespace:
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != user or _is_running(match):
                continue
        except OSError:  # it went while we looked, or /proc does not tell: not ours to remove
            continue
        unlink_segment(entry.name)
        logger.info("removed %s, whose creator (pid %s) is dead", entry.name, match[2])


def _is_running(match: re.Match[str]) -> bool:
    return _shm_ring.process_start(int(match[2])) == int(match[3])
