"""The connector's settings: what may stand in ``kv_connector_extra_config``."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_commext.errors import ConfigError

NUM_THREADS = 4
NEVER, AUTO = "never", "auto"


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of one engine's connector, validated once; all time spans are in seconds.

    Attributes:
        backends: NIXL backends to create, in order of preference.
        backend_params: parameters of each backend, as NIXL's plug-ins name them; ``num_threads``
            of UCX is 4 where it is not set, and each thread holds doorbell pages on RDMA NICs.
        enforce_handshake_compat: refuse a peer whose configuration differs, or warn and go on where
            the bytes still have the same size and order.
        require_fence: refuse request parameters without a fence, or warn and read blocks that could
            have been freed unnoticed.
        side_channel_host: address that a prefill engine listens on and tells the decode engine.
        side_channel_port: port of the first data-parallel rank; rank ``i`` listens on ``port + i``.
        side_channel_secret_file: "" for none; see ``seal``.
        kv_lease_duration: a prefill engine keeps blocks for so long after the last sign of a
            reader; decode engines that wait or read give one each sixth of it.
        kv_lease_max_duration: it keeps them no longer, whatever the readers say.
        handshake_timeout: bound on the exchange with a peer that is new to this worker.
        peers: ``host:port`` of side channels to connect to before the first request.
        transfer_timeout: a load fails when nothing of it has arrived for so long, although it was
            its turn; its blocks stay out of use until NIXL reports the end of its reads.
        max_bytes_in_flight: bytes that one worker reads from one prefill worker at a time; further
            loads wait for their turn, and one that is larger is read alone.
        host_copy: let peers read from a copy of the cache in host memory and write to the device
            from there; also ``kv_buffer_device: cpu`` beside a cache on another device.
        stream_begin_timeout: wait for a prefill engine to begin with a streamed request.
        reuse_blocks: let a decode engine that goes on with another one's answer read its blocks.
        reuse_lookup_timeout: wait for what others have; then it is computed.
        mapped_reads: ``AUTO``: read the caches of prefill workers on this host that do so, too,
            through a mapping of their GPU's memory; ``NEVER``: read everything by NIXL.
        transport_probe: measure how fast the first peer's cache can be read, and log it.
    """

    side_channel_host: str
    side_channel_port: int
    backends: tuple[str, ...] = ("UCX",)
    backend_params: Mapping[str, str] = field(default_factory=dict[str, str])
    enforce_handshake_compat: bool = True
    require_fence: bool = True
    kv_lease_duration: float = 60.0
    kv_lease_max_duration: float = 600.0
    handshake_timeout: float = 10.0
    peers: tuple[str, ...] = ()
    transfer_timeout: float = 60.0
    max_bytes_in_flight: int = 1 << 30
    host_copy: bool = False
    mapped_reads: str = AUTO
    transport_probe: bool = True
    first_token_from_prefill: bool = True
    stream_chunks: bool = True
    stream_begin_timeout: float = 300.0
    reuse_blocks: bool = False
    reuse_lookup_timeout: float = 0.5
    side_channel_secret_file: str = ""

    @property
    def num_threads(self) -> int:
        return int(self.backend_params.get("num_threads", NUM_THREADS))


_FIELDS = dataclasses.fields(ConnectorConfig)
KNOWN_KEYS = tuple(sorted(one.name for one in _FIELDS))
_SECONDS = tuple(one.name for one in _FIELDS if one.type is float)
_TOGGLES = tuple(one.name for one in _FIELDS if one.type is bool)
_PIECES = (
    "small pieces are read through mapped memory on one host (mapped_reads), else one by one: "
    "start engines on different hosts with equal tensor-parallel sizes"
)
GONE = {
    "gathered_reads": _PIECES,
    "gather_slots": _PIECES,
    "gather_slot_bytes": _PIECES,
    "gather_min_pieces": _PIECES,
    "wire_compression": "the KV cache is sent as it is; a smaller one is --kv-cache-dtype fp8",
    "num_threads": 'it is one of backend_params: {"num_threads": "8"}',
    "progress_interval": "NIXL's progress thread looks every 0.02 s, and at once at what arrives",
    "peer_idle_timeout": "a prefill worker that no request needs is forgotten after half an hour",
    "max_peers": "a worker knows up to 128 prefill workers, the ones needed last",
    "reuse_min_tokens": "only blocks of answers that go on at another engine are read, and all of "
    "them: leave it out",
}
"""Keys of earlier releases, and what takes their place."""
_ADDRESS = re.compile(r"(\[(?P<ipv6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})")


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


def _checked(key: str, value: Any) -> Any:
    if key in _SECONDS:
        return _expect(key, value, _is_span(value), "a positive, finite number of seconds", float)
    if key == "max_bytes_in_flight":
        return _expect(key, value, _is_int(value) and value > 0, "an integer of at least 1", int)
    if key == "side_channel_port":
        in_range = _is_int(value) and 0 < value < 65536
        return _expect(key, value, in_range, "a port from 1 to 65535", int)
    if key in _TOGGLES:
        return _expect(key, value, isinstance(value, bool), "true or false", bool)
    if key == "mapped_reads":
        return _expect(key, value, value in (AUTO, NEVER), f'"{AUTO}" or "{NEVER}"', str)
    if key == "peers":
        good = isinstance(value, (list, tuple)) and all(parse_address(one) for one in value)
        expected = 'a list of side channels such as ["prefill-0:5600", "[fd00::7]:5600"]'
        return _expect(key, value, good, expected, tuple)
    if key == "backend_params":
        named = isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
        named = named and str(value.get("num_threads", 0)).isdecimal()
        expected = "an object whose values are strings, and num_threads a number"
        return _expect(key, value, named, expected, dict)
    if key == "side_channel_secret_file":
        return _expect(key, value, isinstance(value, str), "the path of a file", str)
    if key == "side_channel_host":
        return _expect(key, value, isinstance(value, str) and value != "", "a host name", str)
    named = isinstance(value, (list, tuple)) and len(value) > 0
    named = named and all(isinstance(name, str) for name in value)
    return _expect(key, value, named, 'a list of NIXL backends such as ["UCX"]', tuple)


def parse_address(text: Any) -> tuple[str, int] | None:
    """Host and port of ``host:port``, brackets around an IPv6 address; None for anything else."""
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if found is None or not 0 < int(found["port"]) < 65536:
        return None
    return found["ipv6"] or found["host"], int(found["port"])


def _expect(key: str, value: Any, good: bool, expected: str, convert: type) -> Any:
    if not good:
        raise ConfigError(f"kv_connector_extra_config[{key!r}]: expected {expected}, got {value!r}")
    return convert(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_span(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and value > 0 and math.isfinite(value)
