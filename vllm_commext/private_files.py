"""Files that only this user, or root, can have written: measured tables, compiled kernels,
the file that drains an engine.

They are in a folder of their user that others cannot write.  Contents are written whole and carry a
digest; what is cut short or altered, or lies where others could have put it, counts as none, and
one line says so.
"""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

logger = logging.getLogger("vllm.commext")

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEAD = b"vllm_commext sha256 "
_HEAD_BYTES = len(_HEAD) + 64 + 1
MAX_BYTES = 64 * 1024 * 1024


def cache_folder(name: str) -> Path | None:
    """Folder of that name in the user's XDG cache folder; None where the user has none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        say("no cache folder: set HOME or XDG_CACHE_HOME to keep measured tables and kernels")
        return None
    return root / "vllm_commext" / name


@cache
def say(text: str) -> None:
    logger.warning("commext: %s", text)


@contextlib.contextmanager
def opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Open a private folder and give its descriptor; OSError where others could write it."""
    if make:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder, _READ | os.O_DIRECTORY)
    try:
        check_private(os.fstat(fd), folder)
        yield fd
    finally:
        os.close(fd)


def check_private(status: os.stat_result, path: Path) -> None:
    is_own = status.st_uid in (os.geteuid(), 0)
    is_kept = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not (is_own and is_kept):
        raise PermissionError(
            errno.EPERM,
            f"expected it to be of user {os.geteuid()} or root and not writable by others, got "
            f"owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):03o}",
            str(path),
        )


def is_there(path: Path) -> bool:
    try:
        with opened(path.parent) as folder:
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            check_private(status, path)
            return stat.S_ISREG(status.st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        say(f"a file does not count: {error}")
        return False


def make(path: Path) -> None:
    """Make an empty private file, and its folder; one that is there stays. OSError where that
    cannot be, where another kind of file is there, or it is not private."""
    with opened(path.parent, make=True) as folder:
        fd = os.open(path.name, _MAKE, 0o600, dir_fd=folder)
        try:
            _check_made(os.fstat(fd), path)
        finally:
            os.close(fd)


def remove(path: Path) -> None:
    """Remove a file that `make` has made, if there is one; OSError for another kind of file."""
    try:
        with opened(path.parent) as folder:
            _check_made(os.stat(path.name, dir_fd=folder, follow_symlinks=False), path)
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        return


def _check_made(status: os.stat_result, path: Path) -> None:
    check_private(status, path)
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        raise OSError(errno.EINVAL, "expected an empty regular file", str(path))


def read(path: Path) -> bytes | None:
    """Read what `write` has written there, None where there is none."""
    try:
        with opened(path.parent) as folder:
            fd = os.open(path.name, _READ, dir_fd=folder)
            with os.fdopen(fd, "rb") as file:
                check_private(os.fstat(fd), path)
                head, content = file.read(_HEAD_BYTES), file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"a file of the cache does not count: {error}")
        return None
    if head == _head(content):
        return content
    say(f"a file of the cache does not count: {path}: cut short, altered or of another release")
    return None


def write(path: Path, content: bytes) -> None:
    """Write a file and its folder, whole or not at all; OSError where the folder is not private."""
    with opened(path.parent, make=True) as folder:
        unfinished = f".{path.name}.{secrets.token_hex(8)}"
        fd = os.open(unfinished, _MAKE | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(_head(content) + content)
            os.replace(unfinished, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            raise


def _head(content: bytes) -> bytes:
    return _HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n"
