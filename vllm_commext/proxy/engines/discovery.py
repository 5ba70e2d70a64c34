"""Unites the engines that the command line, a watched file, DNS and the admin port name."""

import asyncio
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import DNS_SCHEME, ProxyConfig, engine_url, two_roles_error
from vllm_commext.proxy.engines.pool import BOTH, ENGINE_ROLES, Engine, EnginePool
from vllm_commext.proxy.http.access import answer_errors, bears_one_of, hide_software
from vllm_commext.proxy.outcome import ProxyError, bad_request

logger = logging.getLogger("vllm.commext.proxy")


@dataclass(frozen=True, order=True)
class EngineEndpoint:
    role: str
    url: str


MAX_ENGINES = 1024
MAX_CHANGED = 16
"""Engines that are added or removed in one piece."""


def _check(places: Iterable[EngineEndpoint]) -> None:
    """Raise `ConfigError` for an engine of two roles, or too many engines."""
    roles: dict[str, str] = {}
    for place in places:
        if roles.setdefault(place.url, place.role) != place.role:
            raise two_roles_error(place.url)
    if len(roles) > MAX_ENGINES:
        raise ConfigError(f"expected at most {MAX_ENGINES} engines in all, got {len(roles)}")


class Registry:
    """Keeps the pools as the sources want them. An engine that no source names gets no new work and
    goes when its last request has ended. One that changes its role is a new engine at once."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self.pools = tuple(pools.values())
        self._named: dict[str, tuple[EngineEndpoint, ...]] = {}
        self._drained: frozenset[str] = frozenset()
        self._on_added: Callable[[Engine], None] = lambda _: None
        self._on_removed: Callable[[Engine], None] = lambda _: None

    def call(
        self, on_added: Callable[[Engine], None], on_removed: Callable[[Engine], None]
    ) -> None:
        self._on_added, self._on_removed = on_added, on_removed

    @property
    def engines(self) -> list[Engine]:
        found = (engine for pool in self.pools for engine in pool.engines)
        return list(dict.fromkeys(found))

    def name(self, source: str, places: Iterable[EngineEndpoint]) -> None:
        """Have *source* name exactly *places*. Raises `ConfigError`, and changes nothing, if an
        engine would have two roles."""
        named = {**self._named, source: tuple(places)}
        if named == self._named:
            return
        _check(place for of in named.values() for place in of)
        self._named = named
        self._reconcile()

    def steps_of(self, source: str, places: Sequence[EngineEndpoint]) -> list[list[EngineEndpoint]]:
        """Lists for `name`, one after the other, which add few engines at a time. Raises
        `ConfigError` as `name` does."""
        others = [place for name, of in self._named.items() if name != source for place in of]
        _check([*others, *places])
        named = frozenset(self._named.get(source, ()))
        known = [place for place in places if place in named]
        new = [place for place in places if place not in named]
        ends = range(MAX_CHANGED, len(new), MAX_CHANGED)
        return [*(known + new[:end] for end in ends), list(places)]

    def drain(self, urls: frozenset[str]) -> None:
        """Give no new work to the engines at *urls*, and to them alone."""
        self._drained = urls
        self._reconcile()
        for engine in self.engines:
            if engine.state.is_emptied:
                engine.empty()

    def sweep(self) -> bool:
        """Remove some engines that leave and have nothing left to do; True if there may be more."""
        idle = [one for one in self.engines if one.state.leaving and not one.work.in_flight]
        for engine in idle[:MAX_CHANGED]:
            for pool in self.pools:
                pool.remove(engine)
            self._on_removed(engine)
            logger.info("%s (%s) is removed", engine.name, engine.url)
        return len(idle) > MAX_CHANGED

    def _reconcile(self) -> None:
        wanted = dict.fromkeys(place for places in self._named.values() for place in places)
        known = {EngineEndpoint(engine.role, engine.url) for engine in self.engines}
        for place in wanted:
            if place not in known:
                engine = self._add(place)
                self._on_added(engine)
                logger.info("%s (%s) is added", engine.name, engine.url)
        for engine in self.engines:
            is_wanted = EngineEndpoint(engine.role, engine.url) in wanted
            engine.state.want(is_wanted, engine.url in self._drained)
        self.sweep()

    def _add(self, place: EngineEndpoint) -> Engine:
        first, *others = (pool for pool in self.pools if place.role in (pool.role, BOTH))
        engine = first.add(place.url, place.role)
        for pool in others:
            pool.join(engine)
        return engine


COMMAND_LINE, FILE, ADMIN = "command line", "file", "admin"
MAX_FILE_BYTES = 1 << 20


def read_places(path: Path) -> list[EngineEndpoint]:
    """Read ``{"prefill": [URL, ...], "decode": [URL, ...], "both": [URL, ...]}``, each optional.
    Raises `ConfigError`."""
    expected = f'{path}: expected {{"prefill": [URL, ...], "decode": [URL, ...]}}, or "both"'
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"{expected}, got {error.strerror}; correct the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{expected}, got no JSON ({error})") from error
    if not isinstance(content, dict) or set(content) - set(ENGINE_ROLES):
        raise ConfigError(f"{expected}, got {str(content)[:80]}")
    places: list[EngineEndpoint] = []
    for role, urls in content.items():
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise ConfigError(f"{expected}, got {str(urls)[:80]} for {role}")
        places += [EngineEndpoint(role, engine_url(f"{path}, {role}", url)) for url in urls]
    return places


async def resolve(name: EngineEndpoint) -> list[EngineEndpoint]:
    """Every address of a name, as an engine. Raises `OSError`."""
    parts = urlsplit(name.url.removeprefix(DNS_SCHEME))
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    places: list[EngineEndpoint] = []
    for address in sorted({str(info[4][0]) for info in found[: MAX_ENGINES + 1]}):
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        url = f"http://{host}:{parts.port or 80}{parts.path}"
        places.append(EngineEndpoint(name.role, url))
    return places


class Sources:
    """Reads the file and resolves the names. A source that fails keeps its engines: they are worth
    more than a name server."""

    def __init__(self, config: ProxyConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        given = [
            EngineEndpoint(role, url) for role in ENGINE_ROLES for url in getattr(config, role)
        ]
        self._names = [place for place in given if place.url.startswith(DNS_SCHEME)]
        self._complaints: dict[str, str] = {}
        registry.name(COMMAND_LINE, (place for place in given if place not in self._names))

    async def look(self) -> None:
        if self._config.engines_file:
            path = Path(self._config.engines_file)
            await self._name(FILE, asyncio.to_thread(read_places, path))
        for name in self._names:
            await self._name(f"{name.role} {name.url}", resolve(name))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_seconds)
            await self.look()
            while self._registry.sweep():
                await asyncio.sleep(0)

    async def _name(self, source: str, asked: Awaitable[list[EngineEndpoint]]) -> None:
        try:
            bound = None if source == FILE else self._config.health_timeout_seconds
            async with asyncio.timeout(bound):
                places = await asked
            for step in self._registry.steps_of(source, places):
                self._registry.name(source, step)
                await asyncio.sleep(0)
        except (ConfigError, OSError) as error:
            complaint = f"{error!r}" if isinstance(error, TimeoutError) else str(error)
            if self._complaints.get(source) != complaint:
                logger.warning(
                    "could not refresh engines from %s, keeping the old list: %s", source, complaint
                )
            self._complaints[source] = complaint
        else:
            self._complaints.pop(source, None)


MAX_ADMIN_BODY_BYTES = 64 << 10
MAX_WAIT_SECONDS = 3600
POLL_SECONDS = 0.1
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminApp:
    """page: of the window, which holds nothing secret and asks for the token. state: its data."""

    def __init__(self, registry: Registry, token: str, page: Handler, state: Handler) -> None:
        self._registry, self._page, self._state = registry, page, state
        self._token = token.encode()
        self._places: frozenset[EngineEndpoint] = frozenset()
        self._drained: frozenset[str] = frozenset()

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[answer_errors, self._check_token], client_max_size=MAX_ADMIN_BODY_BYTES
        )
        app.on_response_prepare.append(hide_software)
        app.router.add_get("/", self._page)
        app.router.add_get("/state", self._state)
        app.router.add_get("/engines", self._show)
        app.router.add_post("/engines", self._add)
        app.router.add_delete("/engines", self._remove)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/undrain", self._undrain)
        return app

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/" and not bears_one_of([self._token], request):
            raise ProxyError(401, "unauthorized", "expected Authorization: Bearer <admin token>")
        try:
            return await handler(request)
        except ConfigError as error:
            raise bad_request(str(error)) from error

    async def _show(self, _: web.Request) -> web.Response:
        return self._shown()

    def _shown(self) -> web.Response:
        return web.json_response({"engines": [one.as_json() for one in self._registry.engines]})

    async def _add(self, request: web.Request) -> web.Response:
        fields = await _fields(request, "role", "url")
        if fields["role"] not in ENGINE_ROLES:
            known = ", ".join(ENGINE_ROLES)
            raise bad_request(f"role: expected one of {known}, got {fields['role']!r}")
        others = frozenset(one for one in self._places if one.url != fields["url"])
        added = EngineEndpoint(fields["role"], fields["url"])
        return self._change(others | {added}, self._drained)

    async def _remove(self, request: web.Request) -> web.Response:
        url = (await _fields(request, "url"))["url"]
        others = frozenset(place for place in self._places if place.url != url)
        if others == self._places:
            message = f"{url} was not added here; what the command line, a file or DNS names is "
            raise bad_request(message + "removed there, or drained here")
        return self._change(others, self._drained - {url})

    async def _drain(self, request: web.Request) -> web.Response:
        fields = await _fields(request, "url")
        url, wait_seconds = fields["url"], fields.get("wait_seconds", 0)
        if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds <= MAX_WAIT_SECONDS:
            message = f"wait_seconds: expected 0 to {MAX_WAIT_SECONDS}, got {wait_seconds!r}"
            raise bad_request(message)
        if not self._at(url):
            raise bad_request(f"{url} is none of the engines")
        answer = self._change(self._places, self._drained | {url})
        end = time.monotonic() + wait_seconds
        while sum(one.work.in_flight for one in self._at(url)) and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
            answer = self._shown()
        return answer

    def _at(self, url: str) -> list[Engine]:
        return [one for one in self._registry.engines if one.url == url]

    async def _undrain(self, request: web.Request) -> web.Response:
        url = (await _fields(request, "url"))["url"]
        return self._change(self._places, self._drained - {url})

    def _change(self, places: frozenset[EngineEndpoint], drained: frozenset[str]) -> web.Response:
        self._registry.name(ADMIN, sorted(places))
        self._registry.drain(drained)
        self._places, self._drained = places, drained
        return self._shown()


async def _fields(request: web.Request, *names: str) -> dict[str, Any]:
    try:
        content = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(n), str) for n in names):
        raise bad_request(f"expected a JSON object with the strings {', '.join(names)}")
    return {**content, "url": engine_url("url", content["url"])}
