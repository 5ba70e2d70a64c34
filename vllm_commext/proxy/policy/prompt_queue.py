"""Prompts that wait for an engine's turn: which goes next, and which are put off."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop

PATIENCE = 4.0
"""Longest time that others may overtake a waiting prompt, in its own lengths or in limits."""
SPARED = 0.02
"""Share of its time that an engine then has for those that were put off."""
IN_TIME = 0.95
"""Share of a limit that a prompt is planned to be computed in."""


@dataclass(eq=False, slots=True)
class Waiting:
    """is_lost: expected to miss a limit even so."""

    since: float
    seconds: float
    is_lost: bool = False

    @property
    def due(self) -> float:
        return self.since + PATIENCE * self.seconds


class Queue(dict[Waiting, None]):
    """Prompts that wait, so that the most begin within *limit* seconds (0: none).

    With a limit they go as they came, but the longest are put off when not all can be in time, and
    those that are lost anyway while others can be. If prompts that are late already went first, all
    would be late. So one that has waited `PATIENCE` limits gets `SPARED` of the engine's time.
    Without a limit the shortest goes first, and overtakes another one for no longer than `PATIENCE`
    times that one's length.
    """

    __slots__ = "_limit", "_seconds", "_spared"

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit
        self._seconds: float | None = 0.0
        self._spared = 0.0
        """Seconds of the engine that those that were put off have left to others."""

    def add(self, prompt: Waiting) -> None:
        self[prompt], self._seconds = None, None

    def remove(self, prompt: Waiting) -> None:
        del self[prompt]
        self._seconds = None

    @property
    def seconds(self) -> float:
        if self._seconds is None:
            self._seconds = sum([one.seconds for one in self])
        return self._seconds

    def next(self, among: Sequence[Waiting], now: float) -> Waiting:
        """Choose the prompt of *among*, in the order in which they came, that goes now."""
        if not self._limit:
            return min(among, key=lambda one: one.due)
        first = among[0]
        if now <= first.since + PATIENCE * self._limit:
            self._spared = 0.0
        elif self._spared >= first.seconds:
            self._spared -= first.seconds
            return first
        hopeful = [one for one in among if not one.is_lost]
        chosen = self._first_in_time(hopeful, now) or self._first_in_time(among, now)
        chosen = chosen or min(among, key=lambda one: one.seconds)
        self._spared += SPARED * chosen.seconds
        return chosen

    def _first_in_time(self, waiting: Sequence[Waiting], now: float) -> Waiting | None:
        both = zip(waiting, in_time(waiting, now, self._limit)[0], strict=True)
        return next((one for one, seconds in both if one.seconds == seconds), None)

    def ahead(self, seconds: float, now: float, start: float) -> tuple[float, int]:
        """Seconds of those that go before a new prompt of *seconds*, if the next goes at *start*,
        and how many of them will be late by it."""
        if not self:
            return 0.0, 0
        if not self._limit:
            due = now + PATIENCE * seconds
            return sum([one.seconds for one in self if one.due <= due]), 0
        hopeful = [one for one in self if not one.is_lost]
        kept, put_off = in_time([*hopeful, Waiting(now, seconds)], start, self._limit)
        if put_off == len(hopeful):
            return self.seconds, 0
        return sum(kept) - seconds, int(put_off >= 0)


def in_time(waiting: Sequence[Waiting], now: float, limit: float) -> tuple[list[float], int]:
    """Seconds of each prompt that can be computed within *limit*, in order, 0 for the longest,
    which are put off; and the idx of the one put off for the last, or -1."""
    kept = [one.seconds for one in waiting]
    longest: list[tuple[float, int]] = []
    end, margin, put_off = now, IN_TIME * limit, -1
    for idx, seconds in enumerate(kept):
        end += seconds
        if end > waiting[idx].since + margin:
            less, put_off = heappushpop(longest, (-seconds, idx))
            kept[put_off] = 0.0
            end += less
        else:
            heappush(longest, (-seconds, idx))
            put_off = -1
    return kept, put_off


LEAD_SECONDS = 0.03
"""Work that an engine gets ahead, beside the time to reach it, so that it never idles."""


class Turns:
    """Prompts that wait for an engine's turn, so that a long one does not hold up short ones."""

    def __init__(
        self, queue: Queue, backlog: Callable[[float], float], prefill_seconds: Callable[..., float]
    ) -> None:
        self._queue, self._backlog, self._prefill_seconds = queue, backlog, prefill_seconds
        self._turns: dict[Waiting, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, new_tokens: int, held_tokens: int, is_lost: bool = False) -> None:
        now = time.monotonic()
        if not self._turns and self._seconds_left(now) <= 0.0:
            return
        waiting = Waiting(now, self._prefill_seconds(new_tokens, held_tokens), is_lost)
        turn = self._turns[waiting] = asyncio.get_running_loop().create_future()
        self._queue.add(waiting)
        self._set_timer(now)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # another one's turn
            raise
        finally:
            self._turns.pop(waiting, None)
            self._queue.remove(waiting)

    def wake(self) -> None:
        now = time.monotonic()
        # One that has been cancelled may not be gone yet.
        waiting = [one for one, turn in self._turns.items() if not turn.done()]
        if waiting and self._seconds_left(now) <= 0.0:
            self._turns.pop(self._queue.next(waiting, now)).set_result(None)
        self._set_timer(now)

    def _seconds_left(self, now: float) -> float:
        return self._backlog(now) - LEAD_SECONDS - self._prefill_seconds(0, 0)

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns:
            left = max(self._seconds_left(now), LEAD_SECONDS / 10)
            self._timer = asyncio.get_running_loop().call_later(left, self.wake)


REPEATED_TOKENS = 4096
"""Of prompts that one engine computes once more at a time."""
SECONDS_A_TOKEN = 4e-4
"""A prompt is overtaken by shorter ones for so long a token."""


class Repeats:
    """Turns of the prompts that one engine computes once more, since another one was lost or
    drains: as many at a time as have `REPEATED_TOKENS`, or a longer one alone. The shortest goes
    first, but waits are counted against it."""

    def __init__(self) -> None:
        self._left, self._num = REPEATED_TOKENS, 0
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []

    async def take(self, tokens: int) -> int:
        """Wait for a turn; the tokens to give back after it."""
        tokens, self._num = min(tokens, REPEATED_TOKENS), self._num + 1
        loop = asyncio.get_running_loop()
        turn, due = loop.create_future(), loop.time() + tokens * SECONDS_A_TOKEN
        heappush(self._waiting, (due, self._num, tokens, turn))
        self._wake()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(tokens)
            raise
        return tokens

    def give_back(self, tokens: int) -> None:
        self._left += tokens
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            _, _, tokens, turn = self._waiting[0]
            if not turn.done() and tokens > self._left:
                return
            heappop(self._waiting)
            if not turn.done():
                self._left -= tokens
                turn.set_result(None)
