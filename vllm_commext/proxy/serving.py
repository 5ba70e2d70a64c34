"""One request's way through the engines: two steps, or a decode engine alone."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from vllm_commext.proxy import streams, two_step
from vllm_commext.proxy.access import SIDE
from vllm_commext.proxy.affinity import NO_PREFIX, SESSION_HEADER, prefix_of
from vllm_commext.proxy.body import num_tokens
from vllm_commext.proxy.choice import Chooser, Plan
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines import DECODE, Engine, EnginePool, SideChannelFields, places_of
from vllm_commext.proxy.intake import Intake
from vllm_commext.proxy.metrics import ProxyMetrics
from vllm_commext.proxy.outcome import (
    DIRECT,
    ENGINES_LOST,
    LOCAL_PREFILL,
    STREAMED,
    TWO_STEP,
    Losses,
    Outcome,
    ProxyError,
)
from vllm_commext.proxy.placement import Planner
from vllm_commext.proxy.relay import Relay
from vllm_commext.proxy.response import Opened
from vllm_commext.proxy.streams import Stream
from vllm_commext.proxy.two_step import ENDPOINTS, AtOnce, LocalPrefill
from vllm_commext.proxy.upstream import Payload, Prefilled, Upstream

logger = logging.getLogger("vllm.commext.proxy")

# Passed to a decode engine as they are: no completion, or an object that stays at that engine.
DIRECT_ENDPOINTS = {
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/chat/completions/batch": "chat_batch",
    "/inference/v1/generate": "generate",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


class Service:
    """Serves requests that have been admitted."""

    def __init__(
        self,
        config: ProxyConfig,
        upstream: Upstream,
        pools: Mapping[str, EnginePool],
        metrics: ProxyMetrics,
        planner: Planner,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._planner = planner
        self._chooser = Chooser(config.placement, planner, pools)
        self._pools = pools
        self._metrics = metrics

    async def serve(
        self, request: web.Request, intake: Intake, headers: Mapping[str, str], outcome: Outcome
    ) -> web.StreamResponse:
        """Answer *request*, which is whole. Raises `ProxyError` and `ClientGoneError`."""
        opened = await self._open(request, intake, headers, outcome)
        try:
            return await self._relay(request, opened, outcome)
        finally:
            opened.close()

    async def _open(
        self,
        request: web.Request,
        intake: Intake,
        headers: Mapping[str, str],
        outcome: Outcome,
    ) -> Opened:
        """An answer that has begun. The body is held no longer than until then."""
        try:
            session = request.headers.get(SESSION_HEADER)
            attempts = _Attempts(request.path, intake.body, headers, self._pools[DECODE])
            if self._config.affinity and request.path in ENDPOINTS:
                attempts.remember(session)
            while True:
                try:
                    opened = await self._attempt(attempts, outcome)
                    if opened.response.status < 400:
                        attempts.prefilled = None  # read, or on its way to be released by who reads
                    return opened
                except ProxyError as error:
                    attempts.num_failed += 1
                    gave_up = attempts.num_failed >= self._config.request_attempts
                    if gave_up or not error.can_restart or error.side != DECODE:
                        raise
                    attempts.note(error)
                    self._metrics.restarts.labels(error.kind).inc()
                    logger.warning("request %s is served anew: %s", outcome.request_id, error)
                finally:
                    self._release(attempts, outcome.request_id)
        finally:
            intake.release()

    async def _attempt(self, attempts: "_Attempts", outcome: Outcome) -> Opened:
        prefilled, body = None, attempts.body
        if attempts.path in ENDPOINTS:
            self._plan(attempts, outcome)
            stream = self._stream(attempts, outcome)
            try:
                prefilled = attempts.prefilled = await self._prefill(attempts, stream)
                if prefilled is not None:
                    await stream.check_place(prefilled.kv_transfer_params or {})
                if prefilled is not None and stream.is_under_way:
                    opened = await self._take_stream(stream, prefilled, outcome)
                    if opened is not None:
                        return opened
            finally:
                await stream.cancel()
                if prefilled is not None:
                    self._metrics.streams.labels(stream.way).inc()
            if prefilled is not None and not attempts.has_reader(prefilled.engine):
                self._release(attempts, outcome.request_id)
                self._metrics.local_prefills.labels(LocalPrefill.NO_READER).inc()
                prefilled = None
            outcome.path = LOCAL_PREFILL
        else:
            outcome.path = DIRECT
        if prefilled is not None and prefilled.kv_transfer_params is not None:
            outcome.path, outcome.prefill = TWO_STEP, prefilled.engine.name
            body = two_step.decode_body(body, prefilled.kv_transfer_params)
            attempts.prefilled_by = prefilled.engine
        return await self._decode(attempts.payload(body), attempts.avoided(), outcome)

    def _plan(self, attempts: "_Attempts", outcome: Outcome) -> None:
        """Decide where this attempt is to go, unless the engines' roles do."""
        attempts.plan = plan = self._chooser.plan(
            attempts.prefix,
            attempts.tokens,
            attempts.body,
            attempts.failed_prefill + attempts.failed_decode,
            self._local_reason(attempts) is None,
        )
        if plan is not None:
            outcome.placement = plan.as_header()
            self._metrics.placements.labels(plan.kind).inc()

    def _local_reason(self, attempts: "_Attempts") -> LocalPrefill | None:
        """Reason why one engine has to take both steps."""
        return two_step.local_prefill_reason(
            ENDPOINTS[attempts.path], attempts.body, self._config.min_prompt_tokens
        )

    async def _decode(
        self, payload: Payload, avoided: Sequence[Engine], outcome: Outcome
    ) -> Opened:
        """A decode engine's answer, which *outcome* names."""

        def note_asked(engine: Engine) -> None:
            outcome.decode = engine.name

        opened = await self._upstream.decode(payload, avoided, note_asked)
        outcome.first_token_seconds = opened.opened_at - outcome.began
        return opened

    def _release(self, attempts: "_Attempts", request_id: str) -> None:
        """Have the prefill engine free what no decode engine will read."""
        prefilled, attempts.prefilled = attempts.prefilled, None
        if prefilled is None:
            return
        self._upstream.releases.add(prefilled.key)
        if not prefilled.key.value:
            logger.warning(
                "request %s ended before a decode engine answered: unless one has read them, "
                "%s keeps its KV blocks until their lease expires",
                request_id,
                prefilled.engine.name,
            )

    def _stream(self, attempts: "_Attempts", outcome: Outcome) -> Stream:
        """An attempt at both steps at once, where that may be."""

        async def ask(payload: Payload, source: Engine) -> Opened:
            if not attempts.has_reader(source):
                message = f"no decode engine can be asked beside {source.name}"
                raise ProxyError(503, "no_engine", message, side=DECODE, can_restart=True)
            return await self._decode(payload, [*attempts.failed_decode, source], outcome)

        config = self._config
        refusal = streams.refusal(
            config.stream_chunks,
            attempts.body,
            (engine for engine in self._pools[DECODE].engines if engine.usable),
        )
        if attempts.num_failed and refusal != AtOnce.OFF:
            refusal = AtOnce.AGAIN
        places = attempts.places() if self._config.reuse_blocks else []
        return Stream(attempts.body, attempts.payload, ask, refusal=refusal, places=places)

    async def _take_stream(
        self, stream: Stream, prefilled: Prefilled, outcome: Outcome
    ) -> Opened | None:
        """The decode engine's answer, where both were asked at once and the prefill engine has
        answered; None where it has failed, to be asked once more with that answer."""
        outcome.path, outcome.prefill = STREAMED, prefilled.engine.name
        opened = await stream.opened()
        if isinstance(opened, ProxyError):
            if not opened.can_restart:
                raise opened
            logger.warning("request %s is not streamed: %s", outcome.request_id, opened)
            return None
        opened.cached_tokens = prefilled.cached_tokens
        return opened

    async def _prefill(self, attempts: "_Attempts", stream: Stream) -> Prefilled | None:
        """Step 1, or None (counted, with the reason) if the request goes without it."""
        reason, plan = self._local_reason(attempts), attempts.plan
        if reason is None and plan is not None and plan.prefill is None:
            reason = LocalPrefill.PLACEMENT
        if reason is None:
            body = two_step.prefill_body(attempts.body)
            payload = attempts.payload(body, is_stream=False)
            try:
                prefilled = await self._upstream.prefill(
                    payload,
                    attempts.failed_prefill,
                    stream.prefill_payload,
                )
            except ProxyError as error:
                if error.status < 500 or error.kind in (ENGINES_LOST, "overloaded"):
                    raise
                away = error.kind in ("no_engine", "unreachable", "lost", "draining")
                reason = LocalPrefill.PREFILL_AWAY if away else LocalPrefill.PREFILL_FAILED
                reason = LocalPrefill.AFTER_FAILURE if attempts.failed_prefill else reason
            else:
                attempts.prefilled_at = time.monotonic()
                if prefilled.kv_transfer_params is not None:
                    return prefilled
                reason = LocalPrefill.NO_PARAMETERS
                logger.info(
                    "%s returned no kv_transfer_params; has it a KV connector as producer?",
                    prefilled.engine.name,
                )
        self._metrics.local_prefills.labels(reason).inc()
        return None

    async def _relay(
        self, request: web.Request, opened: Opened, outcome: Outcome
    ) -> web.StreamResponse:
        metrics, engine = self._metrics, opened.engine.name
        told = outcome.headers()
        outcome.status = opened.response.status
        if opened.response.status >= 400:
            told[SIDE] = DECODE
            outcome.set("engine_error", DECODE)
        elif opened.cutter is not None and outcome.first_token_seconds is not None:
            metrics.first_token_seconds.labels(engine).observe(outcome.first_token_seconds)
        on_gap = metrics.inter_token_seconds.labels(engine).observe
        relay = Relay(request, opened, self._config, on_gap)
        try:
            relayed = await relay.run(told)
        finally:
            outcome.is_answered = relay.has_sent_end
            if relay.has_sent_end and opened.answer is not None:
                opened.answer.end(time.monotonic())
        if relayed.failure is not None:
            outcome.set(relayed.failure.kind, relayed.failure.side)
            logger.warning("request %s broke: %s", outcome.request_id, relayed.failure)
        elif opened.response.status < 400:
            metrics.request_seconds.labels(engine).observe(outcome.seconds)
        return relayed.response


class _Attempts:
    """A request's body, and the engines that have failed it so far."""

    def __init__(
        self, path: str, body: Any, headers: Mapping[str, str], decode: EnginePool
    ) -> None:
        self._decode = decode
        self.path = path
        self.body = two_step.checked_body(body)
        self.num_failed = 0
        self.failed_prefill: list[Engine] = []
        self.failed_decode: list[Engine] = []
        self.prefilled_by: Engine | None = None
        self.prefilled: Prefilled | None = None
        self.plan: Plan | None = None
        self.prefilled_at = 0.0
        self.prefix = NO_PREFIX
        self._headers = headers
        self._prompt = two_step.prompt_of(ENDPOINTS.get(path), self.body)
        self.tokens = num_tokens(self._prompt)
        self._losses = Losses()

    def remember(self, session: str | None) -> None:
        """Have engines chosen that may hold the beginning of the prompt."""
        self.prefix = prefix_of(self.body, self._prompt, session)

    def payload(self, body: Mapping[str, Any], is_stream: bool | None = None) -> Payload:
        """Payload for an engine; by default the answer streams if the client's does."""
        streams = bool(body.get("stream")) if is_stream is None else is_stream
        return Payload(
            *(self.path, self._headers, body, self.tokens, streams, self.prefix, self._losses),
            plan=self.plan,
        )

    def has_reader(self, source: Engine) -> bool:
        """Whether another engine than *source* may be asked for the answer, now or later."""
        urls = {one.url for one in self._decode.engines if one.usable}
        return urls != {source.url}

    def places(self) -> list[SideChannelFields]:
        """Side channels where blocks of the prompt's beginning may be on offer."""
        return places_of(self._decode.engines, self.prefix)

    def avoided(self) -> list[Engine]:
        """Decode engines that had better not answer: an engine cannot read from itself, which
        matters while one changes its role."""
        source = self.prefilled_by.url if self.prefilled_by else None
        itself = [one for one in self._decode.engines if one.url == source]
        return self.failed_decode + itself

    def note(self, error: ProxyError) -> None:
        """Leave the next attempt to others: a load fails because of either side."""
        self.failed_decode += [one for one in self._decode.engines if one.name == error.engine]
        if self.prefilled_by is not None:
            self.failed_prefill.append(self.prefilled_by)
            self.prefilled_by = None
