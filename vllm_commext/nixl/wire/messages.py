"""What crosses the network between engines: msgpack frames with a magic and a version.

Two channels carry them: the side channel, whose questions and answers are here, and NIXL, see
``notifications``.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, TypeVar

import msgspec

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.geometry.layout import CacheLayout, check_layout

MAGIC = "commext-nixl"
PROTOCOL_VERSION = 4

MAX_REQUEST_BYTES = 4 * 1024
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_DEVICES = 4096
MAX_ROWS = 4096
MAX_PIECES = 1 << 18
"""Of a progress table: rows, and pieces of block ids in each."""
MAX_WAIT_SECONDS = 1.0
MAX_KEYS = 64
"""Streams in one question."""
KEY_DIGITS = 32
HASH_BYTES = 32
MAX_HASHES = 1 << 15
"""Blocks in one question: half a million tokens in blocks of 16."""
MAX_MAPPED_REGIONS = 4096
HANDLE_BYTES = 64
"""Of a handle of CUDA's."""
MAX_ADDRESS = 1 << 62
MAX_TOKEN_BYTES = 1024
MAX_QUESTION_BYTES = MAX_HASHES * HASH_BYTES + MAX_REQUEST_BYTES
"""Of a request to an engine that has blocks on offer."""


class Frame(msgspec.Struct, tag_field="kind", kw_only=True, frozen=True):
    """Common to all frames."""

    magic: str = MAGIC
    version: int = PROTOCOL_VERSION


class DescribeRequest(Frame, tag="describe", frozen=True):
    """Side channel, decode to prefill: describe one worker.

    Attributes:
        engine_id: the prefill engine that the request is meant for, "" for whichever it is.
        tp_rank: number of the worker there: its tensor-parallel rank where the engine has no
            pipeline stages, else the stages' ranks counted on.
        consumer: who asks, engine id and worker number.
        configuration: digest of the facts of the engine that asks.
    """

    engine_id: str
    tp_rank: int
    consumer: str = ""
    configuration: str = ""


class Described(Frame, tag="described", frozen=True):
    """Side channel, the answer.

    Attributes:
        incarnation: differs at every start of the engine; the request parameters carry it too.
        description: an encoded ``WorkerDescription``.
        checksum: SHA-256 digest of the description.
        host: what request parameters call the side channel's host.
        port: its port.
    """

    incarnation: str
    description: bytes
    checksum: bytes
    host: str = ""
    port: int = 0


class Refused(Frame, tag="refused", frozen=True):
    """Side channel, the answer to what cannot be served."""

    reason: str


class Draining(Frame, tag="draining", frozen=True):
    """Side channel, prefill to decode, to whoever has asked: whether the engine drains has changed.
    What it holds can still be read; it takes no new requests.

    Attributes:
        drains: whether it does now.
    """

    drains: bool


class FindStreams(Frame, tag="find_streams", frozen=True):
    """Side channel, decode to prefill: where are the prompts with these keys read, and which tokens
    follow?  It is answered as soon as something of that is known; the asker's next question, over
    the same connection, takes its place.

    Attributes:
        keys: of prompts that are looked for, as their router chose them.
        awaited: of prompts whose first tokens are; together at most ``MAX_KEYS``.
        wait_seconds: when it is answered at the latest, at most ``MAX_WAIT_SECONDS``.
        consumer: who asks, engine id.
    """

    keys: list[str]
    awaited: list[str] = []
    wait_seconds: float = 0.0
    consumer: str = ""


class FoundStream(msgspec.Struct, kw_only=True, frozen=True):
    """Where a prompt is read while it is computed.

    Attributes:
        refusal: why it will not be, "" where it is.
        request_id: the request's id in the prefill engine.
        num_tokens: tokens of its prompt.
        row: its row of the workers' progress tables, see ``stream.rows``.
        tag: what tells it there from other requests that get the row.
        fence_slot: slot of its fence.
        fence_nonce: what stands there until the request is preempted or ends.
        prompt: what is computed, see ``prompt.digests``.
        regions: where each group's block ids begin in the row, in pieces.
        first_token: the token that was sampled after the prompt, -1 where there is none yet, or
            none that another engine could use.
        sampling: what it was drawn by, see ``first_token``.
    """

    refusal: str = ""
    request_id: str = ""
    num_tokens: int = 0
    row: int = -1
    tag: int = 0
    fence_slot: int = -1
    fence_nonce: int = 0
    prompt: dict[str, str] = {}
    regions: list[int] = []
    first_token: int = -1
    sampling: str = ""


class FoundStreams(Frame, tag="found_streams", frozen=True):
    """Side channel, the answer: what is known of the keys, by key; of the others nothing, yet.

    Attributes:
        engine_id: the prefill engine.
        incarnation: differs at every start of the engine.
        host: what request parameters call the side channel's host.
        port: its port.
        tp_size: the engine's tensor-parallel ranks.
        found: by key.
        pp_size: its pipeline stages.
    """

    engine_id: str
    incarnation: str
    host: str
    port: int
    tp_size: int
    found: dict[str, FoundStream]
    pp_size: int = 1


class FindBlocks(Frame, tag="find_blocks", frozen=True):
    """Side channel, between any two engines: which of these blocks are on offer?

    Attributes:
        hashes: of a prompt's blocks from its first on, see ``reuse.hashes``, one behind the other,
            ``HASH_BYTES`` each and at most ``MAX_HASHES``.
        consumer: who asks, engine id.
    """

    hashes: bytes
    consumer: str = ""


class FoundBlocks(Frame, tag="found_blocks", frozen=True):
    """Side channel, the answer: the blocks up to the first that is not there.

    Attributes:
        engine_id: the engine that has them.
        incarnation: differs at every start of the engine.
        host: its side channel's host, as request parameters would call it.
        port: its side channel's port.
        tp_size: the engine's tensor-parallel ranks.
        block_ids: by position in the prompt.
        generations: what stands at each of them as long as its bytes do, see
            ``reuse.generations``.
    """

    engine_id: str
    incarnation: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    block_ids: list[Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]]
    generations: list[Annotated[int, msgspec.Meta(ge=0)]]


class MappedRegion(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation of a worker's GPU memory, by which other processes of its host map it.

    Attributes:
        address: in the worker's process.
        num_bytes: of the allocation.
        handle: CUDA's, for another process.
    """

    address: int
    num_bytes: int
    handle: bytes


class MappedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's cache is read by processes of its host through a mapping, see ``mapped``.

    Attributes:
        place: what processes have in common that can open the handles, see
            ``mapped.reader.place_of_process``.
        regions: all allocations with parts of the cache, and the token's.
        token_address: where a reader finds the token, within a region.
        token: drawn at the worker's start.
    """

    place: str
    regions: list[MappedRegion]
    token_address: int
    token: bytes


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decode worker must know of a prefill worker.

    Attributes:
        engine_id: the engine's id as in the request parameters.
        facts: configuration on which both sides must agree, name to value.
        agent_metadata: what NIXL needs to reach the agent.
        memory_type: NIXL memory type of the cache, "DRAM" or "VRAM".
        device_id: device of the cache.
        layout: what the cache looks like in memory.
        fence_address: address of the worker's nonces, see ``fence``.
        num_fence_slots: how many there are, 0 for none.
        lease_seconds: how long the worker keeps a request's blocks after the last sign of a reader,
            0 where it takes no ``KeepAlive``.
        stream_headers: address of the headers of its progress table, see
            ``stream.rows``.
        stream_entries: address of the progress table's block ids.
        num_stream_rows: rows of the progress table, 0 where it streams nothing.
        pieces_per_row: pieces of block ids in a row.
        generations: address of its blocks' generations, see ``reuse.generations``.
        num_generations: how many there are: one a block, or 0 where it has no blocks on offer.
        mapped: how its cache is read through a mapping, None where it is not.
    """

    engine_id: str
    facts: dict[str, str]
    agent_metadata: bytes
    memory_type: str
    device_id: int
    layout: CacheLayout
    fence_address: int = 0
    num_fence_slots: int = 0
    lease_seconds: float = 0.0
    stream_headers: int = 0
    stream_entries: int = 0
    num_stream_rows: int = 0
    pieces_per_row: int = 0
    generations: int = 0
    num_generations: int = 0
    mapped: MappedOffer | None = None


AnyRequest = DescribeRequest | FindStreams | FindBlocks
AnyReply = Described | FoundStreams | FoundBlocks
_Any = TypeVar("_Any")
_REQUEST = msgspec.msgpack.Decoder(AnyRequest)
_REPLY = msgspec.msgpack.Decoder(AnyReply | Refused)
_NEWS = msgspec.msgpack.Decoder(Draining)
_DESCRIPTION = msgspec.msgpack.Decoder(WorkerDescription)


def encode(frame: Frame) -> bytes:
    """One frame as msgpack."""
    return msgspec.msgpack.encode(frame)


def decode_request(frame: bytes, max_bytes: int = MAX_REQUEST_BYTES) -> AnyRequest:
    """Decode what arrived at a side channel; raises ProtocolError."""
    return checked(decode(_REQUEST, frame, max_bytes, "handshake request"))


def decode_reply(frame: bytes) -> AnyReply | Refused:
    """Decode the answer of a side channel; raises ProtocolError."""
    return checked(decode(_REPLY, frame, MAX_REPLY_BYTES, "handshake reply"))


def decode_news(frame: bytes) -> Draining:
    """Decode what a side channel sends after its answer; raises ProtocolError."""
    return checked(decode(_NEWS, frame, MAX_REQUEST_BYTES, "side-channel news"))


def encode_description(description: WorkerDescription) -> bytes:
    """A worker's description as msgpack, for ``describe``."""
    return msgspec.msgpack.encode(description)


def describe(description: bytes, incarnation: str, host: str = "", port: int = 0) -> Described:
    """Wrap an encoded ``WorkerDescription`` for the side channel at ``host`` and ``port``."""
    checksum = hashlib.sha256(description).digest()
    return Described(
        incarnation=incarnation, description=description, checksum=checksum, host=host, port=port
    )


def open_description(reply: Described) -> WorkerDescription:
    """Check and decode a worker's description.

    Raises:
        ProtocolError: the checksum does not fit, or the description is not complete and consistent.
    """
    if hashlib.sha256(reply.description).digest() != reply.checksum:
        raise ProtocolError("the worker description does not fit its checksum: it was altered")
    opened = decode(_DESCRIPTION, reply.description, MAX_REPLY_BYTES, "worker description")
    check_layout(opened.layout)
    if not 0 <= opened.device_id < MAX_DEVICES or opened.num_fence_slots < 0:
        raise ProtocolError("the worker description's device or number of slots is out of range")
    if not (0 <= opened.num_stream_rows <= MAX_ROWS and 0 <= opened.pieces_per_row <= MAX_PIECES):
        raise ProtocolError("the worker description's progress table is out of range")
    if opened.num_generations not in (0, opened.layout.num_blocks):
        raise ProtocolError(
            f"expected num_generations 0 or {opened.layout.num_blocks}, as there are blocks, got "
            f"{opened.num_generations}"
        )
    if opened.mapped is not None:
        _check_offer(opened.mapped)
    if not 0 <= opened.lease_seconds < math.inf:
        raise ProtocolError(
            f"expected lease_seconds of at least 0 and finite, got {opened.lease_seconds}"
        )
    return opened


def _check_offer(offer: MappedOffer) -> None:
    numbers = [number for one in offer.regions for number in (one.address, one.num_bytes)]
    in_range = all(0 < number < MAX_ADDRESS for number in (*numbers, offer.token_address))
    has_handles = all(len(one.handle) == HANDLE_BYTES for one in offer.regions)
    if (
        not (in_range and has_handles)
        or len(offer.regions) > MAX_MAPPED_REGIONS
        or not 0 < len(offer.token) <= MAX_TOKEN_BYTES
    ):
        raise ProtocolError("the worker description's offer of mapped memory is out of range")


def decode(decoder: msgspec.msgpack.Decoder[_Any], frame: bytes, max_bytes: int, what: str) -> _Any:
    """What a decoder makes of bytes, *what* they should be; raises ProtocolError."""
    if len(frame) > max_bytes:
        raise ProtocolError(f"{what}: expected at most {max_bytes} bytes, got {len(frame)}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: not a frame of this protocol ({error})") from error


_AnyFrame = TypeVar("_AnyFrame", bound=Frame)


def checked(frame: _AnyFrame) -> _AnyFrame:
    """A frame of this protocol; raises ProtocolError where it is of another one."""
    if frame.magic != MAGIC or frame.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"expected {MAGIC} protocol {PROTOCOL_VERSION}, got {frame.magic!r} protocol "
            f"{frame.version}: install the same vllm-commext on both sides"
        )
    return frame
