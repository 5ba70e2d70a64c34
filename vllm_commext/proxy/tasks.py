"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

# A task of Python 3.10 loses a cancellation that comes in the moment in which its `Deadline` ends.
_CANCEL_AGAIN_SECONDS = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel *tasks* until all have ended."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_SECONDS)
