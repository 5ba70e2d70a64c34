"""One request, from its body to the last byte of its answer.

It is in one phase at a time, and goes on as `MOVES` lets it; docs/design/requests.md says why.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aiohttp import web

from vllm_commext.errors import Reason
from vllm_commext.proxy.engines.pool import DECODE
from vllm_commext.proxy.http.intake import Intake
from vllm_commext.proxy.outcome import ENGINES_LOST, Outcome, ProxyError
from vllm_commext.proxy.session import move, resume
from vllm_commext.proxy.session.move import Leaving
from vllm_commext.proxy.session.relay import Ended, Left, Relay, response_to
from vllm_commext.proxy.session.response import Opened
from vllm_commext.proxy.session.resume import Resume
from vllm_commext.proxy.session.steps import Asked, Attempt, Service, Tries
from vllm_commext.proxy.session.transcript import Transcript

logger = logging.getLogger("vllm.commext.proxy")

PREPARE_SECONDS = 60.0
LOOK_SECONDS = 0.2


class Phase(Reason):
    ASKED = "asked", "no engine works on it"
    PLANNED = "planned", "its engines are chosen; a decode engine may be computing all of it"
    PREFILLING = (
        "prefilling",
        "a prefill engine computes the prompt; a decode engine may read it",
    )
    OPENED = "opened", "a decode engine has begun to answer"
    RELAYING = "relaying", "the client gets the answer"
    MOVING = "moving", "the answer has stopped, while another decode engine repeats it"
    DONE = "done", "the client has the answer or an error, or has gone"


_A, _P, _F, _O, _R, _M, _D = Phase
MOVES: Mapping[Phase, frozenset[Phase]] = {
    _A: frozenset((_P, _D)),
    _P: frozenset((_A, _F, _O, _D)),
    _F: frozenset((_A, _O, _D)),
    _O: frozenset((_R, _D)),
    _R: frozenset((_A, _M, _D)),
    _M: frozenset((_R, _D)),
    _D: frozenset(),
}


class Session:
    """*intake* has the request's whole body. Raises `ProxyError`."""

    def __init__(
        self,
        service: Service,
        request: web.Request,
        intake: Intake,
        headers: Mapping[str, str],
        outcome: Outcome,
    ) -> None:
        self._service, self._outcome = service, outcome
        self.phase = Phase.ASKED
        self._asked = Asked(service, request, intake.body, headers)
        self._tries = Tries()
        self._kept: Transcript | Resume = self._asked.kept(service)
        self._opened: Opened | None = None
        self._leaving: Leaving | None = None
        self._attempt: Attempt  # the latest
        self._relay: Relay

    @property
    def _transcript(self) -> Transcript | None:
        return self._kept if isinstance(self._kept, Transcript) else None

    def enter(self, phase: Phase) -> None:
        if phase not in MOVES[self.phase]:
            raise RuntimeError(f"a request that is {self.phase} cannot be {phase} next")
        self.phase = phase

    async def serve(self, request: web.Request, intake: Intake) -> web.StreamResponse:
        """Answer *request*. Raises `ProxyError` and `ClientGoneError`."""
        try:
            try:
                opened = await self._open()
                await self._asked.forget(self._transcript)
            finally:
                intake.release()
            return await self._answer(request, opened)
        finally:
            self.enter(Phase.DONE)
            if self._opened is not None:
                self._opened.close()
            if self._transcript is not None:
                self._transcript.close()

    def _next_attempt(self) -> Attempt:
        service, route = self._service, replace(self._outcome.route)
        self._attempt = Attempt(service, self._asked, self._tries, self._transcript, route=route)
        return self._attempt

    async def _open(self) -> Opened:
        """An answer that has begun, of one attempt after the other."""
        while True:
            attempt = self._next_attempt()
            self._outcome.route = attempt.route
            try:
                opened = await self._take_steps(attempt)
                self._note_opened(attempt, opened)
                return opened
            except ProxyError as error:
                self.enter(Phase.ASKED)
                gave_up = self._tries.fail() >= self._service.config.request_attempts
                if gave_up or not error.can_restart or error.side != DECODE:
                    raise
                attempt.blame(error)
                self._service.metrics.restarts.labels(error.kind).inc()
                text = "retrying request %s from the start: %s"
                logger.warning(text, self._outcome.request_id, error)
            finally:
                attempt.release()

    async def _take_steps(self, attempt: Attempt) -> Opened:
        attempt.choose()
        self.enter(Phase.PLANNED)
        if self._asked.endpoint.is_split:
            if attempt.local_reason is None:
                self.enter(Phase.PREFILLING)
            if (opened := await attempt.prefill()) is not None:
                return opened
        return await attempt.decode()

    def _note_opened(self, attempt: Attempt, opened: Opened) -> None:
        self.enter(Phase.OPENED)
        self._opened = opened
        self._tries.note(opened)
        if not self._tries.num_resumed:
            self._outcome.first_token_seconds = opened.opened_at - self._outcome.began
        if opened.response.status < 400:
            attempt.note_opened(opened)

    async def _answer(self, request: web.Request, opened: Opened) -> web.StreamResponse:
        outcome, service = self._outcome, self._service
        metrics, engine = service.metrics, opened.engine.name
        if opened.response.status >= 400:
            outcome.set("engine_error", DECODE)
        elif opened.cutter is not None and outcome.first_token_seconds is not None:
            metrics.first_token_seconds.labels(engine).observe(outcome.first_token_seconds)
        relay = self._relay = Relay(
            *(request, service.config, metrics.inter_token_seconds, self._tries.losses),
            *(self._transcript, response_to(opened, outcome.headers()), service.bulk),
        )
        try:
            failure = await self._send_all(relay, opened)
        finally:
            outcome.is_answered = relay.has_sent_end
            if relay.has_sent_end and self._opened is not None:
                self._attempt.note_end(self._opened, outcome.first_token_seconds)
            await self._stay()
        if failure is not None:
            outcome.set(failure.kind, failure.side)
            logger.warning("request %s broke: %s", outcome.request_id, failure)
        elif opened.response.status < 400:
            metrics.request_seconds.labels(outcome.route.decode).observe(outcome.seconds)
        return relay.response

    async def _send_all(self, relay: Relay, opened: Opened) -> ProxyError | None:
        """Send what one engine after the other answers; the failure that ended it, or None."""
        while True:
            self.enter(Phase.RELAYING)
            self._watch(opened)
            end = await relay.send(opened)
            if isinstance(end, Ended):
                return None
            if isinstance(end, Left):
                self.enter(Phase.MOVING)
                opened = self._opened = await self._move(relay, opened)
                continue
            await self._stay()
            resumed = await self._resume(opened, end.failure)
            if resumed is None:
                await relay.end_broken(opened, end.failure)
                return end.failure
            opened = resumed

    async def _resume(self, old: Opened, failure: ProxyError) -> Opened | None:
        """Rest of a lost stream from another engine, or None, counted by reason."""
        is_lost = failure.can_restart or failure.kind in (ENGINES_LOST, "engine_error")
        if old.cutter is None or not is_lost:
            return None
        transcript, opened = self._transcript, None
        result = self._kept if transcript is None else transcript.settle()
        if transcript is not None and result is None:
            if failure.can_restart and self._tries.num_resumed < resume.MAX_RESUMES:
                opened = await self._opened_elsewhere(old, failure, transcript)
            result = Resume.FAILED if opened is None else Resume.RESUMED
        self._service.metrics.resumes.labels(result).inc()
        return opened

    async def _opened_elsewhere(
        self, old: Opened, failure: ProxyError, transcript: Transcript
    ) -> Opened | None:
        self.enter(Phase.ASKED)
        self._tries.go_on_elsewhere()
        self._tries.blame(failure, self._service.upstream.decode_pool.engines)
        old.close()
        request_id = self._outcome.request_id
        logger.warning("request %s is resumed: %s", request_id, failure)
        try:
            opened = await self._open()
        except ProxyError as error:
            logger.warning("request %s is not resumed: %s", request_id, error)
            return None
        transcript.begin_again()
        return opened if opened.cutter is not None else None

    def _watch(self, opened: Opened) -> None:
        """Leave the engine that answers once it drains."""
        leaving = self._leaving
        if opened.cutter is None or (leaving is not None and leaving.engine is opened.engine):
            return
        if leaving is not None:
            leaving.forget()
        self._leaving = Leaving(opened.engine, self._leave)
        self._leaving.watch()

    async def _stay(self) -> None:
        """Stop watching, and release what was prepared."""
        if (leaving := self._leaving) is None:
            return
        transcript = self._transcript
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
                while self._reason() is None and not move.has_other(leaving.engine, pool.engines):
                    await asyncio.sleep(LOOK_SECONDS)
            async with service.turns:
                async with asyncio.timeout(PREPARE_SECONDS):
                    result = self._reason() or await self._prepare()
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

    def _reason(self) -> Resume | None:
        """Reason to stay at an engine that drains, or None."""
        if not self._service.config.move:
            return Resume.OFF
        too_often = self._tries.num_resumed >= resume.MAX_RESUMES
        return Resume.FAILED if too_often else self._staying()

    def _staying(self) -> Resume | None:
        kept = self._kept
        return kept if isinstance(kept, Resume) else move.reason_to_stay(self._asked.most, kept)

    async def _prepare(self) -> Resume | None:
        """Have the prompt computed, unless it is read from the old engine. Reason to stay, or
        None."""
        self._tries.go_on_elsewhere()
        attempt = self._next_attempt()
        if not self._changes():
            attempt.choose()
            await attempt.prefill()
        return self._staying()

    def _changes(self) -> dict[str, Any]:
        engine, engines = self._tries.answered_by, self._service.upstream.decode_pool.engines
        return move.read_from(engine, engines, self._asked.body) if engine is not None else {}

    async def _move(self, relay: Relay, old: Opened) -> Opened:
        """Rest of a stopped stream: from another engine, or else from its own."""
        attempt, leaving, transcript = self._attempt, self._leaving, self._transcript
        assert leaving is not None  # it has been stopped
        assert transcript is not None  # as those that stop have
        began, opened, result = time.monotonic(), None, self._staying() or Resume.FAILED
        seconds = self._service.config.move_pause_seconds
        may_begin_anew = self._outcome.seconds <= seconds  # it takes about as long as so far
        try:
            if result is Resume.FAILED:
                async with asyncio.timeout(seconds):
                    opened = await attempt.decode(self._changes())
                    attempt.hand_over(opened)
                    trial = transcript.trial()
                    result = await relay.catch_up(opened, trial, may_begin_anew) or Resume.RESUMED
        except (ProxyError, TimeoutError) as error:
            logger.warning("request %s is not moved: %s", self._outcome.request_id, error)
        finally:
            leaving.has_gone_on.set()
            attempt.release()
            if opened is not None and result is not Resume.RESUMED:
                opened.close()
        self._note_move(result)
        if opened is None or result is not Resume.RESUMED:
            return old
        self._service.metrics.move_seconds.observe(time.monotonic() - began)
        self._outcome.route = attempt.route
        self._tries.note(opened)
        transcript.begin_again()
        old.close()
        return opened

    def _note_move(self, result: Resume) -> None:
        self._service.metrics.moves.labels(result).inc()
        name = self._leaving.engine.name if self._leaving is not None else ""
        text = "request %s, while %s drains: %s"
        logger.info(text, self._outcome.request_id, name, result.meaning)
