"""The proxy's configuration: every value is checked once, when the object is made. What the files
that it names hold."""

import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_commext.errors import ConfigError

MIB = 1 << 20
SOCKET_BYTES = 128 << 10
"""Of an answer that the kernel holds for a client, and of one that an engine sends: what a client
does not read is held back at its engine."""
AUTO, NEVER = MODES = ("auto", "never")
SHORTEST, ARRIVAL = "shortest", "arrival"
ORDERS = (AUTO, SHORTEST, ARRIVAL)
AUTO, ADAPTIVE, LOCAL, FIXED = PLACEMENTS = ("auto", "adaptive", "local", "fixed")
DNS_SCHEME = "dns+"
BODIES = 16
"""Bodies of the largest size that are buffered at a time."""


def _file(meaning: str) -> Any:
    return field(default="", metadata={"file": meaning})


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class ProxyConfig:
    """prefill, decode, both: base URLs of engines, ``http://HOST:PORT`` with an optional path;
    ``dns+http://NAME:PORT`` stands for every address of NAME. ``_file`` fields are paths, or empty.
    Raises `ConfigError` that names the field."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    both: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    prefill_timeout_seconds: float = _option(300.0, "timeout for one prefill at an engine")
    decode_timeout_seconds: float = _option(
        600.0, "timeout for a stream to begin; six times as long for other answers"
    )
    decode_idle_timeout_seconds: float = 120.0  # between two pieces of a stream
    client_timeout_seconds: float = _option(
        60.0, "timeout for a client to send a small request, or to read a piece of the answer"
    )
    upload_bytes_per_second: int = 256 << 10  # of a body, after the client's timeout
    health_interval_seconds: float = _option(
        2.0, "interval of checks of engines, of --engines-file and of dns+http names"
    )
    health_timeout_seconds: float = _option(
        5.0, "timeout for a health check, and for connecting to an engine"
    )
    health_fall: int = 2  # failed checks in a row that make an engine unhealthy
    engine_lost_seconds: float = _option(
        30.0, "give up requests to an engine that has answered no check for this long"
    )
    engine_wait_seconds: float = 3.0  # of a request while no decode engine is healthy
    keep_alive_seconds: float = 4.0  # of idle connections; an engine closes them after 5 s
    request_attempts: int = 2  # at a request that fails before its first token
    min_prompt_tokens: int = _option(
        0, "a decode engine alone computes prompts with fewer tokens (estimated)"
    )
    ttft_ms: int = _option(0, "limit on the first token, milliseconds, beside --tpot-ms; 0: none")
    tpot_ms: int = _option(
        0, "limit on an answer's mean time per later token, milliseconds; 0: none"
    )
    prefill_attempts: int = 2
    decode_attempts: int = 2  # while none can be connected to
    affinity_tokens: int = 500_000  # of prompts that an engine is taken to hold
    max_body_bytes: int = _option(32 * MIB, "largest request body")
    max_buffered_bytes: int = 0  # of request bodies at a time; 0: `BODIES` of the largest
    resume_bytes: int = 256 * MIB  # of requests and answers, kept to resume streams
    move_pause_seconds: float = 5.0  # longest pause of a stream that moves
    max_in_flight: int = _option(1024, "requests at a time; one more is refused with 503")
    max_connections: int = 4096  # beyond, the one idle longest is closed
    max_connections_per_peer: int = 2048  # of one address, or one IPv6 /64
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    engines_file: str = _file("JSON, {prefill: [URL], decode: [URL], both: [URL]}; watched")
    api_key_file: str = _file("API keys that clients need, one a line; default: none is needed")
    engine_api_key_file: str = _file("API key for engines; default: none, or the client's own")
    tls_cert_file: str = _file("certificate chain in PEM; clients then need https")
    tls_key_file: str = _file("its private key, if not in the same file")
    engine_ca_file: str = _file("certificate authorities for https engines, PEM")
    reuse_port: bool = False
    access_log: bool = False
    client_priority: bool = False
    affinity: bool = True
    resume: bool = True
    move: bool = True
    stream_chunks: str = AUTO
    placement: str = AUTO
    prompt_order: str = AUTO
    admin_token_file: str = _file("holds the admin port's token")
    drain_timeout_seconds: float = _option(
        30.0, "timeout for running requests to end after SIGTERM"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port: expected 0 (any free port) to 65535, got {self.port}; choose another one"
            )
        for option in fields(self):
            if "help" in option.metadata:
                _check_number(option.name, getattr(self, option.name), option.default)
        if not self.max_buffered_bytes:
            object.__setattr__(self, "max_buffered_bytes", BODIES * self.max_body_bytes)
        choices = {"stream_chunks": MODES, "prompt_order": ORDERS, "placement": PLACEMENTS}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}: expected one of {list(known)}, got {value!r}")
        if self.admin_port is not None and not self.admin_token_file:
            raise ConfigError("the admin port needs a token: expected --admin-token-file FILE")
        may_be_empty = bool(self.both or self.engines_file) or self.admin_port is not None
        for role, is_needed in (("prefill", True), ("decode", True), ("both", False)):
            urls = _engine_urls(role, getattr(self, role), may_be_empty or not is_needed)
            object.__setattr__(self, role, urls)
        given = [*self.prefill, *self.decode, *self.both]
        if twice := sorted(url for url in given if given.count(url) > 1):
            raise two_roles_error(twice[0])

    @property
    def may_stream(self) -> bool:
        return self.stream_chunks != NEVER


def two_roles_error(url: str) -> ConfigError:
    return ConfigError(
        f"{url} is given as a prefill and as a decode engine: an engine "
        "cannot pull KV blocks from itself; give each engine one role, or name it by --engine"
    )


def _check_number(name: str, value: float, default: Any) -> None:
    if math.isfinite(value) and (value > 0 or value == default == 0):
        return
    least = "zero or more" if default == 0 else "above zero"
    raise ConfigError(
        f"{name}: expected a finite number {least}, got {value}; leave it out for {default}"
    )


def read_secret(path: str) -> str:
    """Read a file of one line. Raises `ConfigError`."""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a file with a secret, got {error}") from error
    if not secret or not secret.isascii() or len(secret.split()) > 1:
        raise ConfigError(f"{path}: expected one line of ASCII without spaces")
    return secret


def _engine_urls(role: str, urls: Sequence[str], may_be_empty: bool) -> tuple[str, ...]:
    checked = tuple(_named_url(_OPTIONS.get(role, f"--{role}"), url) for url in urls)
    if not checked and not may_be_empty:
        raise ConfigError(
            f"no {role} engine given: expected --engine http://HOST:PORT, or for fixed roles "
            "--prefill and --decode; name at least one engine"
        )
    if repeated := {url for url in checked if checked.count(url) > 1}:
        raise ConfigError(f"{role} engine given twice: {sorted(repeated)[0]}")
    return checked


_OPTIONS = {"both": "--engine"}


def _named_url(given_by: str, url: str) -> str:
    prefix = DNS_SCHEME if url.startswith(DNS_SCHEME + "http://") else ""
    return prefix + engine_url(given_by, url.removeprefix(prefix))


def engine_url(given_by: str, url: str) -> str:
    """Normalise *url* as engines are known by it. Raises `ConfigError` that names *given_by*."""
    expected = f"{given_by}: expected http://HOST:PORT or https://HOST:PORT, got {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as its resolver does, and fails
    except ValueError as error:
        raise ConfigError(f"{expected} ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{expected}; write the address that vllm serve listens on")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{expected}; leave out /v1, which requests bring along")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"{expected}: no query, fragment, user or password belongs there")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def server_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS towards clients; None: plain HTTP. Raises `ConfigError`."""
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
    """TLS towards engines, verified by a file or as the system does. Raises `ConfigError`."""
    if not config.engine_ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=config.engine_ca_file)
    except (OSError, ValueError) as error:
        message = f"{config.engine_ca_file}: expected certificates in PEM, got {error}"
        raise ConfigError(message) from error
