"""Keeps the processes of a plan running until it is asked to end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from vllm_commext.drain import HEADER
from vllm_commext.errors import CommextError
from vllm_commext.serve.child import STAGES, Child
from vllm_commext.serve.plan import ENDING, Command

LOOK_SECONDS = 0.2
CHECK_SECONDS = 2.0
ANSWER_SECONDS = 5.0
SILENT_SECONDS = 45.0
"""Without an answer from a process that has been ready: it hangs, and is started again."""
START_SECONDS, START_TIMES = 300.0, 3.0
"""A later start that takes longer, and as many times as long as the last one, hangs too."""
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Before a process is started again; after the last of them it is given up."""
STEADY_SECONDS = 600.0
"""Of service after which the pauses begin again."""
DRAIN_SECONDS, END_SECONDS = 35.0, 30.0
"""For the proxy's requests, and then for the engines, to end."""


class StartError(CommextError, RuntimeError):
    """A process ended before it was ever ready."""


class Member:
    """A command, its process now, and how often it has ended."""

    def __init__(self, command: Command, log: Path, say: Callable[[str], None]) -> None:
        self.command, self._log, self._say = command, log, say
        self.child: Child | None = None
        self.is_ready = False
        self.has_been_ready = False
        self.is_given_up = False
        self._num_ends = 0
        self._answered = self._ready_at = self._next_start = self._start_seconds = 0.0

    def step(self, answers: bool | None) -> None:
        """Look after it; *answers*: of its last check, None where there was none since. Raises
        `StartError` if it ended before it was ever ready."""
        now = time.monotonic()
        if self.child is None:
            if now >= self._next_start and not self.is_given_up:
                self.child, self._answered = Child(self.command, self._log), now
            return
        if self.child.status is not None:
            self._note_end(now)
            return
        if not self.is_ready and self.child.look():
            self._tell(STAGES[self.child.stage][0])
        most = SILENT_SECONDS if self.is_ready else self._start_seconds
        if answers:
            self._note_answer(now)
        elif self.has_been_ready and now - self._answered > most:
            self._tell(f"has not answered for {most:.0f} s: killing it")
            self.child.kill()

    def _note_answer(self, now: float) -> None:
        assert self.child is not None
        self._answered = now
        if not self.is_ready:
            self.is_ready, self.has_been_ready, self._ready_at = True, True, now
            self._start_seconds = max(START_SECONDS, START_TIMES * self.child.seconds)
            self.child.note_shared()
            self._tell("is ready")
        elif now - self._ready_at > STEADY_SECONDS:
            self._num_ends = 0

    def _note_end(self, now: float) -> None:
        assert self.child is not None
        cause = self.child.cause()
        self.child.kill()
        if not self.has_been_ready:
            raise StartError(f"{self.command.name} did not start: {cause}; see {self._log}")
        self.is_given_up = self._num_ends >= len(PAUSES)
        pause = PAUSES[min(self._num_ends, len(PAUSES) - 1)]
        what = "it has failed too often" if self.is_given_up else f"restarting in {pause:g} s"
        self._tell(f"ended ({cause}); {what}; see {self._log}")
        self._num_ends += 1
        self.child, self.is_ready, self._next_start = None, False, now + pause

    def _tell(self, text: str) -> None:
        seconds = f"{self.child.seconds:5.0f} s" if self.child is not None else ""
        self._say(f"{self.command.name:8s} {seconds}  {text}")


class Supervisor:
    """Runs engines and the proxies in front of them. *logs*: the folder of their logs. *on_ready*:
    called once all of them serve."""

    def __init__(
        self,
        engines: Sequence[Command],
        proxies: Sequence[Command],
        logs: Path,
        say: Callable[[str], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._engines, self._proxies = (
            [Member(one, logs / f"{one.name}.log", say) for one in commands]
            for commands in (engines, proxies)
        )
        self.members = [*self._engines, *self._proxies]
        self._say, self._on_ready = say, on_ready
        self._answers: dict[str, bool] = {}
        self._asked_to_end = 0
        self._woken = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal of `ENDING`, which is blocked before and after; 0, or 1 where no
        engine or no proxy is left. Raises `StartError` if one ended before it was ever ready."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self.ask_to_end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        async with aiohttp.ClientSession() as session:
            checks = asyncio.create_task(self._check(session))
            try:
                return await self._watch()
            finally:
                checks.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await checks
                await self._end()
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    async def _watch(self) -> int:
        was_ready = False
        while not self._asked_to_end:
            for member in self.members:
                member.step(self._answers.pop(member.command.name, None))
            if not was_ready and all(member.is_ready for member in self.members):
                was_ready = True
                self._on_ready()
            for members, kind in ((self._engines, "engine"), (self._proxies, "proxy")):
                if all(member.is_given_up for member in members):
                    self._say(f"no {kind} is left: stopping")
                    return 1
            await self._sleep(LOOK_SECONDS)
        return 0

    async def _check(self, session: aiohttp.ClientSession) -> None:
        while True:
            names = [member for member in self.members if member.child is not None]
            # A proxy says 503 without a usable engine, and killing it brings none back.
            asked = ((one.command.url, one.is_ready and one in self._proxies) for one in names)
            found = await asyncio.gather(*(is_there(session, *one) for one in asked))
            self._answers |= zip((one.command.name for one in names), found, strict=True)
            is_new = not all(member.is_ready for member in names)
            await asyncio.sleep(LOOK_SECONDS if is_new else CHECK_SECONDS)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)

    def ask_to_end(self) -> None:
        """End the proxies, then the engines; at the second call all at once."""
        self._asked_to_end += 1
        self._woken.set()
        if self._asked_to_end == 1:
            self._say("stopping when running requests have ended; Ctrl-C again stops at once")

    async def _end(self) -> None:
        """End the proxies, which wait for their requests, then the engines, and what is left."""
        await self._end_some(self._proxies, DRAIN_SECONDS)
        await self._end_some(self._engines, END_SECONDS)
        self._say("stopped")

    async def _end_some(self, members: Sequence[Member], seconds: float) -> None:
        children = [member.child for member in members if member.child is not None]
        for child in children:
            child.signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        while any(child.note_shared() for child in children):
            if time.monotonic() > end or self._asked_to_end > 1:
                break
            await asyncio.sleep(LOOK_SECONDS)
        for child in children:
            child.kill()


async def is_there(session: aiohttp.ClientSession, url: str, may_refuse: bool) -> bool:
    """True if its check is answered: with 200, in a drain, or by anything if it *may_refuse*."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as answer:
            return may_refuse or answer.status == 200 or HEADER in answer.headers
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
