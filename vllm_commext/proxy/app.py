"""The HTTP routes: what a client may ask of the proxy."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from vllm_commext.proxy import two_step
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import Deadline
from vllm_commext.proxy.engines import DECODE, PREFILL, EnginePool
from vllm_commext.proxy.failures import SIDE_PROXY, ClientGoneError, ProxyError
from vllm_commext.proxy.health import HealthMonitor
from vllm_commext.proxy.metrics import CONTENT_TYPE, ProxyMetrics
from vllm_commext.proxy.relay import Relay
from vllm_commext.proxy.upstream import Prefilled, Upstream, open_session

logger = logging.getLogger("vllm.commext.proxy")

ENDPOINTS = {
    "/v1/completions": two_step.COMPLETIONS,
    "/v1/chat/completions": two_step.CHAT,
}
REQUEST_ID = "X-Request-Id"
SIDE = "X-Commext-Side"
# A data-parallel rank is not among them: it cannot be right for both engines.
_TO_ENGINES = (
    "Authorization",
    "traceparent",
    "tracestate",
    "X-Session-ID",
    "X-Vllm-Priority",
)
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ProxyApp:
    """State and routes of one proxy."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.prefill_pool = EnginePool(PREFILL, config.prefill)
        self.decode_pool = EnginePool(DECODE, config.decode)
        self.pools = (self.prefill_pool, self.decode_pool)
        self.metrics = ProxyMetrics(self.pools)
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def build(self) -> web.Application:
        """The application; its engines are checked once when it starts."""
        app = web.Application(
            middlewares=[answer_errors], client_max_size=self.config.max_body_bytes
        )
        app.cleanup_ctx.append(self._resources)
        for path in ENDPOINTS:
            app.router.add_post(path, self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.render_metrics)
        return app

    async def _resources(self, _: web.Application) -> AsyncIterator[None]:
        async with open_session() as session:
            self._upstream = Upstream(
                session, self.config, self.prefill_pool, self.decode_pool, self.metrics
            )
            async with HealthMonitor(session, self.config, self.pools).running():
                yield

    async def drain(self) -> bool:
        """Refuse new requests and wait for the running ones; True if all have ended in time."""
        self._draining = True
        try:
            with Deadline(self.config.drain_timeout_seconds):
                await self._idle.wait()
        except asyncio.TimeoutError:
            return False
        return True

    async def health(self, _: web.Request) -> web.Response:
        """200 if a request can take the two steps now, else 503; details of every engine."""
        is_up = all(pool.num_healthy for pool in self.pools) and not self._draining
        detail: dict[str, Any] = {"status": "ok" if is_up else "unavailable"}
        for pool in self.pools:
            detail[pool.role] = [engine.as_json() for engine in pool.engines]
        return web.json_response(detail, status=200 if is_up else 503)

    async def render_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        """An engine's own list of models."""
        status, answer = await self._upstream.get(request.path, _passed_headers(request))
        return web.Response(
            status=status, body=answer.body, headers={"Content-Type": answer.content_type}
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Both endpoints that generate: the two steps, or a decode engine alone."""
        with self._admitted(request) as outcome:
            headers = _engine_headers(request)
            body = two_step.parse_body(await self._read_body(request))
            prefilled = await self._prefill(request.path, body, headers)
            try:
                return await self._decode(request, body, prefilled, headers, outcome)
            except (ProxyError, asyncio.CancelledError):
                if prefilled is not None and not outcome.reached_decode:
                    _log_unread_blocks(prefilled, headers[REQUEST_ID])
                raise

    async def _prefill(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Prefilled | None:
        """Step 1, or None (counted, with the reason) if the request goes without it."""
        reason = two_step.local_prefill_reason(ENDPOINTS[path], body)
        if reason is None:
            payload = two_step.encode(two_step.prefill_body(body))
            prefilled = await self._upstream.prefill(path, payload, headers)
            if prefilled.kv_transfer_params is not None:
                return prefilled
            reason = two_step.NO_PARAMETERS
            logger.info(
                "%s returned no kv_transfer_params; does it run with a KV connector as producer?",
                prefilled.engine.name,
            )
        self.metrics.local_prefills.labels(reason).inc()
        return None

    async def _decode(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        prefilled: Prefilled | None,
        headers: Mapping[str, str],
        outcome: "Outcome",
    ) -> web.StreamResponse:
        told = {REQUEST_ID: headers[REQUEST_ID], "X-Commext-Path": "local-prefill"}
        if prefilled is not None and prefilled.kv_transfer_params is not None:
            body = two_step.decode_body(body, prefilled.kv_transfer_params)
            told |= {"X-Commext-Path": "two-step", "X-Commext-Prefill": prefilled.engine.name}
        payload = two_step.encode(body)
        async with self._upstream.decode(request.path, payload, headers) as (engine, response):
            outcome.reached_decode = True
            told["X-Commext-Decode"] = engine.name
            if response.status >= 400:
                told[SIDE] = DECODE
                outcome.set("engine_error", DECODE)
            relayed = await Relay(request, engine, response, self.config).run(told)
        if relayed.failure is not None:
            outcome.set(relayed.failure.kind, relayed.failure.side)
            logger.warning("request %s broke: %s", headers[REQUEST_ID], relayed.failure)
        return relayed.response

    async def _read_body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise ProxyError(
                415,
                "bad_request",
                f"expected Content-Type: application/json, got {request.content_type!r}",
            )
        seconds = self.config.client_timeout_seconds
        try:
            with Deadline(seconds):
                return await request.read()
        except asyncio.TimeoutError as error:
            message = f"the request's body did not arrive within {seconds} s"
            raise ProxyError(408, "bad_request", message) from error
        except web.HTTPRequestEntityTooLarge as error:
            message = f"expected a body of at most {self.config.max_body_bytes} bytes"
            raise ProxyError(413, "bad_request", message) from error

    @contextmanager
    def _admitted(self, request: web.Request) -> Iterator["Outcome"]:
        """Count a request in and, whatever becomes of it, out again."""
        outcome = Outcome()
        try:
            self._enter()
            try:
                yield outcome
            finally:
                self._leave()
        except ProxyError as error:
            outcome.set(error.kind, error.side)
            raise
        except (ClientGoneError, asyncio.CancelledError):
            outcome.set("shutdown" if self._draining else "client_gone", SIDE_PROXY)
            raise
        except Exception:
            outcome.set("internal", SIDE_PROXY)
            raise
        finally:
            endpoint = ENDPOINTS[request.path]
            self.metrics.requests.labels(endpoint, outcome.kind, outcome.side).inc()

    def _enter(self) -> None:
        if self._draining:
            raise ProxyError(503, "shutdown", "this proxy is shutting down; ask another one")
        if self.num_in_flight >= self.config.max_in_flight:
            message = f"{self.num_in_flight} requests are being served, which is the limit; retry"
            raise ProxyError(503, "overloaded", message)
        self.num_in_flight += 1
        self.metrics.in_flight.set(self.num_in_flight)
        self._idle.clear()

    def _leave(self) -> None:
        self.num_in_flight -= 1
        self.metrics.in_flight.set(self.num_in_flight)
        if self.num_in_flight == 0:
            self._idle.set()


class Outcome:
    """What became of one request, for the count and the log."""

    def __init__(self) -> None:
        self.reached_decode = False
        self.set("ok", SIDE_PROXY)

    def set(self, kind: str, side: str) -> None:
        self.kind, self.side = kind, side


def _passed_headers(request: web.Request) -> dict[str, str]:
    headers = {name: request.headers[name] for name in _TO_ENGINES if name in request.headers}
    for name, value in headers.items():
        if not value.isascii():
            raise ProxyError(400, "bad_request", f"expected ASCII in the header {name}")
    return headers


def _engine_headers(request: web.Request) -> dict[str, str]:
    headers = _passed_headers(request)
    given = request.headers.get(REQUEST_ID, "")
    headers[REQUEST_ID] = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
    headers["Content-Type"] = "application/json"
    return headers


def _log_unread_blocks(prefilled: Prefilled, request_id: str) -> None:
    logger.warning(
        "request %s ended before a decode engine answered: unless one has read them, "
        "%s keeps its KV blocks until their lease expires",
        request_id,
        prefilled.engine.name,
    )


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as a JSON object that names the side at fault."""
    try:
        return await handler(request)
    except ProxyError as error:
        return _error_response(error)
    except web.HTTPException as error:
        message = f"{error.reason}: {request.method} {request.path} is none of this proxy's routes"
        return _error_response(ProxyError(error.status, "bad_request", message))
    except ClientGoneError as gone:
        logger.info("%s", gone)
        return web.Response(status=499)  # nobody reads it
    except Exception:
        logger.exception("unexpected error in the proxy")
        return _error_response(ProxyError(500, "internal", "unexpected error; see the log"))


def _error_response(error: ProxyError) -> web.Response:
    headers = {SIDE: error.side}
    if error.status == 503:
        headers["Retry-After"] = "1"
    if error.answer is None:
        return web.json_response(error.as_json(), status=error.status, headers=headers)
    headers["Content-Type"] = error.answer.content_type
    return web.Response(status=error.status, body=error.answer.body, headers=headers)
