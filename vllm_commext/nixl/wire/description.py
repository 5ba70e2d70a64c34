"""A worker's description on the side channel, and the comparison of two engines' facts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_commext.errors import ProtocolError, UnsupportedError
from vllm_commext.nixl.geometry.layout import CacheLayout, check_layout
from vllm_commext.nixl.wire.messages import MAX_REPLY_BYTES, Described, decode

MAX_DEVICES = 4096
MAX_ROWS = 4096
MAX_PIECES = 1 << 18  # of a progress table: rows, and pieces of block ids in each
MAX_MAPPED_REGIONS = 4096
HANDLE_BYTES = 64  # of a handle of CUDA's
MAX_ADDRESS = 1 << 62
MAX_TOKEN_BYTES = 1024


Bounded = Annotated[int, Meta(gt=0, lt=MAX_ADDRESS)]


class MappedRegion(msgspec.Struct, frozen=True, kw_only=True):
    address: Bounded
    num_bytes: Bounded
    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class MappedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's cache is read by processes of its host through a mapping, see ``mapped``.

    Attributes:
        regions: all allocations with parts of the cache, and the token's.
        token_address: where a reader finds the token, within a region.
    """

    place: str
    regions: Annotated[list[MappedRegion], Meta(max_length=MAX_MAPPED_REGIONS)]
    token_address: Bounded
    token: Annotated[bytes, Meta(min_length=1, max_length=MAX_TOKEN_BYTES)]


FENCES, GENERATIONS = "fences", "generations"
STREAM_HEADERS, STREAM_PIECES = "stream headers", "stream pieces"
TablePlace = tuple[Bounded, Annotated[int, Meta(ge=1, le=MAX_ROWS * MAX_PIECES)]]


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decode worker must know of a prefill worker.

    Attributes:
        memory_type: NIXL memory type of the cache, "DRAM" or "VRAM".
        lease_seconds: how long the worker keeps a request's blocks after the last sign of a reader,
            0 where it takes no ``KeepAlive``.
        tables: what is read beside the cache, by name: address and number of records.
        mapped: None where its cache is not read through a mapping.
    """

    engine_id: str
    facts: dict[str, str]
    agent_metadata: bytes
    memory_type: str
    device_id: Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]
    layout: CacheLayout
    lease_seconds: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 0.0
    tables: Annotated[dict[str, TablePlace], Meta(max_length=16)] = {}
    mapped: MappedOffer | None = None


_DESCRIPTION = msgspec.msgpack.Decoder(WorkerDescription)


def encode_description(description: WorkerDescription) -> bytes:
    return msgspec.msgpack.encode(description)


def describe(description: bytes, incarnation: str, host: str = "", port: int = 0) -> Described:
    checksum = hashlib.sha256(description).digest()
    return Described(
        incarnation=incarnation, description=description, checksum=checksum, host=host, port=port
    )


def open_description(reply: Described) -> WorkerDescription:
    """Check and decode a worker's description; raises ProtocolError."""
    if hashlib.sha256(reply.description).digest() != reply.checksum:
        raise ProtocolError("the worker description does not fit its checksum: it was altered")
    opened = decode(_DESCRIPTION, reply.description, MAX_REPLY_BYTES, "worker description")
    check_layout(opened.layout)
    num_blocks = opened.layout.num_blocks
    _, num_generations = opened.tables.get(GENERATIONS, (0, num_blocks))
    if num_generations != num_blocks:
        raise ProtocolError(
            f"expected {num_blocks} generations, as there are blocks, got {num_generations}"
        )
    return opened


GEOMETRY = ("dtype", "layer_specs", "cache_dtype", "num_kv_heads", "head_size", "num_layers")
"""Facts that fix what the bytes mean: a difference here is refused whatever the settings say.
Sizes and order of the bytes themselves are compared by the planner."""

INFORMATIVE = ("vllm_version",)
"""Facts that are told and never refused: what they may change is compared by itself."""


def digest(facts: Mapping[str, str]) -> str:
    """SHA-256 of the facts, hexadecimal; equal if and only if all are that could be refused."""
    compared = {name: value for name, value in facts.items() if name not in INFORMATIVE}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def differences(local: Mapping[str, str], remote: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that differ: name to (local value, remote value); a missing value reads "(unknown)"."""
    names = sorted(set(local) | set(remote))
    pairs = {name: (local.get(name, "(unknown)"), remote.get(name, "(unknown)")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_facts(
    local: Mapping[str, str], remote: Mapping[str, str], *, enforce: bool
) -> dict[str, tuple[str, str]]:
    """Compare two engines' facts; returns the tolerated differences, to be logged.

    Args:
        enforce: refuse any difference but one that only informs, not only one of geometry.

    Raises:
        UnsupportedError: a difference that is not tolerated; the message lists every one of them.
    """
    found = differences(local, remote)
    names = set(found) - set(INFORMATIVE) if enforce else set(found) & set(GEOMETRY)
    refused = {name: pair for name, pair in found.items() if name in names}
    if not refused:
        return found
    listed = "; ".join(
        f"{name}: decode {ours!r}, prefill {theirs!r}" for name, (ours, theirs) in refused.items()
    )
    remedy = "start both engines with the same value"
    if "weight_files" in refused:
        remedy = "load the same weight files on both engines; " + remedy
    if not any(name in GEOMETRY for name in refused):
        remedy += ', or set "enforce_handshake_compat": false if they mean the same'
    raise UnsupportedError(f"the engines' configurations differ: {listed}. Remedy: {remedy}")
