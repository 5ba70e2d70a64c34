"""Frames that engines send each other, over the side channel and as NIXL notifications: msgpack
with a magic and a version."""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from vllm_commext.errors import ProtocolError

MAGIC = "commext-nixl"
PROTOCOL_VERSION = 4

MAX_REQUEST_BYTES = 4 * 1024
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_WAIT_SECONDS = 1.0
MAX_KEYS = 64  # streams in one question
KEY_DIGITS = 32
HASH_BYTES = 32
MAX_HASHES = 1 << 15  # blocks in one question: half a million tokens in blocks of 16
MAX_QUESTION_BYTES = MAX_HASHES * HASH_BYTES + MAX_REQUEST_BYTES
"""Of a request to an engine that has blocks on offer."""


Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
MAX_RANKS = 1024  # a load may have a part for each, and what is derived from each number is kept
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Frame(msgspec.Struct, tag_field="kind", kw_only=True, frozen=True):
    magic: str = MAGIC
    version: int = PROTOCOL_VERSION


class DescribeRequest(Frame, tag="describe", frozen=True):
    """Side channel, decode to prefill: describe one worker.

    Attributes:
        engine_id: "" for whichever engine it is.
        tp_rank: the worker's number there, see ``worker_number``.
    """

    engine_id: str
    tp_rank: int


class Described(Frame, tag="described", frozen=True):
    """Side channel, the answer; host and port as request parameters name them.

    Attributes:
        checksum: SHA-256 digest of the description.
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
    """Side channel, prefill to decode: whether the engine drains has changed.  Its blocks can still
    be read; it takes no new requests."""

    drains: bool


class FindStreams(Frame, tag="find_streams", frozen=True):
    """Side channel, decode to prefill: where are the prompts with these keys read, and which tokens
    follow?  It is answered as soon as something of that is known; the asker's next question, over
    the same connection, takes its place.

    Attributes:
        awaited: of prompts whose first tokens are; together at most ``MAX_KEYS``.
        wait_seconds: when it is answered at the latest, at most ``MAX_WAIT_SECONDS``.
    """

    keys: list[str]
    awaited: list[str] = []
    wait_seconds: float = 0.0


class FoundStream(msgspec.Struct, kw_only=True, frozen=True):
    """Where a prompt is read while it is computed.

    Attributes:
        refusal: why it will not be, "" where it is.
        row: of the workers' progress tables, see ``stream.progress``.
        tag: tells it there from other requests that get the row.
        fence_nonce: stands in the slot until the request is preempted or ends.
        regions: where each group's block ids begin in the row, in pieces.
        first_token: sampled after the prompt; -1 where there is none yet, or none that another
            engine could use.
        sampling: how it was drawn, see ``first_token``.
    """

    refusal: str = ""
    request_id: str = ""
    num_tokens: int = 0
    row: int = -1
    tag: Annotated[int, msgspec.Meta(ge=0)] = 0
    fence_slot: int = -1
    fence_nonce: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt: dict[str, str] = {}
    regions: list[int] = []
    first_token: int = -1
    sampling: str = ""


class FoundStreams(Frame, tag="found_streams", frozen=True):
    """Side channel, the answer: what is known by key; of the other keys nothing, yet."""

    engine_id: str
    incarnation: str
    host: str
    port: Port
    tp_size: Ranks
    found: dict[str, FoundStream]
    pp_size: Ranks


class FindBlocks(Frame, tag="find_blocks", frozen=True):
    """Side channel, between any two engines: which of these blocks are on offer?

    Attributes:
        hashes: of a prompt's blocks from its first on, see ``reuse``, one behind the other,
            ``HASH_BYTES`` each and at most ``MAX_HASHES``.
    """

    hashes: bytes


class FoundBlocks(Frame, tag="found_blocks", frozen=True):
    """Side channel, the answer: the blocks up to the first that is not there."""

    engine_id: str
    incarnation: str
    host: str
    port: Port
    tp_size: Ranks
    block_ids: list[Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]]
    generations: list[Annotated[int, msgspec.Meta(ge=0)]]


AnyRequest = DescribeRequest | FindStreams | FindBlocks
AnyReply = Described | FoundStreams | FoundBlocks
_Any = TypeVar("_Any")
_REQUEST = msgspec.msgpack.Decoder(AnyRequest)
_REPLY = msgspec.msgpack.Decoder(AnyReply | Refused | Draining)


def encode(frame: Frame) -> bytes:
    return msgspec.msgpack.encode(frame)


def decode_request(frame: bytes, max_bytes: int = MAX_REQUEST_BYTES) -> AnyRequest:
    """Decode what arrived at a side channel; raises ProtocolError."""
    return checked(decode(_REQUEST, frame, max_bytes, "handshake request"))


def decode_reply(frame: bytes) -> AnyReply | Refused | Draining:
    """Decode what a side channel sends; raises ProtocolError."""
    return checked(decode(_REPLY, frame, MAX_REPLY_BYTES, "handshake reply"))


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


MAX_NOTIFICATION_BYTES = 64 * 1024
MAX_ID_CHARACTERS = 128  # of a request or consumer, see `short_id`
MAX_CONSUMERS = 1024  # of one request


Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]


class Released(Frame, tag="released", frozen=True):
    """NIXL notification, decode to prefill: a consumer needs the request's blocks no longer.

    Attributes:
        consumer: engine id and worker number of the reader; the same consumer counts once.
        num_consumers: consumers that the prefill worker has to wait for.
    """

    request_id: Id
    consumer: Id
    num_consumers: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONSUMERS)]


class KeepAlive(Frame, tag="keep_alive", frozen=True):
    """NIXL notification, decode to prefill: a consumer still waits for these requests' blocks."""

    consumer: Id
    request_ids: list[Id]


_NOTIFICATION = msgspec.msgpack.Decoder(Released | KeepAlive)


def decode_notification(frame: bytes) -> Released | KeepAlive:
    """Decode a NIXL notification; raises ProtocolError."""
    return checked(decode(_NOTIFICATION, frame, MAX_NOTIFICATION_BYTES, "notification"))


def short_id(name: str) -> str:
    """An id in notifications: itself, or as much of a long one as fits and a digest."""
    if len(name) <= MAX_ID_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{name[: MAX_ID_CHARACTERS - len(digest)]}{digest}"
