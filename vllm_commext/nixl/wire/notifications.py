"""What a decode worker tells a prefill worker through NIXL: that it has read a request's blocks, or
that it is going to."""

from __future__ import annotations

import hashlib

import msgspec

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire.messages import Frame, checked, decode

MAX_NOTIFICATION_BYTES = 64 * 1024
MAX_ID_CHARACTERS = 128
"""Of a request or consumer, see `short_id`."""
MAX_CONSUMERS = 1024
"""Of one request."""


class Released(Frame, tag="released", frozen=True):
    """NIXL notification, decode to prefill: a consumer needs the request's blocks no longer.

    Attributes:
        request_id: the request's id in the prefill engine, as `short_id` gives it.
        consumer: engine id and worker number of the reader; the same consumer counts once.
        num_consumers: consumers that the prefill worker has to wait for.
    """

    request_id: str
    consumer: str
    num_consumers: int


class KeepAlive(Frame, tag="keep_alive", frozen=True):
    """NIXL notification, decode to prefill: a consumer still waits for these requests' blocks or
    reads them.

    Attributes:
        consumer: engine id and worker number of the reader, as in ``Released``.
        sender: differs at every start of the reader.
        sequence: grows with each message of the sender.
        request_ids: the requests' ids in the prefill engine, as `short_id` gives them.
    """

    consumer: str
    sender: str
    sequence: int
    request_ids: list[str]


_NOTIFICATION = msgspec.msgpack.Decoder(Released | KeepAlive)


def decode_notification(frame: bytes) -> Released | KeepAlive:
    """Decode a NIXL notification; raises ProtocolError."""
    told = checked(decode(_NOTIFICATION, frame, MAX_NOTIFICATION_BYTES, "notification"))
    if isinstance(told, Released):
        names = (told.request_id, told.consumer)
        if not 0 < told.num_consumers <= MAX_CONSUMERS:
            raise ProtocolError(
                f"notification: expected 1 to {MAX_CONSUMERS} consumers, got {told.num_consumers}"
            )
    else:
        names = (told.consumer, told.sender, *told.request_ids)
    longest = max(map(len, names))
    if longest > MAX_ID_CHARACTERS:
        raise ProtocolError(
            f"notification: expected ids of at most {MAX_ID_CHARACTERS} characters, got {longest}"
        )
    return told


def short_id(name: str) -> str:
    """What notifications call a request or consumer: its id, or as much of a long one as fits and a
    digest."""
    if len(name) <= MAX_ID_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{name[: MAX_ID_CHARACTERS - len(digest)]}{digest}"
