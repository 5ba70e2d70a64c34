"""Unites the engines that the command line, a watched file, DNS and the admin port name."""

import asyncio
import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import DNS_SCHEME, ProxyConfig, engine_url, two_roles_error
from vllm_commext.proxy.engines.engine import BOTH, ENGINE_ROLES, Engine, EnginePool

logger = logging.getLogger("vllm.commext.proxy")


COMMAND_LINE, FILE, ADMIN = "command line", "file", "admin"
MAX_FILE_BYTES = 1 << 20
MAX_ENGINES = 1024
MAX_CHANGED = 16
"""Engines that are added or removed in one piece."""


@dataclass(frozen=True, order=True)
class EngineEndpoint:
    role: str
    url: str


def _check(places: Iterable[EngineEndpoint]) -> None:
    """Raise `ConfigError` for an unknown role, an engine of two roles, or too many engines."""
    roles: dict[str, str] = {}
    for place in places:
        if place.role not in ENGINE_ROLES:
            raise ConfigError(
                f"role: expected one of {', '.join(ENGINE_ROLES)}, got {place.role!r}"
            )
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

    def at(self, url: str) -> list[Engine]:
        return [one for one in self.engines if one.url == url]

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
        self._config, self._registry = config, registry
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
