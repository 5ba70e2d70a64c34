"""Who may ask: API keys and preflights. Also turns errors into answers, and logs access."""

import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.errors_phases import (
    SIDE,
    ClientGoneError,
    Outcome,
    ProxyError,
    bad_request,
    complaints,
)
from vllm_commext.proxy.http.client_connections import cut

logger = logging.getLogger("vllm.commext.proxy")
access_logger = logging.getLogger("vllm.commext.proxy.access")

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
REQUEST_ID, _USABLE_ID = "X-Request-Id", re.compile(r"[\x21-\x7e]{1,128}")
# Asked by what watches over the proxy, which has no key of a client.
OPEN_PATHS = frozenset(("/live", "/ready", "/health", "/metrics"))


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn what a handler raises into an answer. Bodies with a Content-Encoding are refused: how
    far they unfold is the sender's choice, and no engine takes them."""
    try:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":
            message = f"expected a body without Content-Encoding, got {encoding[:40]!r}"
            return _error_response(ProxyError(415, "bad_request", message))
        return await handler(request)
    except ProxyError as error:
        return _error_response(error)
    except ConfigError as error:
        return _error_response(bad_request(str(error)))
    except web.HTTPException as error:
        return _http_error(request, error)
    except ClientGoneError as gone:
        logger.info("%s", gone)
        return web.Response(status=499)  # the client is gone
    except Exception as error:
        complaints.exception("internal", "unexpected error in the proxy")
        if request.writer.output_size > 0:  # a second answer would be read as more of the first
            cut(request)
            raise ConnectionError("the answer had begun") from error
        return _error_response(ProxyError(500, "internal", "unexpected error; see the log"))


async def finish_head(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request as its client does, and neither software nor versions."""
    response.headers.pop("Server", None)
    if given := given_id(request):
        response.headers.setdefault(REQUEST_ID, given)


def given_id(request: web.Request) -> str:
    given = request.headers.get(REQUEST_ID, "")
    return given if _USABLE_ID.fullmatch(given) else ""


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    message = f"{error.reason}: {request.method} {request.path}"
    message += " is none of this proxy's routes" if error.status in (404, 405) else ""
    answer = _error_response(ProxyError(error.status, "bad_request", message))
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


def _error_response(error: ProxyError) -> web.Response:
    headers = {SIDE: error.side, **_HEADERS.get(error.status, {})}
    if error.answer is None:
        return web.json_response(error.as_json(), status=error.status, headers=headers)
    headers |= error.answer.headers
    return web.Response(status=error.status, body=error.answer.body, headers=headers)


@dataclass(frozen=True)
class Keys:
    """One of *keys* is asked for, but for open paths and methods. kind: what they are, in words."""

    kind: str
    keys: Sequence[bytes]
    open_paths: Collection[str]
    open_methods: Collection[str] = ()

    @web.middleware
    async def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Compare with every key, in a time that does not depend on them."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(given, b"Bearer " + key) for key in self.keys]
        is_open = request.path in self.open_paths or request.method in self.open_methods
        if not (is_open or any(matches)):
            complaints.warning("unauthorized", f"no valid {self.kind} from {request.remote}")
            raise ProxyError(401, "unauthorized", f"expected Authorization: Bearer <{self.kind}>")
        return await handler(request)


def client_keys(path: str) -> Keys:
    """Those of a file, one a line; lines that begin with # are left out. Raises `ConfigError`."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a file of API keys, got {error}") from error
    keys = [line.encode() for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: expected at least one API key, one a line, got none")
    # Browsers send no key with what they ask before a request.
    return Keys("API key", keys, OPEN_PATHS, ("OPTIONS",))


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
KEPT_SECONDS, _MAX_KEPT, _MAX_ASKED = 60.0, 256, 4
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
