"""What browsers ask before a request of another site, answered as engines answer it."""

import time
from collections.abc import Mapping

from aiohttp import web

from vllm_commext.proxy.outcome import ProxyError
from vllm_commext.proxy.session.upstream import Upstream

_ASKED = ("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers")
KEPT_SECONDS = 60.0
_MAX_KEPT = 256
_MAX_ASKED = 4
_MAX_BYTES = 256
"""Of each thing asked; browsers ask for less."""

Kept = tuple[float, int, Mapping[str, str], bytes]


class Preflights:
    """Which sites may ask is said by the engines. Preflights bear no key, so they take no place of
    requests, engines get no key with them, few are asked at a time, and answers are kept."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
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
        _, status, told, body = kept
        return web.Response(status=status, body=body, headers=told)

    async def _ask(self, path: str, asked: dict[str, str]) -> Kept:
        if self._num_asked >= _MAX_ASKED:
            message = f"{_MAX_ASKED} such questions wait for engines; ask again"
            raise ProxyError(503, "overloaded", message)
        self._num_asked += 1
        try:
            status, told, body = await self._upstream.ask_any("OPTIONS", path, asked)
            return time.monotonic(), status, told, body
        finally:
            self._num_asked -= 1
