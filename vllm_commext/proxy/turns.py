"""Prompts that wait for an engine's turn, so that a long one does not hold up short ones.

With a limit to the first token they go as they came, but the longest are put off when not all can
be in time. Without one the shortest goes first, and overtakes another one for no longer than
`PATIENCE` times that one's length.
"""

import asyncio
import time

from vllm_commext.proxy.engine_load import EngineLoad, Waiting, next_of

LEAD_SECONDS = 0.03
"""Work that an engine gets ahead, beside the time to reach it, so that it never idles."""


class Turns:
    def __init__(self, load: EngineLoad) -> None:
        self._load = load
        self._turns: dict[Waiting, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        load.on_done = self._wake

    async def take(self, new_tokens: int, held_tokens: int) -> None:
        load, now = self._load, time.monotonic()
        if not self._turns and self._seconds_left(now) <= 0.0:
            return
        seconds = load.speed.prefill_seconds(new_tokens, held_tokens, False)
        waiting = Waiting(now, seconds)
        turn = self._turns[waiting] = asyncio.get_running_loop().create_future()
        load.wait(waiting)
        self._set_timer(now)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake()  # another one's turn
            raise
        finally:
            self._turns.pop(waiting, None)
            load.leave(waiting)

    def _wake(self) -> None:
        now = time.monotonic()
        if self._turns and self._seconds_left(now) <= 0.0:
            waiting = next_of([*self._turns], now, self._load.shared.limits.first)
            self._turns.pop(waiting).set_result(None)
        self._set_timer(now)

    def _seconds_left(self, now: float) -> float:
        reach = self._load.speed.prefill_seconds(0, 0, True)
        return self._load.backlog(now) - LEAD_SECONDS - reach

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns:
            left = max(self._seconds_left(now), LEAD_SECONDS / 10)
            self._timer = asyncio.get_running_loop().call_later(left, self._wake)
