"""One request's way through the engines: two steps, or a decode engine alone."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines.affinity import SESSION_HEADER, Keepers
from vllm_commext.proxy.engines.choice import Chooser
from vllm_commext.proxy.engines.pool import DECODE, Engine, EnginePool
from vllm_commext.proxy.http.access import SIDE
from vllm_commext.proxy.http.endpoints import answer_id
from vllm_commext.proxy.http.intake import Intake
from vllm_commext.proxy.outcome import (
    DIRECT,
    ENGINES_LOST,
    LOCAL_PREFILL,
    STREAMED,
    TWO_STEP,
    Outcome,
    ProxyError,
    no_answer,
)
from vllm_commext.proxy.policy.load import Answer
from vllm_commext.proxy.policy.placement import Planner
from vllm_commext.proxy.session import streams, two_step
from vllm_commext.proxy.session.attempts import Attempts
from vllm_commext.proxy.session.metrics import ProxyMetrics
from vllm_commext.proxy.session.moving import MAX_MOVES, Mover
from vllm_commext.proxy.session.relay import LEFT, Relay
from vllm_commext.proxy.session.response import Opened
from vllm_commext.proxy.session.resume import Resume, Room
from vllm_commext.proxy.session.streams import Stream
from vllm_commext.proxy.session.two_step import AtOnce, LocalPrefill
from vllm_commext.proxy.session.upstream import Payload, Prefilled, Upstream

logger = logging.getLogger("vllm.commext.proxy")

NO_CHANGES: Mapping[str, Any] = {}


@dataclass(eq=False)
class Service:
    _config: ProxyConfig
    _upstream: Upstream
    _pools: Mapping[str, EnginePool]
    _metrics: ProxyMetrics
    _planner: Planner

    def __post_init__(self) -> None:
        self._chooser = Chooser(self._config.placement, self._planner, self._pools)
        self._keepers = Keepers[Engine]()
        self._room = Room(self._config.resume_bytes)
        self._turns = asyncio.Semaphore(MAX_MOVES)

    async def serve(
        self, request: web.Request, intake: Intake, headers: Mapping[str, str], outcome: Outcome
    ) -> web.StreamResponse:
        """Answer *request*, which is whole. Raises `ProxyError` and `ClientGoneError`."""
        attempts: Attempts | None = None
        try:
            try:
                attempts = Attempts(
                    *(request.path, intake.body, headers, self._pools[DECODE]),
                    self._config.min_prompt_tokens,
                )
                if self._config.affinity:
                    attempts.remember(request.headers.get(SESSION_HEADER))
                refusal = None if self._config.resume else Resume.OFF
                attempts.keep(refusal, self._room, intake.num_bytes)
                opened = attempts.opened = await self._open(attempts, outcome)
            finally:
                intake.release()
            attempts.begun()
            return await self._relay(request, opened, attempts, outcome)
        finally:
            if attempts is not None:
                attempts.close()

    async def _open(self, attempts: Attempts, outcome: Outcome) -> Opened:
        while True:
            try:
                opened = await self._attempt(attempts, outcome)
                if opened.response.status < 400:
                    self._note_handover(attempts, opened)
                    if attempts.endpoint.keeps and (name := answer_id(opened.first)):
                        self._keepers.note(name, opened.engine)
                return opened
            except ProxyError as error:
                attempts.num_failed += 1
                gave_up = attempts.num_failed >= self._config.request_attempts
                if gave_up or not error.can_restart or error.side != DECODE:
                    raise
                attempts.note(error)
                self._metrics.restarts.labels(error.kind).inc()
                logger.warning("retrying request %s from the start: %s", outcome.request_id, error)
            finally:
                self.release(attempts, outcome.request_id)

    def _keeper(self, body: Mapping[str, Any]) -> Engine | None:
        """Engine that keeps the answer which *body* goes on from; None: any. Raises
        `ProxyError`."""
        name = body.get("previous_response_id")
        engine = self._keepers.get(name) if isinstance(name, str) else None
        if name is None or (engine is None and len(self._pools[DECODE].engines) == 1):
            return None
        if engine is None:
            raise no_answer(name, "this proxy knows no engine that has given it")
        if not engine.usable or engine not in self._pools[DECODE].members:
            raise no_answer(name, f"{engine.name}, which has given it, is gone or drains")
        return engine

    def _note_handover(self, attempts: Attempts, opened: Opened) -> None:
        if attempts.hand_over_to(opened) and opened.cutter is not None:
            later = opened.opened_at - attempts.prefilled_at
            self._planner.shared.handover.add(max(0.0, later))

    async def _resume(
        self, attempts: Attempts, outcome: Outcome, failure: ProxyError
    ) -> Opened | None:
        """Rest of a failed stream from another engine, or None, counted by reason."""
        opened, transcript = attempts.opened, attempts.transcript
        is_lost = failure.can_restart or failure.kind == ENGINES_LOST
        if opened is None or opened.cutter is None or not is_lost:
            return None
        result = attempts.refusal if transcript is None else transcript.settle()
        opened = None
        if transcript is not None and result is None:
            result = Resume.FAILED
            try:
                if failure.can_restart and attempts.begin_again(failure):
                    logger.warning("request %s is resumed: %s", outcome.request_id, failure)
                    opened = attempts.opened = await self._open(attempts, outcome)
                    opened.cached_tokens = attempts.cached_tokens
                    transcript.begin_again()
                    result = Resume.RESUMED if opened.cutter is not None else Resume.FAILED
            except ProxyError as error:
                logger.warning("request %s is not resumed: %s", outcome.request_id, error)
        self._metrics.resumes.labels(result).inc()
        return opened if result is Resume.RESUMED else None

    async def _attempt(self, attempts: Attempts, outcome: Outcome) -> Opened:
        if not attempts.endpoint.is_split:
            outcome.path = DIRECT
            attempts.only = self._keeper(attempts.body)
            if attempts.endpoint.computes and attempts.only is None:
                self._plan(attempts, outcome)
        elif (opened := await self.first_step(attempts, outcome)) is not None:
            return opened
        return await self.second_step(attempts, outcome)

    async def first_step(self, attempts: Attempts, outcome: Outcome) -> Opened | None:
        """Have the prompt computed; the answer, if both steps were taken at once."""
        self._plan(attempts, outcome)
        stream, prefilled = self._stream(attempts, outcome), None
        try:
            prefilled = attempts.prefilled = await self._prefill(attempts, stream)
            if prefilled is not None:
                await stream.check_place(prefilled.kv_transfer_params or {})
            if stream.is_under_way and (prefilled is not None or stream.is_alone):
                opened = await self._take_stream(stream, attempts, prefilled, outcome)
                if opened is not None:
                    return opened
        finally:
            await stream.cancel()
            if prefilled is not None or stream.way is AtOnce.ALONE:
                self._metrics.streams.labels(stream.way).inc()
        if prefilled is not None and not attempts.has_reader(prefilled.engine):
            self.release(attempts, outcome.request_id)
            self._metrics.local_prefills.labels(LocalPrefill.NO_READER).inc()
        outcome.path = LOCAL_PREFILL
        return None

    async def second_step(
        self, attempts: Attempts, outcome: Outcome, changes: Mapping[str, Any] = NO_CHANGES
    ) -> Opened:
        """A decode engine's answer. *changes*: of the body."""
        prefilled, body = attempts.prefilled, {**attempts.body, **changes}
        if prefilled is not None and prefilled.kv_transfer_params is not None:
            outcome.path, outcome.prefill = TWO_STEP, prefilled.engine.name
            body = two_step.decode_body(body, prefilled.kv_transfer_params)
            attempts.prefilled_by = prefilled.engine
        if not attempts.num_resumed:
            attempts.cached_tokens = None if prefilled is None else prefilled.cached_tokens
        return await self._decode(attempts, attempts.payload(body), attempts.avoided(), outcome)

    def _plan(self, attempts: Attempts, outcome: Outcome) -> None:
        attempts.plan = plan = self._chooser.plan(
            attempts.prefix,
            attempts.tokens,
            attempts.most,
            attempts.failed_prefill + attempts.failed_decode,
            attempts.endpoint.is_split and attempts.local_reason is None,
        )
        if plan is not None:
            outcome.placement = plan.as_header()
            self._metrics.placements.labels(plan.kind).inc()

    async def _decode(
        self, attempts: Attempts, payload: Payload, avoided: Sequence[Engine], outcome: Outcome
    ) -> Opened:
        if attempts.transcript is not None:
            payload = attempts.asking(payload, attempts.transcript)

        def note_asked(engine: Engine) -> None:
            outcome.decode = engine.name

        opened = await self._upstream.decode(payload, avoided, note_asked)
        if not attempts.num_resumed:
            outcome.first_token_seconds = opened.opened_at - outcome.began
        return opened

    def release(self, attempts: Attempts, request_id: str) -> None:
        """Have the prefill engine free what will not be read."""
        prefilled, attempts.prefilled = attempts.prefilled, None
        if prefilled is None:
            return
        if prefilled.job is not None:
            prefilled.job.read()
        self._upstream.releases.add(prefilled.key)
        if not prefilled.key.value:
            logger.warning(
                "request %s ended before a decode engine answered: unless one has read them, "
                "%s keeps its KV blocks until their lease expires",
                request_id,
                prefilled.engine.name,
            )

    def _stream(self, attempts: Attempts, outcome: Outcome) -> Stream:
        async def ask(payload: Payload, source: Engine) -> Opened:
            if not attempts.has_reader(source):
                message = f"no decode engine can be asked beside {source.name}"
                raise ProxyError(503, "no_engine", message, side=DECODE, can_restart=True)
            avoided = [*attempts.failed_decode, source]
            return await self._decode(attempts, payload, avoided, outcome)

        config = self._config
        refusal = streams.refusal(
            config.stream_chunks,
            attempts.body,
            (engine for engine in self._pools[DECODE].engines if engine.usable),
        )
        if (attempts.num_failed or attempts.num_resumed) and refusal != AtOnce.OFF:
            refusal = AtOnce.AGAIN
        return Stream(attempts.body, attempts.payload, ask, refusal)

    async def _take_stream(
        self, stream: Stream, attempts: Attempts, prefilled: Prefilled | None, outcome: Outcome
    ) -> Opened | None:
        """Answer of a decode engine that was asked at once; None to ask it again with the prefill's
        answer."""
        outcome.path, outcome.prefill = STREAMED, stream.source
        opened = await stream.opened()
        if isinstance(opened, ProxyError):
            if prefilled is None or not opened.can_restart:
                raise opened
            logger.warning("request %s is not streamed: %s", outcome.request_id, opened)
            return None
        if prefilled is not None:
            opened.cached_tokens = attempts.cached_tokens = prefilled.cached_tokens
        return opened

    async def _prefill(self, attempts: Attempts, stream: Stream) -> Prefilled | None:
        """The first step, or None, counted by reason."""
        reason, plan = attempts.local_reason, attempts.plan
        if reason is None and plan is not None and plan.prefill is None:
            reason = LocalPrefill.PLACEMENT
        if reason is None:
            body = two_step.prefill_body(attempts.body)
            payload = attempts.payload(body, is_stream=False)
            try:
                prefilled = await self._upstream.prefill(payload, attempts.failed_prefill, stream)
            except ProxyError as error:
                if error.status < 500 or error.kind in (ENGINES_LOST, "overloaded"):
                    raise
                away = error.kind in ("no_engine", "unreachable", "lost", "draining")
                reason = LocalPrefill.PREFILL_AWAY if away else LocalPrefill.PREFILL_FAILED
                reason = LocalPrefill.AFTER_FAILURE if attempts.failed_prefill else reason
            else:
                attempts.prefilled_at = time.monotonic()
                if prefilled.kv_transfer_params is not None:
                    if prefilled.job is not None:
                        prefilled.job.keep()
                    return prefilled
                reason = LocalPrefill.NO_PARAMETERS
                logger.info(
                    "%s returned no kv_transfer_params; has it a KV connector as producer?",
                    prefilled.engine.name,
                )
        self._metrics.local_prefills.labels(reason).inc()
        return None

    def _note_expected(self, attempts: Attempts, answer: Answer, outcome: Outcome) -> None:
        expected = attempts.plan.expected if attempts.plan is not None else None
        is_timed = not attempts.num_resumed and answer.tokens > 1
        if expected is None or not is_timed or outcome.first_token_seconds is None:
            return
        first, each = self._metrics.expected_first_token, self._metrics.expected_per_token
        first.labels("expected").observe(expected.first_token)
        first.labels("real").observe(outcome.first_token_seconds)
        each.labels("expected").observe(expected.per_token)
        each.labels("real").observe(answer.per_token)

    async def _relay(
        self, request: web.Request, opened: Opened, attempts: Attempts, outcome: Outcome
    ) -> web.StreamResponse:
        metrics, engine = self._metrics, opened.engine.name
        told = outcome.headers()
        if opened.response.status >= 400:
            told[SIDE] = DECODE
            outcome.set("engine_error", DECODE)
        elif opened.cutter is not None and outcome.first_token_seconds is not None:
            metrics.first_token_seconds.labels(engine).observe(outcome.first_token_seconds)
        gaps = metrics.inter_token_seconds
        mover = Mover(self, attempts, outcome, self._config, metrics, self._turns)

        async def go_on(failure: ProxyError) -> Opened | None:
            if failure.kind == LEFT:
                found = await mover.move()
            else:
                await mover.close()
                found = await self._resume(attempts, outcome, failure)
            if found is not None:
                mover.watch(found)
            return found

        relay = Relay(
            request, opened, self._config, gaps, attempts.losses, attempts.transcript, go_on
        )
        mover.stop = relay.leave
        mover.watch(opened)
        try:
            response, failure = await relay.run(told)
        finally:
            outcome.is_answered = relay.has_sent_end
            answer = (attempts.opened or opened).answer
            if relay.has_sent_end and answer is not None:
                answer.end(time.monotonic())
                self._note_expected(attempts, answer, outcome)
            await mover.close()
        if failure is not None:
            outcome.set(failure.kind, failure.side)
            logger.warning("request %s broke: %s", outcome.request_id, failure)
        elif opened.response.status < 400:
            metrics.request_seconds.labels(outcome.decode).observe(outcome.seconds)
        return response
