"""The connector's settings: what may stand in ``kv_connector_extra_config``."""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from vllm_commext.errors import ConfigError

NUM_THREADS = 4
NEVER, AUTO = "never", "auto"
_ADDRESS = re.compile(r"(\[(?P<ipv6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})")
_PORT = Meta(ge=1, le=65535, description="a port from 1 to 65535")
_SPAN = Meta(gt=0, le=sys.float_info.max, description="a positive, finite number of seconds")
Span = Annotated[float, _SPAN]
Flag = Annotated[bool, Meta(description="true or false")]
Names = tuple[str, ...]
_BACKENDS = Meta(min_length=1, description='a list of NIXL backends such as ["UCX"]')
_PARAMS = Meta(description="an object whose values are strings, and num_threads a number")
_BYTES = Meta(ge=1, description="an integer of at least 1")
_MAPPED = Meta(pattern=rf"^({AUTO}|{NEVER})\Z", description=f'"{AUTO}" or "{NEVER}"')
_PEERS = Meta(description='a list of side channels such as ["prefill-0:5600", "[fd00::7]:5600"]')


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of one engine's connector, validated once; all time spans are in seconds.
    docs/nixl_connector.md has the meaning of each."""

    side_channel_host: Annotated[str, Meta(min_length=1, description="a host name")]
    side_channel_port: Annotated[int, _PORT]
    backends: Annotated[Names, _BACKENDS] = ("UCX",)
    backend_params: Annotated[Mapping[str, str], _PARAMS] = field(default_factory=dict[str, str])
    enforce_handshake_compat: Flag = True
    kv_lease_duration: Span = 60.0
    kv_lease_max_duration: Span = 600.0
    handshake_timeout: Span = 10.0
    peers: Annotated[Names, _PEERS] = ()
    transfer_timeout: Span = 60.0
    max_bytes_in_flight: Annotated[int, _BYTES] = 1 << 30
    host_copy: Flag = False
    mapped_reads: Annotated[str, _MAPPED] = AUTO
    transport_probe: Flag = True
    first_token_from_prefill: Flag = True
    stream_chunks: Flag = True
    stream_begin_timeout: Span = 300.0
    reuse_blocks: Flag = False
    reuse_lookup_timeout: Span = 0.5
    side_channel_secret_file: Annotated[str, Meta(description="the path of a file")] = ""

    @property
    def num_threads(self) -> int:
        return int(self.backend_params.get("num_threads", NUM_THREADS))


_TYPES = get_type_hints(ConnectorConfig, include_extras=True)
KNOWN_KEYS = tuple(sorted(_TYPES))
GONE = {
    "num_threads": 'it is one of backend_params: {"num_threads": "8"}',
    "progress_interval": "NIXL's progress thread looks every 0.02 s, and at once at what arrives",
    "peer_idle_timeout": "a prefill worker that no request needs is forgotten after half an hour",
    "require_fence": "parameters without a fence are refused",
    "max_peers": "a worker knows up to 128 prefill workers, the ones needed last",
}
"""Keys of the last release, and what takes their place."""


def parse_config(
    extra: Mapping[str, Any], *, default_host: str, default_port: int
) -> ConnectorConfig:
    """Read ``kv_connector_extra_config``; raises ConfigError."""
    for key in sorted(set(extra) & set(GONE)):
        raise ConfigError(f"kv_connector_extra_config[{key!r}] is gone: {GONE[key]}")
    unknown = sorted(set(extra) - set(KNOWN_KEYS))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has unknown keys {unknown}; "
            f"CommextNixlConnector knows {list(KNOWN_KEYS)}"
        )
    values = {"side_channel_host": default_host, "side_channel_port": default_port, **extra}
    return ConnectorConfig(**{key: _checked(key, value) for key, value in values.items()})


_IS_GOOD: Mapping[str, Callable[[Any], bool]] = {
    "peers": lambda peers: all(map(parse_address, peers)),
    "backend_params": lambda params: params.get("num_threads", "0").isdecimal(),
}


def _checked(key: str, value: Any) -> Any:
    kind = _TYPES[key]
    with contextlib.suppress(msgspec.ValidationError, ValueError):
        found = msgspec.convert(value, kind)
        is_good = _IS_GOOD.get(key)
        if is_good is None or is_good(found):
            return found
    expected = kind.__metadata__[0].description
    raise ConfigError(f"kv_connector_extra_config[{key!r}]: expected {expected}, got {value!r}")


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``, brackets around an IPv6 address; None for anything else."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        return None
    return found["ipv6"] or found["host"], int(found["port"])
