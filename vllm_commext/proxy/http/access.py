"""Checks of a request before it is served: API keys, and bounds on its body in time, in bytes, and
in the bytes of all bodies. Also turns errors into answers, answers preflights and logs access."""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import MIB, ProxyConfig
from vllm_commext.proxy.http.body import LARGE_BODY_BYTES, STEP_SECONDS, in_steps, members_of
from vllm_commext.proxy.http.connections import begin, cut
from vllm_commext.proxy.outcome import (
    SIDE,
    ClientGoneError,
    Outcome,
    ProxyError,
    bad_request,
    complaints,
)

logger = logging.getLogger("vllm.commext.proxy")
access_logger = logging.getLogger("vllm.commext.proxy.access")

# Asked by what watches over the proxy, which has no key of a client.
OPEN_PATHS = frozenset(("/live", "/ready", "/health", "/metrics"))


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn what a handler raises into an answer. Bodies with a Content-Encoding are refused: how
    far they unfold is the sender's choice, and no engine takes them."""
    begin(request)
    try:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":
            message = f"expected a body without Content-Encoding, got {encoding[:40]!r}"
            return _error_response(ProxyError(415, "bad_request", message))
        return await handler(request)
    except ProxyError as error:
        return _error_response(error)
    except web.HTTPException as error:
        return _elsewhere(request, error)
    except ClientGoneError as gone:
        logger.info("%s", gone)
        return web.Response(status=499)  # the client is gone
    except Exception as error:
        complaints.exception("internal", "unexpected error in the proxy")
        if request.writer.output_size > 0:  # a second answer would be read as more of the first
            cut(request)
            raise ConnectionError("the answer had begun") from error
        return _error_response(ProxyError(500, "internal", "unexpected error; see the log"))


async def hide_software(_: web.Request, response: web.StreamResponse) -> None:
    """Name no software and no versions."""
    response.headers.pop("Server", None)


def _elsewhere(request: web.Request, error: web.HTTPException) -> web.Response:
    """Redirect where only the slash at the end is wrong, as vLLM does; else the error."""
    path = request.path.removesuffix("/")
    routes = {resource.canonical for resource in request.app.router.resources()}
    if error.status == 404 and path != request.path and path in routes:
        query = f"?{request.query_string}" if request.query_string else ""
        return web.Response(status=307, headers={"Location": path + query})
    message = f"{error.reason}: {request.method} {request.path}"
    message += " is none of this proxy's routes" if error.status in (404, 405) else ""
    answer = _error_response(ProxyError(error.status, "bad_request", message))
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


def _error_response(error: ProxyError) -> web.Response:
    headers = {SIDE: error.side}
    if error.status == 503:
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.answer is None:
        return web.json_response(error.as_json(), status=error.status, headers=headers)
    headers |= error.answer.headers
    return web.Response(status=error.status, body=error.answer.body, headers=headers)


def bears_one_of(keys: Iterable[bytes], request: web.Request) -> bool:
    """Compare with every key, in a time that does not depend on them."""
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(given, b"Bearer " + key) for key in keys]  # all are compared
    return any(matches)


class ApiKeys:
    """The keys of a file, one a line; lines that begin with # are left out."""

    def __init__(self, path: str) -> None:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: expected a file of API keys, got {error}") from error
        self._keys = [line.encode() for line in lines if line and not line.startswith("#")]
        if not self._keys:
            raise ConfigError(f"{path}: expected at least one API key, one a line, got none")

    @web.middleware
    async def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # Browsers send no key with what they ask before a request.
        is_open = request.path in OPEN_PATHS or request.method == "OPTIONS"
        if not (is_open or bears_one_of(self._keys, request)):
            raise ProxyError(401, "unauthorized", "expected Authorization: Bearer <API key>")
        return await handler(request)


SMALL_BODY_BYTES = MIB
_FOR_SMALL_BODIES = 8
"""One such part of the budget is kept for bodies of at most `SMALL_BODY_BYTES`."""


class BodyBudget:
    """Bytes of request bodies at a time. turns: held while a large body is parsed, and as long
    after, so that others have half of the processor."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0
        self.turns = asyncio.Lock()

    def take(self, num_bytes: int, body_bytes: int) -> None:
        """Raises `ProxyError` 503 if *num_bytes* more are too many."""
        is_small = body_bytes <= SMALL_BODY_BYTES
        most = self._max_bytes - (0 if is_small else self._max_bytes // _FOR_SMALL_BODIES)
        if self.held_bytes + num_bytes > most:
            message = f"request bodies take {self.held_bytes} bytes of {most}; retry"
            raise ProxyError(503, "overloaded", message)
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


@dataclass(eq=False)
class Intake:
    """One request's body, and its share of the budget until `close`."""

    _budget: BodyBudget
    _config: ProxyConfig
    num_bytes: int = 0
    body: Any = None

    async def read(self, request: web.Request) -> None:
        """Read and parse the body. Raises `ProxyError`."""
        if request.content_type != "application/json":
            message = f"expected Content-Type: application/json, got {request.content_type!r}"
            raise ProxyError(415, "bad_request", message)
        seconds, rate = self._config.client_timeout_seconds, self._config.upload_bytes_per_second
        try:
            async with asyncio.timeout(seconds) as bound:
                raw = await self._read_raw(request, bound)
        except TimeoutError as error:
            message = (
                f"the request's body did not arrive within {seconds} s and a second for each "
                f"{rate} bytes: got {self.num_bytes} bytes"
            )
            raise ProxyError(408, "bad_request", message) from error
        try:
            self.body = await self._decoded(raw)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error

    def close(self) -> None:
        self._budget.give_back(self.num_bytes)
        self.num_bytes, self.body = 0, None

    async def _read_raw(self, request: web.Request, bound: asyncio.Timeout) -> bytes | bytearray:
        most, end = self._config.max_body_bytes, bound.when()
        assert end is not None  # as every body has a bound
        announced = request.content_length or 0
        raw: bytes | bytearray = b""
        if announced > most:
            raise ProxyError(413, "bad_request", f"expected a body of at most {most} bytes")
        async for piece in request.content.iter_any():
            num_bytes = len(raw) + len(piece)
            bound.reschedule(end + num_bytes / self._config.upload_bytes_per_second)
            if num_bytes > most:
                raise ProxyError(413, "bad_request", f"expected a body of at most {most} bytes")
            self._budget.take(len(piece), max(announced, num_bytes))
            self.num_bytes = num_bytes
            if isinstance(raw, bytearray):
                raw += piece
            elif raw:
                raw = bytearray(raw + piece)
            else:
                raw = piece
        return raw

    async def _decoded(self, raw: bytes | bytearray) -> Any:
        taking_apart = members_of(raw)
        if len(raw) <= LARGE_BODY_BYTES:
            return await in_steps(taking_apart)
        return await in_steps(taking_apart, self._budget.turns, STEP_SECONDS)


def log_access(request: web.Request, outcome: Outcome) -> None:
    """Log one line of ``name=value`` a request; values have no spaces."""
    first, route = outcome.first_token_seconds, outcome.route
    access_logger.info(
        "id=%s client=%s endpoint=%s outcome=%s side=%s path=%s prefill=%s decode=%s "
        "first_token=%s seconds=%.3f",
        *(outcome.request_id, request.remote or "-", request.path, outcome.kind, outcome.side),
        *(route.path or "-", route.prefill or "-", route.decode or "-"),
        *("-" if first is None else f"{first:.3f}", outcome.seconds),
    )


_ASKED = ("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers")
KEPT_SECONDS = 60.0
_MAX_KEPT = 256
_MAX_ASKED = 4
_MAX_BYTES = 256
"""Of each thing asked; browsers ask for less."""

Told = tuple[int, Mapping[str, str], bytes]
Ask = Callable[[str, str, Mapping[str, str]], Awaitable[Told]]


class Preflights:
    """Which sites may ask is said by the engines. Preflights bear no key, so they take no place of
    requests, engines get no key with them, few are asked at a time, and answers are kept."""

    def __init__(self, ask: Ask) -> None:
        self._ask_any, self._num_asked = ask, 0
        self._kept: dict[tuple[str, ...], tuple[float, Told]] = {}

    async def answer(self, request: web.Request) -> web.Response:
        """Raises `ProxyError`."""
        asked = {name: request.headers[name] for name in _ASKED if name in request.headers}
        if any(len(value) > _MAX_BYTES for value in asked.values()):
            raise bad_request(f"expected at most {_MAX_BYTES} bytes in each of {', '.join(_ASKED)}")
        key = (request.path, *(asked.get(name, "") for name in _ASKED))
        if key not in self._kept or time.monotonic() > self._kept[key][0]:
            told = await self._ask(request.path, asked)
            while len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = time.monotonic() + KEPT_SECONDS, told
        status, headers, body = self._kept[key][1]
        return web.Response(status=status, body=body, headers=headers)

    async def _ask(self, path: str, asked: Mapping[str, str]) -> Told:
        if self._num_asked >= _MAX_ASKED:
            message = f"{_MAX_ASKED} such questions wait for engines; ask again"
            raise ProxyError(503, "overloaded", message)
        self._num_asked += 1
        try:
            return await self._ask_any("OPTIONS", path, asked)
        finally:
            self._num_asked -= 1
