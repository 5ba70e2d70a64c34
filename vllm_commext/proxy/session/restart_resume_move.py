"""One request, from its body to the last byte of its answer.

Where decode engines offer blocks to one another, a stream that leaves one which drains reads there
what it has; else a prefill engine computes the prompt first. Then the stream stops at the end of an
event. The old engine is let go when the new one has repeated what the client has; until then the
stream can go on where it was.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from vllm_commext.proxy.errors_phases import ENGINES_LOST, Life, Outcome, Phase, ProxyError, Resume
from vllm_commext.proxy.session.failures import Opened, Tries, end_tasks, side_of
from vllm_commext.proxy.session.prefill_and_decode import Attempt, Service, read_from
from vllm_commext.proxy.session.relay import Ended, Left, Relay, Waits, response_to
from vllm_commext.proxy.session.two_step_bodies import Asked

logger = logging.getLogger("vllm.commext.proxy")

MIN_LEFT = 16
"""An answer with fewer tokens left is not moved."""
MAX_MOVES = 3
"""Streams that move at a time: the more read at once, the longer each pauses."""
PREPARE_SECONDS = 60.0
LOOK_SECONDS = 0.2


@dataclass(eq=False)
class Leaving:
    """Begins *work* once, as *opened*'s engine drains. has_gone_on: what was stopped goes on."""

    opened: Opened
    work: Callable[["Leaving"], Coroutine[Any, Any, None]]
    has_gone_on: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.engine = self.opened.engine

    def watch(self) -> None:
        self.engine.work.on_drain.add(self._begin)
        if self.engine.state.is_emptied:
            self._begin()

    def forget(self) -> None:
        self.engine.work.on_drain.discard(self._begin)

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done() and not self.has_gone_on.is_set()

    async def end(self) -> None:
        self.forget()
        if self._task is not None:
            await end_tasks([self._task])

    def _begin(self) -> None:
        self.forget()
        self._task = asyncio.create_task(self.work(self))


class Session:
    def __init__(self, service: Service, outcome: Outcome) -> None:
        self._service, self._outcome, self.life = service, outcome, Life(outcome.route.marks)
        self._asked: Asked
        self._tries: Tries
        self._attempt: Attempt  # the latest
        self._opened: Opened | None = None
        self._leaving: Leaving | None = None
        self._relay: Relay

    async def serve(
        self,
        request: web.Request,
        body: Any,
        headers: Mapping[str, str],
        num_bytes: int,
        let_go: Callable[[], None],
    ) -> web.StreamResponse:
        """*let_go* of *body*, of *num_bytes*, as answers begin; `ProxyError`, `ClientGoneError`."""
        service = self._service
        self._asked = asked = Asked(
            *(request, body, headers), *(service.config.min_prompt_tokens, service.config.affinity)
        )
        del body  # 32 MB that would stay as long as the stream
        self._outcome.prompt_tokens = asked.tokens
        asked.follow(service.room)
        before = None if asked.endpoint.is_split else asked.body.get("previous_response_id")
        self._tries = Tries(None if before is None else service.chooser.keeper(before))
        try:
            try:
                opened = self._opened = await self._open()
                await self._asked.forget(num_bytes)
            finally:
                let_go()
            return await self._answer(request, opened)
        finally:
            self.life.enter(Phase.DONE)
            if self._opened is not None:
                self._opened.close()
            if self._asked.transcript is not None:
                self._asked.transcript.close()

    async def _open(self) -> Opened:
        """Begin the answer, by one attempt after the other. Raises `ProxyError`."""
        while True:
            attempt = self._next_attempt()
            self._outcome.route = attempt.route
            try:
                opened = await self._take(attempt)
                self._note_opened(attempt, opened)
                return opened
            except ProxyError as error:
                self.life.enter(Phase.ASKED)
                if not self._tries.may_begin_again(error, self._service.config.request_attempts):
                    raise
                attempt.blame(error)
                self._service.metrics.answers.restarts.labels(error.kind).inc()
                text = "retrying request %s from the start: %s"
                logger.warning(text, self._outcome.request_id, error)
            finally:
                attempt.release()

    def _next_attempt(self) -> Attempt:
        self._attempt = Attempt(
            self._service, self._asked, self._tries, route=replace(self._outcome.route)
        )
        return self._attempt

    async def _take(self, attempt: Attempt) -> Opened:
        attempt.choose()
        self.life.enter(Phase.PLANNED)
        if self._asked.endpoint.is_split:
            if attempt.local_reason is None:
                self.life.enter(Phase.PREFILLING)
            if (opened := await attempt.prefill()) is not None:
                return opened
        return await attempt.decode({})

    def _note_opened(self, attempt: Attempt, opened: Opened) -> None:
        self.life.enter(Phase.OPENED)
        self._tries.answered_by = opened.engine
        if not self._tries.num_resumed:
            self._outcome.first_token_seconds = opened.opened_at - self._outcome.began
        if opened.response.status < 400:
            attempt.note_opened(opened)

    async def _answer(self, request: web.Request, opened: Opened) -> web.StreamResponse:
        outcome, service = self._outcome, self._service
        metrics, engine = service.metrics.answers, opened.engine.name
        if opened.response.status >= 400:
            outcome.set("refused", side_of(opened.engine))
        elif opened.cutter is not None and outcome.first_token_seconds is not None:
            metrics.first_token_seconds.labels(engine).observe(outcome.first_token_seconds)
        config, idle_seconds = service.config, service.config.decode_idle_timeout_seconds
        piece_seconds = min(idle_seconds, config.decode_timeout_seconds)
        relay = self._relay = Relay(
            *(request, Waits(idle_seconds, piece_seconds, config.client_timeout_seconds)),
            *(metrics.gaps, self._tries.losses),
            *(self._asked.transcript, response_to(opened, outcome.headers()), service.bulk),
        )
        try:
            is_whole = await self._send_all(relay, opened)
        finally:
            if relay.has_sent_end and self._opened is not None:
                outcome.end_well()
                self._note_end(self._opened)
            await self._stay()
        if is_whole and opened.response.status < 400:
            metrics.request_seconds.labels(outcome.route.decode).observe(outcome.seconds)
        return relay.response

    def _note_end(self, opened: Opened) -> None:
        """Note how a whole answer came, and how it was expected to come."""
        answer, plan, seconds = opened.answer, self._attempt.plan, self._outcome.first_token_seconds
        if answer is None:
            return
        answer.end(time.monotonic())
        self._outcome.tokens, self._outcome.per_token = answer.tokens, answer.per_token
        if self._tries.num_resumed and seconds and (told := self._asked.transcript) is not None:
            lasted, self._outcome.tokens = self._outcome.seconds - seconds, told.num_tokens
            self._outcome.per_token = lasted / max(told.num_tokens - 1, 1)  # pauses included
        expected = plan.expected if plan is not None and not self._tries.num_resumed else None
        if expected is not None and seconds is not None and answer.tokens > 1:
            note = self._service.metrics.ways.note_times
            note("expected", expected.first_token, expected.per_token)
            note("real", seconds, answer.per_token)

    async def _send_all(self, relay: Relay, opened: Opened) -> bool:
        """Send what one engine after the other answers; False if a failure ended it."""
        while True:
            self.life.enter(Phase.RELAYING, opened.engine.name)
            self._watch(opened)
            end = await relay.send(opened)
            if isinstance(end, Ended):
                return True
            if isinstance(end, Left):
                self.life.enter(Phase.MOVING)
                opened = self._opened = await self._move(relay, opened)
                continue
            await self._stay()
            resumed = await self._resume(opened, end.failure)
            if resumed is None:  # noted first, as a client may leave once it has been told
                self._outcome.set(end.failure.kind, end.failure.side)
                logger.warning("request %s broke: %s", self._outcome.request_id, end.failure)
                await relay.end_broken(opened, end.failure)
                return False
            opened = resumed

    async def _resume(self, old: Opened, failure: ProxyError) -> Opened | None:
        """Rest of a lost stream from another engine, or None, counted by reason."""
        is_lost = failure.can_restart or failure.kind in (ENGINES_LOST, "engine_error")
        if old.cutter is None or not is_lost:
            return None
        transcript, opened = self._asked.transcript, None
        result = self._asked.refusal if transcript is None else transcript.settle()
        if transcript is not None and result is None:
            if failure.can_restart and self._tries.may_go_on:
                opened = await self._opened_elsewhere(old, failure)
            if opened is not None:
                transcript.begin_again()
                opened = opened if opened.cutter is not None else None
            result = Resume.FAILED if opened is None else Resume.RESUMED
        self._service.metrics.answers.resumes.labels(result).inc()
        return opened

    async def _opened_elsewhere(self, old: Opened, failure: ProxyError) -> Opened | None:
        self.life.enter(Phase.ASKED)
        old.close()
        request_id = self._outcome.request_id
        logger.warning("request %s is resumed: %s", request_id, failure)
        self._tries.go_on_elsewhere()
        self._tries.blame(failure, self._service.upstream.decode_pool.engines)
        try:
            self._opened = await self._open()
        except ProxyError as error:
            logger.warning("request %s is not resumed: %s", request_id, error)
            return None
        return self._opened

    def _watch(self, opened: Opened) -> None:
        """Leave the engine that answers once it drains."""
        leaving = self._leaving
        if opened.cutter is None or (leaving is not None and leaving.engine is opened.engine):
            return
        if leaving is not None:
            leaving.forget()
        self._leaving = Leaving(opened, self._leave)
        self._leaving.watch()

    async def _stay(self) -> None:
        """Stop watching, and release what was prepared."""
        if (leaving := self._leaving) is None:
            return
        transcript = self._asked.transcript
        if leaving.is_under_way and transcript is not None and transcript.has_finished:
            self._note_move(Resume.ENDING)
        try:
            await leaving.end()
        finally:  # also where the client leaves meanwhile
            self._attempt.release()

    async def _leave(self, leaving: Leaving) -> None:
        """Have what comes next prepared, then stop the answer, and wait until it goes on."""
        service, result = self._service, Resume.FAILED
        pool, pause = service.upstream.decode_pool, service.config.move_pause_seconds
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                # One that was replaced is back after its next check.
                while self._reason() is None and not pool.has_other(leaving.engine):
                    await asyncio.sleep(LOOK_SECONDS)
            async with service.turns:
                async with asyncio.timeout(PREPARE_SECONDS):
                    if (result := self._reason()) is None:
                        await self._prepare(leaving)
                        result = self._reason_to_stay()
                if result is None:
                    self._relay.leave()
                    with suppress(TimeoutError):  # a client that takes no data keeps no turn
                        async with asyncio.timeout(pause):
                            await leaving.has_gone_on.wait()
                    return
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        self._attempt.release()
        self._note_move(result or Resume.FAILED)

    async def _prepare(self, leaving: Leaving) -> None:
        """Have the prompt computed for the next engine, unless that reads what the old one has."""
        self._tries.go_on_elsewhere()
        attempt = self._next_attempt()
        if not self._changes(leaving):
            attempt.choose()
            await attempt.prefill()

    def _reason(self) -> Resume | None:
        """Reason to stay at an engine that drains, or None."""
        if not self._service.config.move:
            return Resume.OFF
        return self._reason_to_stay() if self._tries.may_go_on else Resume.FAILED

    def _reason_to_stay(self) -> Resume | None:
        """Reason why the stream ends where it is, or None."""
        asked = self._asked
        if (transcript := asked.transcript) is None:
            return asked.refusal
        if (reason := transcript.settle()) is not None:
            return reason
        is_ending = transcript.has_finished or asked.most - transcript.num_tokens < MIN_LEFT
        return Resume.ENDING if is_ending else None

    def _changes(self, leaving: Leaving) -> dict[str, Any]:
        engines = self._service.upstream.decode_pool.engines
        return read_from(leaving.engine, engines, self._asked.body)

    async def _move(self, relay: Relay, old: Opened) -> Opened:
        """Rest of a stopped stream: from another engine, or else from its own."""
        leaving, transcript = self._leaving, self._asked.transcript
        assert leaving is not None  # it has been stopped
        assert transcript is not None  # as those that stop have
        began, opened = time.monotonic(), None
        result = self._reason_to_stay() or Resume.FAILED
        seconds = self._service.config.move_pause_seconds
        may_begin_anew = self._outcome.seconds <= seconds  # it takes about as long as so far
        try:
            if result is Resume.FAILED:
                async with asyncio.timeout(seconds):
                    opened = await self._attempt.decode(self._changes(leaving))
                    self._attempt.hand_over(opened)
                    trial = transcript.trial()
                    result = await relay.catch_up(opened, trial, may_begin_anew) or Resume.RESUMED
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        finally:
            leaving.has_gone_on.set()
            self._attempt.release()
            if opened is not None and result is not Resume.RESUMED:
                opened.close()
        self._note_move(result)
        if opened is None or result is not Resume.RESUMED:
            return old
        self._service.metrics.answers.move_seconds.observe(time.monotonic() - began)
        self._outcome.route = self._attempt.route
        self._tries.answered_by = opened.engine
        transcript.begin_again()
        old.close()
        return opened

    def _note_move(self, result: Resume) -> None:
        self._service.metrics.answers.moves.labels(result).inc()
        name = self._leaving.engine.name if self._leaving is not None else ""
        text = "request %s, while %s drains: %s"
        logger.info(text, self._outcome.request_id, name, result.meaning)
