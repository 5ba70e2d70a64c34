"""Work in threads of its own, and what came of it."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

ENOUGH_SECONDS = 280.0
"""For threads that must end, on a busy machine."""


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """A thread that has begun, and a list that will hold what ``work`` returns or raises."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def swap_among(count: int) -> Callable[[int], Callable[[Any], list[Any]]]:
    """For each of so many threads, a call that gives its value for everybody's."""
    turns: dict[int, list[Any]] = {}
    here = threading.Barrier(count)

    def swap_of(number: int) -> Callable[[Any], list[Any]]:
        turn = itertools.count()

        def swap(mine: Any) -> list[Any]:
            found = turns.setdefault(next(turn), [None] * count)
            found[number] = mine
            here.wait(ENOUGH_SECONDS)
            return found

        return swap

    return swap_of


def outcomes(work: Callable[[int], object], count: int) -> list[Any]:
    """What ``work`` returns or raises for each number below ``count``, all at the same time."""
    begun = [in_thread(lambda number=number: work(number)) for number in range(count)]
    end = time.monotonic() + ENOUGH_SECONDS
    for thread, _ in begun:
        thread.join(max(0.0, end - time.monotonic()))
    late = TimeoutError(f"it has not ended within {ENOUGH_SECONDS:.0f} s")
    return [results[0] if results else late for _, results in begun]


def together(work: Callable[[int], object], count: int) -> list[Any]:
    """What ``work`` returns for each number; raises what the first of them raises."""
    found = outcomes(work, count)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
