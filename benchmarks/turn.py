"""Lets several benchmarks start their engines at once and measure one after the other.

Engines take minutes to start, and a machine may be there for minutes only. Every benchmark that is
run with `BENCHMARK_LOCK` set to the same file starts at once, and measures while it holds the lock
of that file; engines that wait for their turn leave the GPUs alone.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

VARIABLE = "BENCHMARK_LOCK"
LOOK_SECONDS = 0.2


@contextlib.contextmanager
def turn(end: float) -> Iterator[None]:
    """Hold the machine's lock, if there is one.

    Args:
        end: until when to wait for it, in seconds of `time.monotonic`.

    Raises:
        TimeoutError: others held it until then.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        yield
        return
    with open(path, "a") as file:
        while not _is_locked(file.fileno()):
            if time.monotonic() > end:
                raise TimeoutError(f"expected the lock of {path} in time, but others held it")
            time.sleep(LOOK_SECONDS)
        yield  # closing the file gives it back


def _is_locked(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
