"""One attempt at a request: engines are chosen, one computes the prompt, one answers."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_commext.proxy.engines.choice import Plan
from vllm_commext.proxy.engines.pool import DECODE, Engine
from vllm_commext.proxy.http.endpoints import answer_id
from vllm_commext.proxy.http.sse import Cached
from vllm_commext.proxy.outcome import (
    DIRECT,
    ENGINES_LOST,
    LOCAL_PREFILL,
    STREAMED,
    TWO_STEP,
    Losses,
    Outcome,
    ProxyError,
    Route,
)
from vllm_commext.proxy.session import two_step
from vllm_commext.proxy.session.phase import Life, Phase
from vllm_commext.proxy.session.reasons import AtOnce, LocalPrefill
from vllm_commext.proxy.session.response import Opened
from vllm_commext.proxy.session.service import Asked, Service
from vllm_commext.proxy.session.transcript import Edit, Transcript, unedited
from vllm_commext.proxy.session.two_step import Stream
from vllm_commext.proxy.session.upstream import Payload, Prefilled

logger = logging.getLogger("vllm.commext.proxy")

MAX_RESUMES = 4


@dataclass(eq=False)
class Tries:
    """Engines that have failed a request. num_failed: attempts at the answer's present part.
    num_resumed: times that it was to go on elsewhere. answered_by: the engine that had it last.
    cached_tokens: at the first prefill engine."""

    losses: Losses = field(default_factory=Losses)
    prefill: list[Engine] = field(default_factory=list[Engine])
    decode: list[Engine] = field(default_factory=list[Engine])
    num_failed: int = 0
    num_resumed: int = 0
    answered_by: Engine | None = None
    cached_tokens: Cached | None = None

    def go_on_elsewhere(self) -> None:
        self.num_resumed, self.num_failed = self.num_resumed + 1, 0

    def fail(self) -> int:
        self.num_failed += 1
        return self.num_failed

    def blame(self, error: ProxyError, engines: Iterable[Engine]) -> None:
        self.decode += [one for one in engines if one.name == error.engine]

    def note(self, opened: Opened) -> None:
        self.answered_by = opened.engine

    @property
    def is_again(self) -> bool:
        return bool(self.num_failed or self.num_resumed)


@dataclass(eq=False)
class Attempt:
    """*transcript*: what the client has already. route: how the answer comes about."""

    _service: Service
    _asked: Asked
    _tries: Tries
    _transcript: Transcript | None
    route: Route = field(default_factory=Route)
    plan: Plan | None = None
    _prefilled: Prefilled | None = None
    _prefilled_at: float = 0.0
    _source: Engine | None = None
    """Prefill engine whose KV cache a decode engine is asked to read."""

    def choose(self) -> None:
        asked, tries = self._asked, self._tries
        is_split = asked.endpoint.is_split
        self.route.path = self.route.path if is_split else DIRECT
        if not asked.endpoint.computes or asked.only is not None:
            return
        self.plan = self._service.chooser.plan(
            *(asked.prefix, asked.tokens, tries.prefill + tries.decode),
            may_hand_over=is_split and asked.local_reason is None,
        )
        if self.plan is not None:
            self.route.placement, self.route.ways = self.plan.as_header(), self.plan.ways
            self._service.metrics.placements.labels(self.plan.kind).inc()

    @property
    def local_reason(self) -> LocalPrefill | None:
        """Reason why no prefill engine is asked, or None."""
        is_local = self.plan is not None and self.plan.prefill is None
        return self._asked.local_reason or (LocalPrefill.PLACEMENT if is_local else None)

    async def prefill(self) -> Opened | None:
        """Have the prompt computed; the answer, if both steps were taken at once."""
        stream, prefilled = self._stream(), None
        metrics = self._service.metrics
        try:
            prefilled = self._prefilled = await self._prefill(stream)
            if prefilled is not None:
                await stream.check_place(prefilled.kv_transfer_params or {})
            if stream.is_under_way and (prefilled is not None or stream.is_alone):
                opened = await self._take_stream(stream, prefilled)
                if opened is not None:
                    return opened
        finally:
            await stream.cancel()
            if prefilled is not None or stream.way is AtOnce.ALONE:
                metrics.streams.labels(stream.way).inc()
        if prefilled is not None and not self._has_reader(prefilled.engine):
            self.release()
            metrics.local_prefills.labels(LocalPrefill.NO_READER).inc()
        self.route.path = LOCAL_PREFILL
        return None

    async def decode(self, changes: Mapping[str, Any]) -> Opened:
        """A decode engine's answer. *changes*: of the body."""
        prefilled, body, tries = self._prefilled, {**self._asked.body, **changes}, self._tries
        if prefilled is not None and prefilled.kv_transfer_params is not None:
            self.route.path, self.route.prefill = TWO_STEP, prefilled.engine.name
            body = two_step.decode_body(body, prefilled.kv_transfer_params)
            self._source = prefilled.engine
        opened = await self._decode(body, self._avoided())
        if tries.num_resumed:
            opened.cached_tokens = tries.cached_tokens
        else:
            tries.cached_tokens = None if prefilled is None else prefilled.cached_tokens
        return opened

    def note_opened(self, opened: Opened) -> None:
        service = self._service
        if self._asked.endpoint.keeps and (name := answer_id(opened.first)):
            service.keepers.note(name, opened.engine)
        seconds = self.hand_over(opened)
        if seconds is not None and opened.cutter is not None:
            service.planner.shared.handover.add(seconds)

    def hand_over(self, opened: Opened) -> float | None:
        """Give the prefill's KV cache to the engine that answers; the seconds that passed since it
        was computed, or None if none was."""
        prefilled, self._prefilled = self._prefilled, None
        if prefilled is None:
            return None
        if prefilled.job is not None:
            if opened.answer is not None:
                opened.answer.source = prefilled.job
            else:
                prefilled.job.read()
        return max(0.0, opened.opened_at - self._prefilled_at)

    def release(self) -> None:
        """Have the prefill engine free what will not be read."""
        prefilled, self._prefilled = self._prefilled, None
        if prefilled is None:
            return
        if prefilled.job is not None:
            prefilled.job.read()
        self._service.upstream.releases.add(prefilled.key)
        if not prefilled.key.value:
            logger.warning(
                "request %s ended before a decode engine answered: unless one has read them, "
                "%s keeps its KV blocks until their lease expires",
                *(self._asked.headers["X-Request-Id"], prefilled.engine.name),
            )

    def blame(self, error: ProxyError) -> None:
        """Leave the next attempt to others: a load fails because of either side."""
        self._tries.blame(error, self._service.upstream.decode_pool.engines)
        if self._source is not None:
            self._tries.prefill.append(self._source)

    def _has_reader(self, source: Engine) -> bool:
        urls = {one.url for one in self._service.upstream.decode_pool.engines if one.usable}
        return urls != {source.url}

    def _avoided(self) -> list[Engine]:
        """Decode engines to ask last: those that failed, and the prefill engine itself, which
        cannot read from itself while it changes its role."""
        source, tries = self._source.url if self._source else None, self._tries
        itself = [one for one in self._service.upstream.decode_pool.engines if one.url == source]
        left = [tries.answered_by] if tries.answered_by is not None else []
        return tries.decode + itself + left

    def _payload(self, body: Mapping[str, Any], is_stream: bool, edit: Edit = unedited) -> Payload:
        asked = self._asked
        losses = self._tries.losses
        return Payload(
            *(asked.path, asked.headers, body, asked.tokens, is_stream, asked.prefix, losses),
            *(self.plan, asked.only, self._tries.is_again, self.route.marks, edit),
        )

    async def _decode(self, body: Mapping[str, Any], avoided: Sequence[Engine]) -> Opened:
        edit, is_stream = unedited, bool(body.get("stream"))
        if (transcript := self._transcript) is not None:
            body, edit = transcript.asking(body), transcript.edit
        payload = self._payload(body, is_stream, edit)
        return await self._service.upstream.decode(payload, avoided, self.route)

    def _stream(self) -> Stream:
        async def ask(body: Mapping[str, Any], source: Engine) -> Opened:
            if not self._has_reader(source):
                message = f"no decode engine can be asked beside {source.name}"
                raise ProxyError(503, "no_engine", message, side=DECODE, can_restart=True)
            return await self._decode(body, [*self._tries.decode, source])

        usable = [one for one in self._service.upstream.decode_pool.engines if one.usable]
        mode, body = self._service.config.stream_chunks, self._asked.body
        refusal = two_step.reason_against(mode, body, usable)
        if self._tries.is_again and refusal != AtOnce.OFF:
            refusal = AtOnce.AGAIN
        return Stream(body, self._payload, ask, refusal)

    async def _take_stream(self, stream: Stream, prefilled: Prefilled | None) -> Opened | None:
        """Answer of a decode engine that was asked at once; None to ask it again with the prefill's
        answer."""
        self.route.path, self.route.prefill = STREAMED, stream.source
        opened = await stream.opened()
        if isinstance(opened, ProxyError):
            if prefilled is None or not opened.can_restart:
                raise opened
            logger.warning(
                "request %s is not streamed: %s", self._asked.headers["X-Request-Id"], opened
            )
            return None
        if prefilled is not None:
            opened.cached_tokens = self._tries.cached_tokens = prefilled.cached_tokens
        return opened

    async def _prefill(self, stream: Stream) -> Prefilled | None:
        """The first step, or None, counted by reason."""
        if (reason := self.local_reason) is None:
            body, failed = two_step.prefill_body(self._asked.body), self._tries.prefill
            payload = self._payload(body, is_stream=False)
            try:
                prefilled = await self._service.upstream.prefill(payload, failed, stream)
            except ProxyError as error:
                is_final = error.kind in (ENGINES_LOST, "overloaded")
                if is_final or error.status < 500 or (error.answer and not error.can_restart):
                    raise
                away = error.kind in ("no_engine", "unreachable", "lost", "draining")
                reason = LocalPrefill.PREFILL_AWAY if away else LocalPrefill.PREFILL_FAILED
                reason = LocalPrefill.AFTER_FAILURE if failed else reason
            else:
                self._prefilled_at = time.monotonic()
                if prefilled.kv_transfer_params is not None:
                    if prefilled.job is not None:
                        prefilled.job.keep()
                    return prefilled
                reason = LocalPrefill.NO_PARAMETERS
                logger.info(
                    "%s returned no kv_transfer_params; has it a KV connector as producer?",
                    prefilled.engine.name,
                )
        self._service.metrics.local_prefills.labels(reason).inc()
        return None


@dataclass(eq=False)
class Steps:
    """A request's way to an answer that has begun, by one attempt after the other."""

    _service: Service
    _asked: Asked
    _outcome: Outcome
    _transcript: Transcript | None
    _life: Life
    tries: Tries = field(default_factory=Tries)
    _attempt: Attempt = field(init=False)  # the latest

    @property
    def may_go_on(self) -> bool:
        return self.tries.num_resumed < MAX_RESUMES

    async def open(self) -> Opened:
        """Begin the answer. Raises `ProxyError`."""
        while True:
            attempt = self._next_attempt()
            self._outcome.route = attempt.route
            try:
                opened = await self._take(attempt)
                self._note_opened(attempt, opened)
                return opened
            except ProxyError as error:
                self._life.enter(Phase.ASKED)
                gave_up = self.tries.fail() >= self._service.config.request_attempts
                if gave_up or not error.can_restart or error.side != DECODE:
                    raise
                attempt.blame(error)
                self._service.metrics.restarts.labels(error.kind).inc()
                text = "retrying request %s from the start: %s"
                logger.warning(text, self._outcome.request_id, error)
            finally:
                attempt.release()

    async def open_elsewhere(self, failure: ProxyError) -> Opened:
        """Go on with an answer after *failure* of its engine."""
        self.tries.go_on_elsewhere()
        self.tries.blame(failure, self._service.upstream.decode_pool.engines)
        return await self.open()

    async def prepare(self, *, is_read: bool) -> None:
        """Have the prompt computed for `go_on`, unless it is read where the answer is."""
        self.tries.go_on_elsewhere()
        attempt = self._next_attempt()
        if not is_read:
            attempt.choose()
            await attempt.prefill()

    async def go_on(self, changes: Mapping[str, Any]) -> Opened:
        """Go on with an answer as prepared. *changes*: of the body."""
        opened = await self._attempt.decode(changes)
        self._attempt.hand_over(opened)
        return opened

    def note_moved(self, opened: Opened) -> None:
        self._outcome.route = self._attempt.route
        self.tries.note(opened)

    def note_end(self, opened: Opened) -> None:
        """Note how a whole answer came, and how it was expected to come."""
        answer, plan, seconds = opened.answer, self._attempt.plan, self._outcome.first_token_seconds
        if answer is None:
            return
        answer.end(time.monotonic())
        self._outcome.tokens, self._outcome.per_token = answer.tokens, answer.per_token
        expected = plan.expected if plan is not None and not self.tries.num_resumed else None
        if expected is not None and seconds is not None and answer.tokens > 1:
            metrics = self._service.metrics
            first, each = metrics.expected_first_token, metrics.expected_per_token
            first.labels("expected").observe(expected.first_token)
            first.labels("real").observe(seconds)
            each.labels("expected").observe(expected.per_token)
            each.labels("real").observe(answer.per_token)

    def release(self) -> None:
        self._attempt.release()

    def _next_attempt(self) -> Attempt:
        self._attempt = Attempt(
            *(self._service, self._asked, self.tries, self._transcript),
            route=self._outcome.route.copy(),
        )
        return self._attempt

    async def _take(self, attempt: Attempt) -> Opened:
        attempt.choose()
        self._life.enter(Phase.PLANNED)
        if self._asked.endpoint.is_split:
            if attempt.local_reason is None:
                self._life.enter(Phase.PREFILLING)
            if (opened := await attempt.prefill()) is not None:
                return opened
        return await attempt.decode({})

    def _note_opened(self, attempt: Attempt, opened: Opened) -> None:
        self._life.enter(Phase.OPENED)
        self.tries.note(opened)
        if not self.tries.num_resumed:
            self._outcome.first_token_seconds = opened.opened_at - self._outcome.began
        if opened.response.status < 400:
            attempt.note_opened(opened)
