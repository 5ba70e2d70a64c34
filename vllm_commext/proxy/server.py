"""Running the proxy as a process: listen, announce, drain on a signal."""

import asyncio
import gc
import importlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.app import ProxyApp
from vllm_commext.proxy.config import SOCKET_BYTES, ProxyConfig, engine_tls, read_secret, server_tls
from vllm_commext.proxy.engines.discovery import AdminApp, read_places
from vllm_commext.proxy.http.access import ApiKeys
from vllm_commext.proxy.http.connections import Connections

logger = logging.getLogger("vllm.commext.proxy")

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
        ApiKeys(config.api_key_file)
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
    app = AdminApp(proxy.registry, token, proxy.window.page, proxy.window.state).build()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
    await runner.setup()
    try:
        connections = Connections(
            _MAX_ADMIN_CONNECTIONS, _MAX_ADMIN_CONNECTIONS, config.client_timeout_seconds
        )
        with _bound(config.admin_host, config.admin_port, "admin-"):
            port = await open_port(runner, connections, config.admin_host, config.admin_port)
        announce(f"admin port on {_url(port)}")
        async with proxy.window.running():
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
        state = "healthy" if engine.healthy else f"not healthy yet: {engine.detail}"
        announce(f"{engine.name} {engine.url} {state}")
    announce(f"listening on {_url(port, bool(config.tls_cert_file))}")
    await stopped.wait()
    port.close()
    announce(f"stopping: {proxy.num_in_flight} requests in flight")
    if not await proxy.drain():
        logger.warning("%d requests aborted at the shutdown timeout", proxy.num_in_flight)


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
    if manager is None:
        raise RuntimeError("a port needs a runner that has been set up")
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


_GC_THRESHOLDS = (20_000, 20, 20)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run *main* on uvloop if it is installed: a token costs less there. The garbage collector
    leaves alone what is in memory by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        uvloop = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        asyncio.run(main)
    else:
        uvloop.run(main)


_OWN = 64
_MOST = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST if soft == resource.RLIM_INFINITY else soft


def fitted(config: ProxyConfig, limit: int) -> ProxyConfig:
    """Limit requests and connections by descriptors: a request has one client and up to two
    engines."""
    in_flight = min(config.max_in_flight, max((limit - _OWN) // 3, 1))
    room = max(limit - _OWN - 2 * in_flight, 1)
    if in_flight < config.max_in_flight:
        logger.warning(
            "%d descriptors allow %d requests at a time and not the %d of --max-in-flight: raise "
            "the hard limit (LimitNOFILE= of systemd, ulimit -Hn)",
            limit,
            in_flight,
            config.max_in_flight,
        )
    connections = min(config.max_connections, room)
    return replace(config, max_in_flight=in_flight, max_connections=connections)
