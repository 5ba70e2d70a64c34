"""Who may ask, by API key and TLS, and the line that says what became of a request."""

import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.failures import ProxyError
from vllm_commext.proxy.outcome import Outcome

access_logger = logging.getLogger("vllm.commext.proxy.access")

# Asked by what watches over the proxy, which has no key of a client.
OPEN_PATHS = frozenset(("/live", "/ready", "/health", "/metrics"))


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
        """Middleware: 401 unless the request carries one of the keys."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(given, b"Bearer " + key) for key in self._keys]
        # Browsers send no key with what they ask before a request.
        is_open = request.path in OPEN_PATHS or request.method == "OPTIONS"
        if not (is_open or any(matches)):
            raise ProxyError(401, "unauthorized", "expected Authorization: Bearer <API key>")
        return await handler(request)


def server_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """What clients are met with; None: plain HTTP. Raises `ConfigError`."""
    if not config.tls_cert_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file or None)
    except (OSError, ValueError) as error:
        message = f"{config.tls_cert_file}: expected a certificate and its key in PEM, got {error}"
        raise ConfigError(message) from error
    return context


def engine_tls(config: ProxyConfig) -> ssl.SSLContext | bool:
    """How https engines are verified: by a file, or as the system does. Raises `ConfigError`."""
    if not config.engine_ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=config.engine_ca_file)
    except (OSError, ValueError) as error:
        message = f"{config.engine_ca_file}: expected certificates in PEM, got {error}"
        raise ConfigError(message) from error


def log_access(request: web.Request, outcome: Outcome) -> None:
    """One line of ``name=value`` a request; values have no spaces."""
    first = outcome.first_token_seconds
    access_logger.info(
        "id=%s client=%s endpoint=%s outcome=%s side=%s path=%s prefill=%s decode=%s "
        "first_token=%s seconds=%.3f",
        *(outcome.request_id, request.remote or "-", request.path, outcome.kind, outcome.side),
        *(outcome.path or "-", outcome.prefill or "-", outcome.decode or "-"),
        *("-" if first is None else f"{first:.3f}", outcome.seconds),
    )
