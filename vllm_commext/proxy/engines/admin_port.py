"""The admin port: shows, adds, removes and drains engines, and serves the window to operators."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import engine_url
from vllm_commext.proxy.engines.discovery import ADMIN, EngineEndpoint, Registry
from vllm_commext.proxy.http.access_and_errors import Keys, answer_errors, finish_head

MAX_ADMIN_BODY_BYTES = 64 << 10
MAX_WAIT_SECONDS = 3600
POLL_SECONDS = 0.1
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminApp:
    """page: of the window, which holds nothing secret and asks for the token. state: its data."""

    def __init__(self, registry: Registry, token: str, page: Handler, state: Handler) -> None:
        self._registry, self._page, self._state = registry, page, state
        self._keys = Keys("admin token", [token.encode()], ("/",))
        self._places: frozenset[EngineEndpoint] = frozenset()
        self._drained: frozenset[str] = frozenset()

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[answer_errors, self._keys.check], client_max_size=MAX_ADMIN_BODY_BYTES
        )
        app.on_response_prepare.append(finish_head)
        app.router.add_get("/", self._page)
        app.router.add_get("/state", self._state)
        app.router.add_get("/engines", self._show)
        app.router.add_post("/engines", self._add)
        app.router.add_delete("/engines", self._remove)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/undrain", self._undrain)
        return app

    async def _show(self, _: web.Request) -> web.Response:
        return self._shown()

    def _shown(self) -> web.Response:
        return web.json_response({"engines": [one.as_json() for one in self._registry.engines]})

    async def _add(self, request: web.Request) -> web.Response:
        fields = await _fields(request, "role", "url")
        added = EngineEndpoint(fields["role"], fields["url"])
        others = frozenset(one for one in self._places if one.url != added.url)
        return self._change(others | {added}, self._drained)

    async def _remove(self, request: web.Request) -> web.Response:
        url = (await _fields(request, "url"))["url"]
        others = frozenset(place for place in self._places if place.url != url)
        if others == self._places:
            message = f"{url} was not added here; what the command line, a file or DNS names is "
            raise ConfigError(message + "removed there, or drained here")
        return self._change(others, self._drained - {url})

    async def _drain(self, request: web.Request) -> web.Response:
        fields = await _fields(request, "url")
        url, wait_seconds = fields["url"], fields.get("wait_seconds", 0)
        if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds <= MAX_WAIT_SECONDS:
            message = f"wait_seconds: expected 0 to {MAX_WAIT_SECONDS}, got {wait_seconds!r}"
            raise ConfigError(message)
        if not self._registry.at(url):
            raise ConfigError(f"{url} is none of the engines")
        answer = self._change(self._places, self._drained | {url})
        end = time.monotonic() + wait_seconds
        while sum(one.work.in_flight for one in self._registry.at(url)) and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
            answer = self._shown()
        return answer

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
        raise ConfigError(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(n), str) for n in names):
        raise ConfigError(f"expected a JSON object with the strings {', '.join(names)}")
    return {**content, "url": engine_url("url", content["url"])}
