"""How late the kernel may end the timed waits of threads, so that it can end several at once.

Linux gives each thread a slack, by default 50 us, which a new thread takes over from the one that
starts it. It concerns time-outs only: a wait that ends by an event ends at once. See prctl(2),
PR_SET_TIMERSLACK.
"""

import contextlib
import ctypes
from collections.abc import Iterator

_SET_TIMER_SLACK, _GET_TIMER_SLACK = 29, 30


def timer_slack() -> float:
    """This thread's slack in seconds; 0 or less where it has none or the kernel does not tell."""
    return ctypes.CDLL(None).prctl(_GET_TIMER_SLACK, 0, 0, 0, 0) / 1e9


@contextlib.contextmanager
def slack_of_new_threads(seconds: float) -> Iterator[None]:
    """Threads that this one starts inside have so much slack for good; this one has it until the
    end. Nothing changes where this thread has none, as it does under a real-time scheduler."""
    before = timer_slack()
    if before > 0:
        _set(seconds)
    try:
        yield
    finally:
        if before > 0:
            _set(before)


def _set(seconds: float) -> None:
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(round(seconds * 1e9)), 0, 0, 0)
