"""Frames: what goes out comes in, and everything else is a ProtocolError and nothing worse."""

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import describe
from vllm_commext.nixl.wire.messages import (
    MAX_CONSUMERS,
    MAX_ID_CHARACTERS,
    MAX_NOTIFICATION_BYTES,
    KeepAlive,
    Released,
    decode_notification,
    short_id,
)

REQUEST = wire.DescribeRequest(engine_id="engine-ä", tp_rank=3)
RELEASED = Released(request_id="r1", consumer="d/0", num_consumers=2)
KEEP_ALIVE = KeepAlive(consumer="d/0", request_ids=["r1", "r2"])
REFUSED = wire.Refused(reason="no")
DESCRIBED = describe(b"a description", "start-1")

Decode = Callable[[bytes], Any]
FRAMES: list[tuple[Decode, wire.Frame]] = [
    (wire.decode_request, REQUEST),
    (wire.decode_reply, DESCRIBED),
    (wire.decode_reply, REFUSED),
    (wire.decode_reply, wire.Draining(drains=True)),
    (decode_notification, RELEASED),
    (decode_notification, KEEP_ALIVE),
]
DECODERS: list[Decode] = [wire.decode_request, wire.decode_reply, decode_notification]


def is_refused(decode: Callable[[Any], Any], frame: Any) -> bool:
    try:
        decode(frame)
    except ProtocolError as error:
        return str(error) != ""
    return False


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_round_trip(decode: Decode, frame: wire.Frame) -> None:
    assert decode(wire.encode(frame)) == frame


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_every_truncation_and_every_appended_byte_is_refused(
    decode: Decode, frame: wire.Frame
) -> None:
    encoded = wire.encode(frame)
    for end in range(len(encoded)):
        assert is_refused(decode, encoded[:end]), end
    for byte in range(256):
        assert is_refused(decode, encoded + bytes([byte])), byte


@pytest.mark.parametrize("decode", DECODERS)
def test_frames_of_another_kind_are_refused(decode: Decode) -> None:
    for own, frame in FRAMES:
        assert is_refused(decode, wire.encode(frame)) == (own is not decode)


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["magic", "version", "engine_id", "tp_rank", "reason", "request_id", "x"]),
        PLAIN,
    ),
    st.sampled_from(["describe", "described", "refused", "released"]),
)
@settings(max_examples=80)
def test_well_formed_msgpack_of_other_shapes_decodes_or_is_refused(
    fields: dict[str, Any], kind: str
) -> None:
    frame = msgspec.msgpack.encode({"kind": kind, **fields})
    for decode in DECODERS:
        _decode_or_refuse(decode, frame)


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_deep_nesting_is_refused(decode: Decode, frame: wire.Frame) -> None:
    # Within the size limit of every frame, deeper than Python 3.11 lets a decoder recurse; newer
    # ones let it, and the unknown field is skipped.
    fields = {**msgspec.msgpack.decode(wire.encode(frame)), "x": None}
    encoded = msgspec.msgpack.encode(fields)
    assert encoded[-1:] == b"\xc0"
    nested = encoded[:-1] + b"\x91" * 3500 + b"\xc0"
    assert is_refused(decode, nested) or sys.version_info >= (3, 12)


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
@pytest.mark.parametrize("change", [{"magic": "other"}, {"version": 1}, {"version": 3}])
def test_another_magic_or_version_is_refused_with_both_named(
    decode: Decode, frame: wire.Frame, change: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(wire.encode(replace(frame, **change)))
    assert f"expected {wire.MAGIC} protocol {wire.PROTOCOL_VERSION}" in str(raised.value)
    assert str(next(iter(change.values()))) in str(raised.value)
    assert "install the same vllm-commext" in str(raised.value)


@pytest.mark.parametrize("decode", DECODERS)
def test_a_strange_magic_cannot_begin_a_log_line(decode: Decode) -> None:
    for own, frame in FRAMES:
        if own is decode:
            strange = replace(frame, magic="x\nERROR all is lost")
            with pytest.raises(ProtocolError) as raised:
                decode(wire.encode(strange))
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("decode", "frame", "limit"),
    [
        (
            wire.decode_request,
            wire.DescribeRequest(engine_id="e" * wire.MAX_REQUEST_BYTES, tp_rank=0),
            wire.MAX_REQUEST_BYTES,
        ),
        (
            decode_notification,
            Released(request_id="r" * MAX_NOTIFICATION_BYTES, consumer="c", num_consumers=1),
            MAX_NOTIFICATION_BYTES,
        ),
    ],
)
def test_an_oversized_frame_is_refused_with_the_limit(
    decode: Decode, frame: wire.Frame, limit: int
) -> None:
    encoded = wire.encode(frame)
    with pytest.raises(ProtocolError, match=f"at most {limit} bytes, got {len(encoded)}"):
        decode(encoded)


def test_an_oversized_reply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_REPLY_BYTES", 100)
    with pytest.raises(ProtocolError, match="at most 100 bytes"):
        wire.decode_reply(wire.encode(DESCRIBED))


def _decode_or_refuse(decode: Callable[[Any], Any], frame: Any) -> None:
    try:
        decode(frame)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "told",
    [
        Released(request_id="r" * 129, consumer="c", num_consumers=1),
        Released(request_id="r", consumer="c" * 60_000, num_consumers=1),
        Released(request_id="r", consumer="c", num_consumers=0),
        Released(request_id="r", consumer="c", num_consumers=-1),
        Released(request_id="r", consumer="c", num_consumers=1025),
        Released(request_id="r", consumer="c", num_consumers=1 << 60),
        KeepAlive(consumer="c" * 129, request_ids=[]),
        KeepAlive(consumer="c", request_ids=["r", "r" * 129]),
    ],
)
def test_notifications_of_any_length_are_refused(told: Released | KeepAlive) -> None:
    with pytest.raises(ProtocolError, match="notification: .*Expected"):
        decode_notification(wire.encode(told))


@given(st.text(max_size=300), st.text(max_size=300))
def test_a_short_id_fits_and_is_one_ids_alone(one: str, other: str) -> None:
    short = short_id(one)
    assert len(short) <= MAX_ID_CHARACTERS
    assert (short == short_id(other)) == (one == other)
    assert short == one or len(one) > MAX_ID_CHARACTERS
    told = Released(request_id=short, consumer=short, num_consumers=MAX_CONSUMERS)
    assert decode_notification(wire.encode(told)) == told
