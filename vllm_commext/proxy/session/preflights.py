"""What browsers ask before a request of another site, answered as engines answer it."""

import asyncio
import time

import aiohttp
from aiohttp import web

from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines.pool import EnginePool
from vllm_commext.proxy.outcome import EngineAnswer, ProxyError
from vllm_commext.proxy.session.response import failures_of, no_engine, read_answer

_ASKED = ("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers")
KEPT_SECONDS = 60.0
_MAX_KEPT = 256
_MAX_ASKED = 4
_MAX_BYTES = 256
"""Of each thing asked; browsers ask for less."""

Kept = tuple[float, int, EngineAnswer]


class Preflights:
    """Which sites may ask is said by the engines. Preflights bear no key, so they take no place of
    requests, engines get no key with them, few are asked at a time, and answers are kept."""

    def __init__(
        self, session: aiohttp.ClientSession, config: ProxyConfig, decode_pool: EnginePool
    ) -> None:
        self._session, self._pool = session, decode_pool
        self._seconds = config.health_timeout_seconds
        self._kept: dict[tuple[str, ...], Kept] = {}
        self._num_asked = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Raises `ProxyError`."""
        asked = {name: request.headers[name] for name in _ASKED if name in request.headers}
        if any(len(value) > _MAX_BYTES for value in asked.values()):
            message = f"expected at most {_MAX_BYTES} bytes in each of {', '.join(_ASKED)}"
            raise ProxyError(400, "bad_request", message)
        key = (request.path, *(asked.get(name, "") for name in _ASKED))
        kept = self._kept.get(key)
        if kept is None or time.monotonic() - kept[0] > KEPT_SECONDS:
            kept = await self._ask(request.path, asked)
            while len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = kept
        _, status, told = kept
        return web.Response(status=status, body=told.body, headers=told.headers)

    async def _ask(self, path: str, asked: dict[str, str]) -> Kept:
        if self._num_asked >= _MAX_ASKED:
            message = f"{_MAX_ASKED} such questions wait for engines; ask again"
            raise ProxyError(503, "overloaded", message)
        engine = self._pool.pick()
        if engine is None:
            raise no_engine(self._pool)
        self._num_asked += 1
        try:
            async with asyncio.timeout(self._seconds):
                with failures_of(engine, self._seconds):
                    async with self._session.options(
                        engine.url + path, headers=asked, allow_redirects=False
                    ) as response:
                        answer = await read_answer(engine, response)
                        return time.monotonic(), response.status, answer
        except TimeoutError as error:
            message = f"{engine.name} has not answered within {self._seconds:g} s"
            raise ProxyError(504, "timeout", message) from error
        finally:
            self._num_asked -= 1
