"""Pauses in which a worker's other threads get the interpreter's lock.

A thread that wants the lock makes its holder give it up only after ``sys.getswitchinterval()``,
5 ms, and a call into C code is never interrupted.  Long work of the I/O thread is therefore done in
pieces, with a pause after each: the engine's thread then waits for one piece at most.
"""

import time
from collections.abc import Iterator

PAUSE_SECONDS = 20e-6
"""Long enough that a waiting thread has woken up and taken the lock."""


def pause() -> None:
    """Give up the interpreter's lock for a moment."""
    time.sleep(PAUSE_SECONDS)


def in_pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that make up ``range(count)``, with a pause between two."""
    for begin in range(0, count, size):
        if begin:
            pause()
        yield slice(begin, min(begin + size, count))
