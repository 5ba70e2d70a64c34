"""Long waits in steps, with a line in the log after each, and the errors that end them."""

import os
from collections.abc import Iterator

from ..errors import CommextError


class PeerLostError(CommextError, RuntimeError):
    """The other end has died or shut down, so what is waited for cannot come."""


class QueueCancelledError(CommextError, RuntimeError):
    """This end was shut down, by another thread or a signal handler."""


def warning_interval() -> float:
    """Seconds after which, and between, the lines about a long wait."""
    return float(os.environ.get("VLLM_RINGBUFFER_WARNING_INTERVAL", "60"))


def next_steps(
    waited: float | None, interval: float, limit: float | None
) -> Iterator[tuple[float, float, bool]]:
    """Yield what follows on a wait in vain: how long it has been, how long to go on, and whether
    that is the last time.

    All in seconds. ``waited``: so far; None for ever, then nothing follows. ``interval``: the
    longest step. ``limit``: of the whole wait, None for none.
    """
    while waited is not None and (limit is None or waited < limit):
        step = interval if limit is None else min(interval, limit - waited)
        is_last = limit is not None and waited + step >= limit
        yield waited, step, is_last
        waited += step


class SpinCondition:
    """vLLM's record of how its readers wait, as far as others look at it. Nothing here has an
    effect."""

    def __init__(self) -> None:
        self.last_read = 0.0
        self.busy_loop_s = 0.0
        self.poller = None
