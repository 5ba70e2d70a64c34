"""Streams that leave a decode engine that drains, and go on at another one.

While the old engine goes on, another one is asked to. Where decode engines offer blocks to one
another, it reads what the old one has of the stream; else a prefill engine computes the prompt, and
the new one the answer so far. Then it answers beside the old one, whose events the client gets more
slowly, until the new one has told as much as the client has. What is drawn without a seed goes on
otherwise there: then, and where an engine caches no prefixes, so that what it has computed for an
answer that is given up is lost, the stream stops first, at the end of an event, and the request is
served as after the engine's death. The old engine is let go when the new one has repeated what the
client has; until then the stream can go on where it was.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm_commext.proxy.attempts import Attempts
from vllm_commext.proxy.choice import Plan
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import Deadline, end_tasks
from vllm_commext.proxy.engines import Engine
from vllm_commext.proxy.metrics import ProxyMetrics
from vllm_commext.proxy.outcome import Outcome, ProxyError
from vllm_commext.proxy.response import Opened, failures_of
from vllm_commext.proxy.resume import MAX_RESUMES, Resume
from vllm_commext.proxy.transcript import Transcript

logger = logging.getLogger("vllm.commext.proxy")

MAX_MOVES = 3
"""Streams that another engine begins at a time, until it goes on with them: its reads share what
the network moves, and the more streams read, the further each has fallen behind."""
PREPARE_SECONDS = 60.0
LOOK_SECONDS = 0.2
BESIDE_SECONDS = 5.0
"""For which two engines go on with an answer at most."""
LEAST_TOLD = 4
"""Tokens by whose times an engine's pace is known."""


class Steps(Protocol):
    """A request's way to an engine."""

    async def first_step(self, attempts: Attempts, outcome: Outcome) -> Opened | None: ...

    async def second_step(
        self, attempts: Attempts, outcome: Outcome, changes: Mapping[str, Any] = ...
    ) -> Opened: ...

    def release(self, attempts: Attempts, request_id: str) -> None: ...


class Mover:
    """Has one stream leave its engine when that drains. It is tried once an engine.

    stop: has the stream stop where `move` is to be called. pace: has the client get the engine's
    events more slowly than they come, and than one in so many seconds, or no more. turns: of
    `MAX_MOVES`.
    """

    def __init__(
        self,
        steps: Steps,
        attempts: Attempts,
        outcome: Outcome,
        config: ProxyConfig,
        metrics: ProxyMetrics,
        turns: asyncio.Semaphore,
    ) -> None:
        self._steps = steps
        self._attempts = attempts
        self._outcome = outcome
        self._config = config
        self._metrics = metrics
        self._turns = turns
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._beside: _Beside | None = None
        self.stop: Callable[[], None] = lambda: None
        self.pace: Callable[[float | None], None] = lambda gap: None

    def watch(self, opened: Opened) -> None:
        """Leave the engine that answers once it drains."""
        if opened.cutter is None or opened.engine is self._engine:
            return
        self._forget()
        self._engine = opened.engine
        self._engine.on_drain.add(self._begin)
        if self._engine.is_emptied:
            self._begin()

    async def close(self) -> None:
        """The engine is not left any more; what was prepared is released."""
        self._forget()
        if self._task is not None:
            transcript = self._attempts.transcript
            if not self._task.done() and transcript is not None and transcript.has_finished:
                self._note(Resume.ENDING)
            try:
                await end_tasks([self._task])
            finally:  # also where the client leaves meanwhile
                self._task = None
                self._drop_beside()
                self._steps.release(self._attempts, self._outcome.request_id)

    def _forget(self) -> None:
        if self._engine is not None:
            self._engine.on_drain.discard(self._begin)

    def _begin(self) -> None:
        self._forget()
        self._task = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        result: Resume | None = Resume.FAILED
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                await self._until_another()
            async with self._turns, asyncio.timeout(PREPARE_SECONDS):
                result = self._reason() or await self._begun()
            if result is None and self._beside is not None:
                await self._caught_up(self._beside)
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        if result is None:
            self.stop()
            return
        self._drop_beside()
        self._steps.release(self._attempts, self._outcome.request_id)
        self._note(result)

    async def _until_another(self) -> None:
        """Wait for an engine to go on at: where engines are replaced one after the other, the next
        one drains as soon as the one before is back, which the next check alone tells."""
        while not self._attempts.has_other() and self._reason() is None:
            await asyncio.sleep(LOOK_SECONDS)

    async def _begun(self) -> Resume | None:
        """Have another engine go on beside the old one, unless it can cache nothing of that; why
        the stream stays all the same, or None."""
        attempts, transcript = self._attempts, self._attempts.transcript
        outcome = replace(self._outcome)  # so far the client's request is answered where it was
        attempts.num_resumed, attempts.prefilled_by = attempts.num_resumed + 1, None
        attempts.plan = None
        if not self._changes():
            await self._steps.first_step(attempts, outcome)
        reason = attempts.staying()
        if reason is not None or transcript is None or not attempts.can_warm():
            return reason
        trial = transcript.trial()  # of what the engine is told
        opened = await self._steps.second_step(attempts, outcome, self._changes())
        self._beside = _Beside(opened, trial, opened.first)
        attempts.hand_over_to(opened)
        attempts.plan = Plan(decode=opened.engine, first_token_at=time.monotonic())
        self.pace(0.0)  # it has the request, and goes on when it has its KV cache
        return await self._told(self._beside, trial.num_tokens + 1)

    def _reason(self) -> Resume | None:
        if not self._config.move:
            return Resume.OFF
        too_often = self._attempts.num_resumed >= MAX_RESUMES
        return Resume.FAILED if too_often else self._attempts.staying()

    def _changes(self) -> dict[str, Any]:
        """Of the request's body, where another engine reads what the old one has of the stream."""
        old = self._attempts.opened
        places = self._attempts.places_at(old.engine) if old is not None else []
        if not places:
            return {}
        params = self._attempts.body.get("kv_transfer_params") or {}
        return {"kv_transfer_params": {**params, "reuse_from": places}}

    async def _caught_up(self, beside: "_Beside") -> None:
        """Have the other engine, which goes on, tell as much as the client has, who gets more in
        the meantime, but more slowly than it tells that. It is let go where it cannot in time."""
        trial, transcript = beside.trial, self._attempts.transcript
        assert transcript is not None  # as those that were begun have
        began, first, result = time.monotonic(), trial.num_tokens, None
        try:
            async with asyncio.timeout(min(BESIDE_SECONDS, self._config.move_pause_seconds)):
                while result is None and _is_short(trial, transcript):
                    result = await self._told(beside, trial.num_tokens + 1)
                    if (count := trial.num_tokens - first) >= LEAST_TOLD:
                        self.pace((time.monotonic() - began) / count)
        except (ProxyError, TimeoutError) as error:
            logger.info("request %s stops to be moved: %s", self._outcome.request_id, error)
            result = Resume.FAILED
        if result is not None:
            self._drop_beside()

    def _told_beside(self) -> Opened | None:
        """The engine that answers beside, where it has told what the client has."""
        beside, self._beside, transcript = self._beside, None, self._attempts.transcript
        if beside is None or transcript is None:
            return None
        trial = transcript.trial()
        trial.pass_on(beside.opened.first)
        if trial.has_failed or trial.refusal is not None or trial.is_behind:
            beside.opened.close()
            return None
        return beside.opened

    def _drop_beside(self) -> None:
        beside, self._beside = self._beside, None
        self.pace(None)
        if beside is not None:
            beside.opened.close()

    def _may_begin_anew(self) -> bool:
        """To begin anew takes about as long as it has taken so far."""
        return self._outcome.seconds <= self._config.move_pause_seconds

    async def move(self) -> Opened:
        """The rest of a stream that has stopped: another engine's, or else its own's."""
        attempts, began = self._attempts, time.monotonic()
        old, transcript = attempts.opened, attempts.transcript
        assert old is not None  # it has been stopped
        assert transcript is not None  # as those that stop have
        result = attempts.staying() or Resume.FAILED
        opened = self._told_beside()
        try:
            if opened is not None and result is Resume.FAILED:
                result, self._outcome.decode = Resume.RESUMED, opened.engine.name
            elif result is Resume.FAILED:
                async with asyncio.timeout(self._config.move_pause_seconds):
                    opened = await self._steps.second_step(attempts, self._outcome, self._changes())
                    attempts.hand_over_to(opened)
                    beside = _Beside(opened, transcript.trial(), opened.first)
                    result = await self._told(beside, 0) or Resume.RESUMED
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        finally:
            self._steps.release(attempts, self._outcome.request_id)
            if opened is not None and result is not Resume.RESUMED:
                opened.close()
        self._note(result)
        if opened is None or result is not Resume.RESUMED:
            self._outcome.decode = old.engine.name
            return old
        self._metrics.move_seconds.observe(time.monotonic() - began)
        opened.cached_tokens, attempts.opened = attempts.cached_tokens, opened
        transcript.begin_again()
        old.close()
        return opened

    def _note(self, result: Resume) -> None:
        self._metrics.moves.labels(result).inc()
        name = self._engine.name if self._engine is not None else ""
        text = "request %s, while %s drains: %s"
        logger.info(text, self._outcome.request_id, name, result.meaning)

    async def _told(self, beside: "_Beside", count: int) -> Resume | None:
        """Read what another engine tells until it has repeated all that it was told, and *count*
        tokens are told; why the stream cannot go on there, or None. What is read is added to
        `Opened.first`."""
        opened, trial, may_begin_anew = beside.opened, beside.trial, self._may_begin_anew()
        while opened.cutter is not None:
            trial.pass_on(beside.unread)
            beside.unread = b""
            if trial.has_failed or trial.refusal is not None:
                return trial.refusal or Resume.FAILED
            if not trial.is_behind and (trial.has_finished or _num_tokens(trial) >= count):
                return None
            if trial.is_behind and not may_begin_anew:
                return Resume.ANEW
            if not (piece := await self._read(opened)):
                break
            if opened.answer is not None:
                opened.answer.go_on(piece.count(b"\n\n"), time.monotonic())
            beside.unread = opened.cutter.feed(piece)
            opened.first += beside.unread
        return Resume.FAILED

    async def _read(self, opened: Opened) -> bytes:
        """The next piece of another engine's answer. Raises `ProxyError`."""
        engine, seconds = opened.engine, self._config.decode_idle_timeout_seconds
        with failures_of(engine, seconds, self._attempts.losses), Deadline(seconds, engine.on_lost):
            return await opened.response.content.readany()


@dataclass
class _Beside:
    """Another engine's answer, the transcript that tries it, and events that this has not seen."""

    opened: Opened
    trial: Transcript
    unread: bytes


def _num_tokens(transcript: Transcript) -> int:
    transcript.settle()
    return transcript.num_tokens


def _is_short(trial: Transcript, transcript: Transcript) -> bool:
    """Whether the trial, which goes on, has not as much as the client."""
    is_known = trial.settle() is None and transcript.settle() is None
    is_short = trial.num_tokens < transcript.num_tokens and not trial.has_finished
    return is_known and is_short
