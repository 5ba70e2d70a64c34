"""The proxy as a process: what a client may ask of it, its ports, and its end by a signal."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.limits import Limits
from vllm_commext.proxy.config import SOCKET_BYTES, ProxyConfig, engine_tls, read_secret, server_tls
from vllm_commext.proxy.engines.admin_port import AdminApp
from vllm_commext.proxy.engines.choice import Chooser
from vllm_commext.proxy.engines.discovery import Registry, Sources, read_places
from vllm_commext.proxy.engines.health_and_metrics import HealthMonitor
from vllm_commext.proxy.errors_phases import ClientGoneError, Outcome, ProxyError, bad_request
from vllm_commext.proxy.http import access_and_errors as access
from vllm_commext.proxy.http.client_connections import Connections, serving
from vllm_commext.proxy.http.endpoint_prompts import ENDPOINTS
from vllm_commext.proxy.http.request_body import BodyBudget, Intake
from vllm_commext.proxy.session.ask_engines import Service, Upstream, open_session
from vllm_commext.proxy.session.prometheus_metrics import CONTENT_TYPE, ProxyMetrics
from vllm_commext.proxy.session.restart_resume_move import MAX_MOVES, Session
from vllm_commext.proxy.window.status_page import Window

if TYPE_CHECKING:
    from vllm_commext.proxy.window.opentelemetry_spans import Trace

logger = logging.getLogger("vllm.commext.proxy")

_FETCHED = {"/v1/models": "models", "/version": "version"}
_COUNTED = {**{path: one.name for path, one in ENDPOINTS.items()}, **_FETCHED}
PRIORITY = "X-Vllm-Priority"
# A data-parallel rank is not among them: it cannot be right for both engines.
_TO_ENGINES = ("Authorization", "traceparent", "tracestate", "X-Session-ID", "Origin")


class Requests:
    """Requests that have begun, and those of them, at most *max_in_flight*, whose body has come."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight, self.are_refused = max_in_flight, False
        self.num_begun = self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.num_begun += 1
        self._idle.clear()
        if self.are_refused:
            raise ProxyError(503, "shutdown", "this proxy is shutting down; ask another one")

    def end(self) -> None:
        self.num_begun -= 1
        if self.num_begun == 0:
            self._idle.set()

    @contextmanager
    def admitted(self, request: web.Request) -> Iterator[None]:
        if self.num_in_flight >= self._max_in_flight:
            message = f"{self.num_in_flight} requests are being served, which is the limit; retry"
            raise ProxyError(503, "overloaded", message)
        self.num_in_flight += 1
        try:
            with serving(request):
                yield
        finally:
            self.num_in_flight -= 1

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; True if all have ended in time."""
        self.are_refused = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()


class Ledger:
    """Reports requests to the metrics, the window, the trace and the access log."""

    def __init__(self, config: ProxyConfig, limits: Limits, registry: Registry) -> None:
        self._config, self.metrics = config, ProxyMetrics(registry.pools)
        self.window = Window(limits, lambda: registry.engines, self.metrics.streams_counted)
        self.trace: Trace | None = None

    @asynccontextmanager
    async def tracing(self) -> AsyncIterator[None]:
        self.trace = await asyncio.to_thread(_trace_of, os.environ)
        yield
        if self.trace is not None:
            await asyncio.to_thread(self.trace.close)

    def note_ended(self, request: web.Request, outcome: Outcome) -> None:
        self.metrics.note_ended(_COUNTED[request.path], outcome.kind, outcome.side)
        if self._config.admin_port is not None:
            self.window.note(outcome)
        if self.trace is not None:
            self.trace.end(outcome, request.path)
        if self._config.access_log:
            access.log_access(request, outcome)

    async def count_strangers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count requests without a key. Anyone can send many: no more is kept or done."""
        side = response.headers.get(access.SIDE)
        if (response.status, side) == (401, "proxy") and request.path in _COUNTED:
            self.metrics.requests.labels(_COUNTED[request.path], "unauthorized", side).inc()


class ProxyApp:
    def __init__(self, config: ProxyConfig) -> None:
        self.config, self.requests = config, Requests(config.max_in_flight)
        limits = Limits(config.tpot_ms / 1000, config.ttft_ms / 1000)
        self._chooser = Chooser.of(config, limits)
        self.registry = Registry(self._chooser.pools)
        self._sources = Sources(config, self.registry)
        keys = config.engine_api_key_file
        self._engine_key = read_secret(keys) if keys else ""
        self.ledger = Ledger(config, limits, self.registry)
        self.ledger.metrics.in_flight.set_function(lambda: self.requests.num_in_flight)
        self.budget = BodyBudget(
            *(config.max_buffered_bytes, config.max_body_bytes),
            *(config.client_timeout_seconds, config.upload_bytes_per_second),
        )

    def build(self) -> web.Application:
        keys = self.config.api_key_file
        guards = [access.answer_errors, *([access.client_keys(keys).check] if keys else ())]
        app = web.Application(middlewares=guards, client_max_size=self.config.max_body_bytes)
        app.cleanup_ctx.append(self._resources)
        app.on_response_prepare.extend((access.finish_head, self.ledger.count_strangers))
        for path in ENDPOINTS:
            app.router.add_post(path, self.generate)
        for path in _FETCHED:
            app.router.add_get(path, self.fetch)
        for path in _COUNTED:
            app.router.add_options(path, self.preflight)
        app.router.add_get("/live", self.live)
        for path in ("/health", "/ready"):
            app.router.add_get(path, self.ready)
        app.router.add_get("/metrics", self.render_metrics)
        app.router.add_route("*", "/{path:.*}/", _without_slash)
        return app

    async def _resources(self, _: web.Application) -> AsyncIterator[None]:
        async with self.ledger.tracing(), open_session(self.config) as session:
            chooser, is_shown = self._chooser, self.config.admin_port is not None
            prefill, decode = self.registry.pools
            upstream = Upstream(session, self.config, prefill, decode, self.ledger.metrics)
            self._service = Service(upstream, chooser, MAX_MOVES)
            self._preflights = access.Preflights(upstream.ask_any)
            await self._sources.look()
            monitor = HealthMonitor(session, self.config, lambda: is_shown or chooser.is_adaptive)
            async with monitor.running(self.registry.engines):
                self.registry.call(monitor.watch, monitor.forget)
                watching = asyncio.create_task(self._sources.watch())
                yield
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await upstream.releases.close()

    async def live(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """200 if requests can be served now: "ok", or "degraded" by decode engines alone."""
        is_draining = self.requests.are_refused
        prefill, decode = (pool.num_usable for pool in self.registry.pools)
        status = "ok" if prefill else "degraded"
        if is_draining or not decode:
            status = "draining" if is_draining else "unavailable"
        told = {"status": status, "prefill": prefill, "decode": decode}
        return web.json_response(told, status=200 if status in ("ok", "degraded") else 503)

    async def render_metrics(self, _: web.Request) -> web.Response:
        page = await asyncio.to_thread(self.ledger.metrics.render)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    async def fetch(self, request: web.Request) -> web.Response:
        """Pass on an engine's models or version."""
        outcome = _outcome_of(request)
        with self._counted(request, outcome), self.requests.admitted(request):
            headers = self._passed_headers(request)
            status, told, body = await self._service.upstream.fetch(request.path, headers)
        return web.Response(status=status, body=body, headers=told)

    async def preflight(self, request: web.Request) -> web.Response:
        return await self._preflights.answer(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        outcome = _outcome_of(request)
        with self._counted(request, outcome), closing(Intake(self.budget)) as intake:
            headers = self._passed_headers(request)
            headers |= {access.REQUEST_ID: outcome.request_id, "Content-Type": "application/json"}
            if (trace := self.ledger.trace) is not None:
                trace.begin(outcome, headers)
            await intake.read(request)
            if not self.config.client_priority and isinstance(intake.body, dict):
                intake.body.pop("priority", None)
            with self.requests.admitted(request):
                return await Session(self._service, outcome).serve(
                    *(request, intake.body, headers, intake.num_bytes, intake.close)
                )

    @contextmanager
    def _counted(self, request: web.Request, outcome: Outcome) -> Iterator[None]:
        """Count a request by its outcome; a drain waits for it."""
        try:
            self.requests.begin()
            yield
            outcome.end_well()
        except ProxyError as error:
            outcome.set(error.kind, error.side, error.status)
            raise
        except (ClientGoneError, asyncio.CancelledError):
            if not outcome.kind:
                outcome.set("shutdown" if self.requests.are_refused else "client_gone")
            raise
        except Exception:
            outcome.set("internal")
            raise
        finally:
            self.requests.end()
            self.ledger.note_ended(request, outcome)

    def _passed_headers(self, request: web.Request) -> dict[str, str]:
        names = (*_TO_ENGINES, *((PRIORITY,) if self.config.client_priority else ()))
        headers = {name: request.headers[name] for name in names if name in request.headers}
        for name, value in headers.items():
            if not value.isascii():
                raise bad_request(f"expected ASCII in the header {name}")
        if self.config.api_key_file:
            headers.pop("Authorization", None)  # it was meant for the proxy
        if self._engine_key:
            headers["Authorization"] = f"Bearer {self._engine_key}"
        return headers


def _outcome_of(request: web.Request) -> Outcome:
    return Outcome(access.given_id(request) or secrets.token_hex(16))


async def _without_slash(request: web.Request) -> web.Response:
    """Redirect where only the slash at the end is wrong, as vLLM does."""
    path = request.path.removesuffix("/")
    if path not in {resource.canonical for resource in request.app.router.resources()}:
        raise web.HTTPNotFound
    query = f"?{request.query_string}" if request.query_string else ""
    return web.Response(status=307, headers={"Location": path + query})


def _trace_of(environ: Mapping[str, str]) -> "Trace | None":
    """Open the sender of spans, in a second, if OpenTelemetry's variables name an endpoint."""
    named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(environ.get, named)):
        return None
    try:
        from vllm_commext.proxy.window.opentelemetry_spans import open_trace
    except ModuleNotFoundError as error:
        text = '%s is set, but no trace is sent, for want of %s: pip install "vllm_commext[otel]"'
        logger.warning(text, next(filter(environ.get, named)), error.name)
        return None
    try:
        return open_trace(environ)
    except ValueError as error:
        logger.warning("no trace is sent: expected OTEL_ variables that are valid, got %s", error)
        return None


_MAX_ADMIN_CONNECTIONS = 64
_BACKLOG = 2048  # beyond, the kernel drops connections, and clients try again a second later
# Requests have drained before the runner is closed; this bounds what is left to close.
_CLOSE_SECONDS = 0.25


def check(config: ProxyConfig) -> None:
    """Look for what would end or disable the proxy once it runs. Raises `ConfigError`."""
    if config.engines_file:
        read_places(Path(config.engines_file))
    for path in (config.engine_api_key_file, config.admin_token_file):
        if path:
            read_secret(path)
    if config.api_key_file:
        access.client_keys(config.api_key_file)
    server_tls(config)
    engine_tls(config)


async def serve(config: ProxyConfig, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the process at once.
    *announce* gets one line an engine, then the URL. Raises `ConfigError` if it cannot listen."""
    proxy = ProxyApp(config)
    runner = make_runner(proxy)
    stopped = _on_signal()
    await runner.setup()
    try:
        async with admin_port(proxy, config, announce):
            await _serve_until(stopped, proxy, runner, announce)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def admin_port(
    proxy: ProxyApp, config: ProxyConfig, announce: Callable[[str], None]
) -> AsyncIterator[None]:
    if config.admin_port is None:
        yield
        return
    token = read_secret(config.admin_token_file)
    window = proxy.ledger.window
    app = AdminApp(proxy.registry, token, window.page, window.state).build()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
    await runner.setup()
    try:
        most = _MAX_ADMIN_CONNECTIONS
        connections = Connections(most, most, config.client_timeout_seconds)
        with _bound(config.admin_host, config.admin_port, "admin-"):
            port = await open_port(runner, connections, config.admin_host, config.admin_port)
        announce(f"admin port on {_url(port)}")
        async with window.running():
            yield
    finally:
        await runner.cleanup()


async def _serve_until(
    stopped: asyncio.Event, proxy: ProxyApp, runner: web.AppRunner, announce: Callable[[str], None]
) -> None:
    config = proxy.config
    tls, connections, shares = server_tls(config), connections_of(config), config.reuse_port
    with _bound(config.host, config.port):
        port = await open_port(
            runner, connections, config.host, config.port, tls, reuse_port=shares
        )
    for engine in proxy.registry.engines:
        state = "healthy" if engine.state.healthy else f"not healthy yet: {engine.state.detail}"
        announce(f"{engine.name} {engine.url} {state}")
    announce(f"listening on {_url(port, bool(config.tls_cert_file))}")
    await stopped.wait()
    port.close()
    announce(f"stopping: {proxy.requests.num_in_flight} requests in flight")
    if not await proxy.requests.drain(config.drain_timeout_seconds):
        text = "%d requests aborted at the shutdown timeout"
        logger.warning(text, proxy.requests.num_in_flight)


def make_runner(proxy: ProxyApp) -> web.AppRunner:
    return web.AppRunner(
        proxy.build(),
        access_log=None,
        handler_cancellation=True,  # a client that goes away takes its request along
        shutdown_timeout=_CLOSE_SECONDS,
    )


def connections_of(config: ProxyConfig) -> Connections:
    return Connections(
        config.max_connections, config.max_connections_per_peer, config.client_timeout_seconds
    )


async def open_port(
    runner: web.AppRunner,
    connections: Connections,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    *,
    reuse_port: bool = False,
) -> asyncio.Server:
    """Listen. *reuse_port*: beside other processes that set it, too."""
    manager = runner.server
    assert manager is not None  # as the runner has been set up
    opened = await asyncio.get_running_loop().create_server(
        lambda: connections.make(manager, tls),
        host,
        port,
        backlog=_BACKLOG,
        reuse_port=reuse_port or None,
        start_serving=False,
    )
    for one in opened.sockets:  # and of each connection: what a client does not read stays outside
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    connections.bound_waits(opened)
    await opened.start_serving()
    return opened


@contextmanager
def _bound(host: str, port: int, prefix: str = "") -> Iterator[None]:
    """Turn a port that cannot be had into a `ConfigError` that names the options."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another "
            f"--{prefix}host or --{prefix}port, or --{prefix}port 0"
        ) from error


def _on_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        stopped.set()

    for number in signals:
        loop.add_signal_handler(number, stop)
    return stopped


def _url(port: asyncio.Server, is_tls: bool = False) -> str:
    host, number = port.sockets[0].getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{number}" if ":" in host else f"{scheme}://{host}:{number}"
