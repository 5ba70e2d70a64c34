"""Streams that leave a decode engine that drains, and go on at another one.

Where decode engines offer blocks to one another, the new one reads what the old one has of the
stream; else a prefill engine computes the prompt first. Then the stream stops at the end of an
event. The old engine is let go when the new one has repeated what the client has; until then the
stream can go on where it was.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import Deadline, end_tasks
from vllm_commext.proxy.engines.pool import Engine
from vllm_commext.proxy.outcome import Outcome, ProxyError
from vllm_commext.proxy.session.attempts import Attempts
from vllm_commext.proxy.session.metrics import ProxyMetrics
from vllm_commext.proxy.session.response import Opened, failures_of
from vllm_commext.proxy.session.resume import MAX_RESUMES, Resume
from vllm_commext.proxy.session.transcript import Transcript

logger = logging.getLogger("vllm.commext.proxy")

MAX_MOVES = 3
"""Streams that move at a time: the more read at once, the longer each pauses."""
PREPARE_SECONDS = 60.0
LOOK_SECONDS = 0.2


class Steps(Protocol):
    """A request's way to an engine."""

    async def first_step(self, attempts: Attempts, outcome: Outcome) -> Opened | None: ...

    async def second_step(
        self, attempts: Attempts, outcome: Outcome, changes: Mapping[str, Any] = ...
    ) -> Opened: ...

    def release(self, attempts: Attempts, request_id: str) -> None: ...


@dataclass(eq=False)
class Mover:
    """Has one stream leave its engine when that drains, once an engine.

    stop: has the stream stop where `move` is called. turns: of `MAX_MOVES`.
    """

    _steps: Steps
    _attempts: Attempts
    _outcome: Outcome
    _config: ProxyConfig
    _metrics: ProxyMetrics
    _turns: asyncio.Semaphore
    _engine: Engine | None = None
    _task: asyncio.Task[None] | None = None
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    stop: Callable[[], None] = lambda: None

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
        """Stop watching, and release what was prepared."""
        self._forget()
        if self._task is not None:
            transcript = self._attempts.transcript
            is_ready = self._task.done() or self._moved.is_set()
            if not is_ready and transcript is not None and transcript.has_finished:
                self._note(Resume.ENDING)
            try:
                await end_tasks([self._task])
            finally:  # also where the client leaves meanwhile
                self._task = None
                self._steps.release(self._attempts, self._outcome.request_id)

    def _forget(self) -> None:
        if self._engine is not None:
            self._engine.on_drain.discard(self._begin)

    def _begin(self) -> None:
        self._forget()
        self._moved = asyncio.Event()
        self._task = asyncio.create_task(self._prepare(self._moved))

    async def _prepare(self, moved: asyncio.Event) -> None:
        result: Resume | None = Resume.FAILED
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                await self._until_another()
            async with self._turns:
                async with asyncio.timeout(PREPARE_SECONDS):
                    result = self._reason() or await self._prepared()
                if result is None:
                    self.stop()
                    with suppress(TimeoutError):  # a client that takes no data keeps no turn
                        async with asyncio.timeout(self._config.move_pause_seconds):
                            await moved.wait()
                    return
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        self._steps.release(self._attempts, self._outcome.request_id)
        self._note(result or Resume.FAILED)

    async def _until_another(self) -> None:
        """Wait for a usable engine: one that was replaced is back after its next check."""
        while not self._attempts.has_other() and self._reason() is None:
            await asyncio.sleep(LOOK_SECONDS)

    async def _prepared(self) -> Resume | None:
        """Have the prompt computed, unless it is read from the old engine. Reason to stay, or
        None."""
        attempts = self._attempts
        outcome = replace(self._outcome)  # so far the client's request is answered where it was
        attempts.num_resumed, attempts.prefilled_by = attempts.num_resumed + 1, None
        attempts.plan = None
        if not self._changes():
            await self._steps.first_step(attempts, outcome)
        return attempts.staying()

    def _reason(self) -> Resume | None:
        if not self._config.move:
            return Resume.OFF
        too_often = self._attempts.num_resumed >= MAX_RESUMES
        return Resume.FAILED if too_often else self._attempts.staying()

    def _changes(self) -> dict[str, Any]:
        old = self._attempts.opened
        places = self._attempts.places_at(old.engine) if old is not None else []
        if not places:
            return {}
        params = self._attempts.body.get("kv_transfer_params") or {}
        return {"kv_transfer_params": {**params, "reuse_from": places}}

    def _may_begin_anew(self) -> bool:
        """Beginning again takes about as long as it has taken so far."""
        return self._outcome.seconds <= self._config.move_pause_seconds

    async def move(self) -> Opened:
        """Rest of a stopped stream: from another engine, or else from its own."""
        attempts, began = self._attempts, time.monotonic()
        old, transcript = attempts.opened, attempts.transcript
        assert old is not None  # it has been stopped
        assert transcript is not None  # as those that stop have
        opened, result = None, attempts.staying() or Resume.FAILED
        try:
            if result is Resume.FAILED:
                async with asyncio.timeout(self._config.move_pause_seconds):
                    opened = await self._steps.second_step(attempts, self._outcome, self._changes())
                    attempts.hand_over_to(opened)
                    result = await self._repeated(opened, transcript.trial()) or Resume.RESUMED
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        finally:
            self._moved.set()
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

    async def _repeated(self, opened: Opened, trial: Transcript) -> Resume | None:
        """Read until the other engine has repeated what the client has; why it cannot go on, or
        None."""
        unread, may_begin_anew = opened.first, self._may_begin_anew()
        while opened.cutter is not None:
            trial.pass_on(unread)
            if trial.has_failed or trial.refusal is not None:
                return trial.refusal or Resume.FAILED
            if not trial.is_behind:
                return None
            if not may_begin_anew:
                return Resume.ANEW
            if not (piece := await self._read(opened)):
                break
            if opened.answer is not None:
                opened.answer.go_on(piece.count(b"\n\n"), time.monotonic())
            unread = opened.cutter.feed(piece)
            opened.first += unread
        return Resume.FAILED

    async def _read(self, opened: Opened) -> bytes:
        engine, seconds = opened.engine, self._config.decode_idle_timeout_seconds
        with failures_of(engine, seconds, self._attempts.losses), Deadline(seconds, engine.on_lost):
            return await opened.response.content.readany()
