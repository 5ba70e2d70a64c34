"""Asks the engines, tries others, and bounds each wait."""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import aiohttp

from vllm_commext.proxy import errors_phases
from vllm_commext.proxy.config import SOCKET_BYTES, ProxyConfig, engine_tls
from vllm_commext.proxy.engines.affinity import NO_PREFIX, Prefix
from vllm_commext.proxy.engines.choice import Chooser, Plan, least_work, orders_prompts, reads_load
from vllm_commext.proxy.engines.engine import PREFILL, Engine, EnginePool
from vllm_commext.proxy.errors_phases import Mark, ProxyError, Route
from vllm_commext.proxy.http.endpoint_prompts import ENDPOINTS, Endpoint
from vllm_commext.proxy.http.json_members import encode
from vllm_commext.proxy.policy.engine_load import Answer, Job
from vllm_commext.proxy.session import failures
from vllm_commext.proxy.session.failures import Cached, Deadline, Opened, Tries
from vllm_commext.proxy.session.prometheus_metrics import ProxyMetrics
from vllm_commext.proxy.session.release_unread_prefills import Key, Releases
from vllm_commext.proxy.session.resume_memory import Room

logger = logging.getLogger("vllm.commext.proxy")

T = TypeVar("T")
Told = tuple[int, Mapping[str, str], bytes]
KEY_BYTES = 16
PICK_INTERVAL_SECONDS = 0.05
WHOLE_TIMES = 6  # as long as a stream's first event may a whole answer take
LATE_SECONDS = 5.0  # of a prefill engine's answer after the first token of the decode engine's
_MAX_FETCHES = 8
"""Questions about engines that are asked at a time."""
MAX_JOINED_BYTES = 256 << 10
_WINDOW_BYTES = 128 << 10


@dataclass(frozen=True)
class Prefilled:
    """A prefill's answer. key, job: to release and to forget it. cached_tokens: of its usage."""

    engine: Engine
    kv_transfer_params: dict[str, Any] | None
    key: Key
    job: Job | None = None
    cached_tokens: Cached | None = None


@dataclass(eq=False)
class Payload:
    """Request to an engine. tokens: about those of the prompt. edit: removes from its first events
    what the client has not asked for. reader: a decode engine's answer to the prompt."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    tokens: int = 0
    prefix: Prefix = NO_PREFIX
    tries: Tries = field(default_factory=Tries)
    plan: Plan | None = None
    marks: list[Mark] = field(default_factory=list[Mark])
    edit: Callable[[bytes], bytes | None] | None = None
    reader: asyncio.Task[Opened] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.path]

    def mark(self, what: str, engine: Engine) -> None:
        self.marks.append((time.monotonic(), what, engine.name))

    @property
    def is_loading(self) -> bool:
        params = self.body.get("kv_transfer_params") or {}
        return bool(params.get("do_remote_prefill") or params.get("reuse_from"))

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def streams(self) -> bool | None:
        asked = self.body.get("stream") or False
        return asked if self.endpoint.is_split and isinstance(asked, bool) else None

    @property
    def computes(self) -> bool:
        """True where engines' time goes by its tokens."""
        return self.tokens > 0 and self.endpoint.computes

    def content(self) -> tuple[bytes | AsyncIterator[bytes], int]:
        """Bytes, or windows of many, and their number."""
        pieces = encode(self.body)
        num_bytes = sum(map(len, pieces))
        is_short = num_bytes <= MAX_JOINED_BYTES
        return b"".join(pieces) if is_short else _windows(pieces), num_bytes


async def _windows(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), _WINDOW_BYTES):
            yield bytes(piece[start : start + _WINDOW_BYTES])
            await asyncio.sleep(0)


def open_session(config: ProxyConfig) -> aiohttp.ClientSession:
    """Keep connections for less time than engines do, so that none closes under a request. An
    answer that is given up takes its connection along, which aborts it at the engine."""
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=config.keep_alive_seconds, ssl=engine_tls(config)
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),  # else an engine's cookie goes along with all requests
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        read_bufsize=SOCKET_BYTES // 8,
    )


def _bound_socket(response: aiohttp.ClientResponse) -> None:
    """Bound what comes at a time, and waits in memory for a client that does not read."""
    transport = response.connection.transport if response.connection is not None else None
    one = transport.get_extra_info("socket") if transport is not None else None
    if one is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES // 4)


@dataclass(eq=False)
class Upstream:
    _session: aiohttp.ClientSession
    config: ProxyConfig
    prefill_pool: EnginePool
    decode_pool: EnginePool
    metrics: ProxyMetrics

    def __post_init__(self) -> None:
        self.releases = Releases(self._post_release, self.metrics.steps.releases)
        bound = self.config.health_timeout_seconds
        timeout = aiohttp.ClientTimeout(total=None, connect=bound, sock_connect=bound)
        self._bounds: dict[str, Any] = {"timeout": timeout, "allow_redirects": False}
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)

    async def prefill(
        self,
        payload: Payload,
        failed: Sequence[Engine],
        payload_of: Callable[[Engine, str], Awaitable[Payload]],
        outlives: Callable[[ProxyError], Awaitable[bool]],
    ) -> Prefilled:
        """First step: another engine is asked if one cannot be reached or answers 5xx, unless the
        request *outlives* that. *payload_of*: for an engine and a key. Raises `ProxyError`."""

        authorization, model = payload.headers.get("Authorization"), payload.body.get("model")
        model = model if isinstance(model, str) else None

        async def ask(engine: Engine, held: int) -> Prefilled:
            value = secrets.token_hex(KEY_BYTES) if engine.capabilities.key_ranks else ""
            key = Key(engine, authorization, model, value)
            taken = await self._turn(engine, payload, held, PREFILL)
            try:
                asked = await payload_of(engine, key.value)
                params, cached, job = await self._prefill_on(engine, asked, held)
            except BaseException as error:
                if not isinstance(error, ProxyError) or error.status >= 500:
                    self.releases.add(key)  # it may have ended well all the same
                if isinstance(error, ProxyError) and await outlives(error):
                    error.be_final()
                raise
            finally:
                engine.repeats.give_back(taken)
            return Prefilled(engine, params, key, job, cached)

        began, num = time.monotonic(), self.config.prefill_attempts
        avoided = [one for one in self.prefill_pool.engines if one.state.is_silent]
        avoided += failed
        result = await self._ask(self.prefill_pool, num, payload, ask, avoided, 0.0)
        self.metrics.steps.prefill_seconds.observe(time.monotonic() - began)
        return result

    async def decode(self, payload: Payload, failed: Sequence[Engine], route: Route) -> Opened:
        """Second step: an answer that has begun, the caller's to close. Another engine is asked
        while none can be connected to; one of *failed* last. Raises `ProxyError`."""

        async def ask(engine: Engine, held: int) -> Opened:
            route.decode = engine.name
            if payload.is_loading:
                return await self._open_at(engine, payload, held)
            taken = await self._turn(engine, payload, held)
            try:
                return await self._open_at(engine, payload, held)
            finally:
                engine.repeats.give_back(taken)

        pool, config = self.decode_pool, self.config
        others = [engine for engine in pool.engines if engine.usable and engine not in failed]
        others = others if payload.tries.only is None else []
        tried, began = list(failed) if others else [], time.monotonic()
        wait = config.engine_wait_seconds
        opened = await self._ask(pool, config.decode_attempts, payload, ask, tried, wait)
        self.metrics.steps.decode_headers_seconds.observe(time.monotonic() - began)
        return opened

    async def fetch(self, path: str, headers: Mapping[str, str]) -> Told:
        """Answer of any engine, decode engines first: status, headers, body."""
        seconds = self.config.health_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._fetches.acquire()
        except TimeoutError:
            message = f"{_MAX_FETCHES} such requests wait for their engines; retry later"
            raise ProxyError(503, "overloaded", message) from None
        try:
            return await self.ask_any("GET", path, headers)
        finally:
            self._fetches.release()

    async def ask_any(self, method: str, path: str, headers: Mapping[str, str]) -> Told:
        """As `fetch`, by any *method*; the caller bounds how many ask at a time."""
        seconds = self.config.health_timeout_seconds
        chosen = least_work(self.decode_pool) or least_work(self.prefill_pool)
        if chosen is None:
            raise failures.no_engine(self.decode_pool)
        engine, _ = chosen
        url, bounds = engine.url + path, dict(self._bounds)
        bounds["timeout"] = aiohttp.ClientTimeout(total=seconds)
        with failures.of(engine, seconds):
            async with self._session.request(method, url, headers=headers, **bounds) as response:
                answer = await failures.read_answer(engine, response)
                return response.status, answer.headers, answer.body

    async def _ask(
        self,
        pool: EnginePool,
        num_attempts: int,
        payload: Payload,
        ask: Callable[[Engine, int], Awaitable[T]],
        tried: list[Engine],
        wait_seconds: float,
    ) -> T:
        failure: ProxyError | None = None
        while num_attempts > 0:
            chosen = await self._pick(pool, payload, tried, 0.0 if failure else wait_seconds)
            if chosen is None:
                break
            engine, held = chosen
            if failure is not None:
                self.metrics.steps.retries.labels(pool.role).inc()
            tried.append(engine)
            try:
                return await ask(engine, held)
            except ProxyError as error:
                level = logging.WARNING if error.status >= 500 else logging.INFO
                logger.log(level, "%s failed: %s", engine.name, error)
                if not error.can_retry:
                    raise
                failure = error
                num_attempts -= error.kind != "draining"  # each engine says so once
        raise failure or failures.no_engine(pool)

    async def _pick(
        self, pool: EnginePool, payload: Payload, tried: Sequence[Engine], wait_seconds: float
    ) -> tuple[Engine, int] | None:
        """An engine not tried yet, and the tokens it holds. A role without any gets *wait_seconds*:
        an engine is back before its next check. So does a request that has lost one, until it is
        known which engine that leaves."""
        end = time.monotonic() + wait_seconds
        planned = payload.plan.engine(pool.role) if payload.plan is not None else None
        others = [one for one in pool.engines if payload.tries.only not in (None, one)]
        chosen: tuple[Engine, int] | None = None
        if planned is not None and planned.usable and planned not in tried:
            chosen = planned, planned.memory.held_tokens(payload.prefix)
        has_lost = bool(payload.tries.losses.engines)
        while True:
            chosen = chosen or least_work(pool, [*tried, *others], payload.prefix)
            is_known = chosen is not None and not (has_lost and chosen[0].state.suspected)
            if is_known or time.monotonic() >= end:
                break
            chosen = None
            await asyncio.sleep(PICK_INTERVAL_SECONDS)
        if chosen is None:
            return None
        self.metrics.steps.note_held(pool.role, chosen[1], payload.tokens - chosen[1])
        return chosen

    async def _turn(self, engine: Engine, payload: Payload, held: int, side: str = "") -> int:
        """Wait until *engine* may compute a prompt; the tokens to give back once one that is
        repeated is computed."""
        has_turns = payload.computes and self._orders(engine)
        is_repeated = payload.computes and payload.tries.is_again
        if not (has_turns or is_repeated):
            return 0
        tokens, taken, seconds = payload.tokens - held, 0, self.config.prefill_timeout_seconds
        try:
            with (
                engine.work.counted(tokens),
                failures.of(engine, seconds, payload.tries.losses, side),
                Deadline(seconds, engine.work.on_lost),
            ):
                taken = await engine.repeats.take(tokens) if is_repeated else 0
                if has_turns:
                    is_lost = payload.plan is not None and payload.plan.is_lost
                    await engine.turns.take(tokens, held, is_lost)
        except BaseException:
            engine.repeats.give_back(taken)
            raise
        return taken

    def _orders(self, engine: Engine) -> bool:
        """True if prompts wait here until an engine of one rank has nearly computed others."""
        is_known = len(engine.capabilities.ranks) == 1 and engine.load.speed.is_known
        return is_known and orders_prompts(self.config, self.decode_pool)

    async def _prefill_on(
        self, engine: Engine, payload: Payload, held: int
    ) -> tuple[dict[str, Any] | None, Cached | None, Job | None]:
        seconds = self.config.prefill_timeout_seconds
        with (
            engine.work.counted(payload.tokens - held),
            self._computing(engine, payload, held) as job,
            failures.of(engine, seconds, payload.tries.losses, PREFILL),
            engine.state.awaited(seconds),
            Deadline(seconds, engine.work.on_lost) as deadline,
        ):
            if payload.reader is not None:
                payload.reader.add_done_callback(partial(deadline.hurry, LATE_SECONDS))
            payload.mark(errors_phases.PREFILL_ASKED, engine)
            response = await self._post(engine, payload)
            try:
                answer = await failures.read_answer(engine, response)
            finally:
                failures.close(response)
                payload.mark(errors_phases.PREFILLED, engine)
            params, cached = await failures.prefilled_params(engine, response.status, answer)
            engine.note_answer(payload.prefix)
            return params, cached, job

    async def _post_release(
        self, engine: Engine, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ProxyError | None:
        try:
            await self._prefill_on(engine, Payload("/v1/completions", headers, body), 0)
        except ProxyError as error:
            return error
        return None

    async def _open_at(self, engine: Engine, payload: Payload, held: int) -> Opened:
        is_stream, has_other = payload.is_stream, self.decode_pool.has_other(engine, False)
        seconds = self.config.decode_timeout_seconds * (1 if is_stream else WHOLE_TIMES)
        if is_stream and has_other and engine.state.silent_until:  # it is tried again
            seconds = min(seconds, self.config.decode_idle_timeout_seconds)
        with ExitStack() as work:
            work.enter_context(engine.work.counted(payload.tokens))
            answer, job = self._expected(engine, payload, held)

            def forget() -> None:
                now = time.monotonic()
                for one in (answer, job):
                    if one is not None:
                        one.end(now, False)

            work.callback(forget)
            with (
                failures.of(engine, seconds, payload.tries.losses, may_restart=has_other),
                engine.state.awaited(seconds),
                Deadline(seconds, engine.work.on_lost),
            ):
                payload.mark(errors_phases.DECODE_ASKED, engine)
                response = await self._post(engine, payload)
                payload.mark(errors_phases.DECODE_ANSWERS, engine)
                work.callback(failures.close, response)
                if is_stream:
                    _bound_socket(response)
                first, cutter = await failures.read_opening(
                    *(engine, response, payload.endpoint.form, payload.streams, payload.edit)
                )
            if response.status < 400:
                engine.note_answer(payload.prefix)
            has_end, now = payload.streams is not None, time.monotonic()
            begins = response.status < 400 and cutter is not None
            if job is not None:
                job.end(now, begins)
            if begins and answer is not None:
                answer.begin(now)
            return Opened(engine, response, first, cutter, has_end, now, work.pop_all(), answer)

    @contextmanager
    def _computing(self, engine: Engine, payload: Payload, held: int) -> Iterator[Job | None]:
        job, is_done = None, False
        if payload.computes and reads_load(self.config, self.decode_pool):
            job = engine.load.ask(payload.tokens - held, held, time.monotonic())
        try:
            yield job
            is_done = True
        finally:
            if job is not None:
                job.end(time.monotonic(), is_done)

    def _expected(
        self, engine: Engine, payload: Payload, held: int
    ) -> tuple[Answer | None, Job | None]:
        if not (payload.computes and reads_load(self.config, self.decode_pool)):
            return None, None
        now, load, plan = time.monotonic(), engine.load, payload.plan
        job, due = None, now
        if plan is not None:
            due = plan.first_token_at
            plan.note_sent()
        if not payload.is_loading:
            job = load.ask(payload.tokens - held, held, now, is_seen=payload.is_stream)
            due = job.until
        answer = load.expect(payload.tokens, due, payload.is_loading)
        return answer, job

    async def _post(self, engine: Engine, payload: Payload) -> aiohttp.ClientResponse:
        content, num_bytes = payload.content()
        url, headers = engine.url + payload.path, dict(payload.headers)
        headers["Content-Length"] = str(num_bytes)
        response = await self._session.post(url, data=content, headers=headers, **self._bounds)
        failures.check_not_draining(engine, response)
        return response


class Service:
    """Engines' access, placement and room (None: no stream is resumed), shared by all requests."""

    def __init__(self, upstream: Upstream, chooser: Chooser, max_moves: int) -> None:
        self.upstream, self.chooser = upstream, chooser
        self.config, self.metrics = upstream.config, upstream.metrics
        self.room = Room(self.config.resume_bytes) if self.config.resume else None
        self.turns, self.bulk = asyncio.Semaphore(max_moves), asyncio.Lock()
