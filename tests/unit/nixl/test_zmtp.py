"""The side channel's framing: what one end writes the other reads however it is cut, nothing else
passes, and what is refused was not kept."""

import contextlib
import socket
import struct
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire import zmtp
from vllm_commext.nixl.wire.zmtp import DEALER, ROUTER, Decoder, header, opening

MAX_BYTES = 4096
GREETING = opening(DEALER)[: zmtp.GREETING_BYTES]
READY = opening(DEALER)[zmtp.GREETING_BYTES :]


def fed(data: bytes, sizes: list[int], kind: str = ROUTER) -> tuple[Decoder, list[bytes]]:
    """What a decoder takes from bytes that come in pieces of these sizes, again and again."""
    decoder, found, sizes = Decoder(kind, MAX_BYTES), [], sizes or [len(data) or 1]
    number = 0
    while data:
        size = sizes[number % len(sizes)]
        number += 1
        decoder.feed(data[:size])
        data = data[size:]
        while (message := decoder.take()) is not None:
            found.append(message)
        assert decoder.num_held <= MAX_BYTES + zmtp.MAX_HEADER_BYTES + size
    return decoder, found


@given(
    st.lists(st.tuples(st.binary(max_size=600) | st.just(b"x" * MAX_BYTES), st.booleans())),
    st.lists(st.integers(1, 700), max_size=8),
    st.sampled_from([(DEALER, ROUTER), (ROUTER, DEALER)]),
)
@settings(max_examples=200)
def test_what_one_end_writes_the_other_reads_however_it_is_cut(
    messages: list[tuple[bytes, bool]], sizes: list[int], ends: tuple[str, str]
) -> None:
    written = opening(ends[0])
    for message, is_enveloped in messages:
        written += header(len(message), is_enveloped=is_enveloped) + message
    decoder, found = fed(written, sizes, ends[1])
    assert found == [message for message, _ in messages]
    assert decoder.is_ready
    assert decoder.num_held == 0
    if messages:
        assert decoder.is_enveloped == messages[-1][1]


@given(
    st.sampled_from([b"", GREETING, opening(DEALER), opening(DEALER) + b"\x00\x01x"]),
    st.binary(max_size=2000),
    st.lists(st.integers(1, 300), max_size=4),
)
@settings(max_examples=500)
def test_bytes_of_any_kind_are_read_or_refused(head: bytes, tail: bytes, sizes: list[int]) -> None:
    with contextlib.suppress(ProtocolError):
        _, found = fed(head + tail, sizes)
        assert all(len(message) <= MAX_BYTES for message in found)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "ZMTP 3"),
        (b"\0" * 64, "ZMTP 3"),
        (b"\xff" + bytes(9), "ZMTP 3"),
        (b"\xff" + bytes(8) + b"\x7f\x01", "expected ZMTP 3, got 1"),
        (GREETING.replace(b"NULL", b"PLAIN"), "mechanism"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "mechanism"),
        (GREETING + b"\x00\x05hello", "READY"),
        (GREETING + b"\x04\x06\x05HELLO", "READY"),
        (GREETING + b"\x04\x0a\x05ERROR\x03bad", "refuses to talk"),
        (GREETING + opening(ROUTER)[64:], "expected a socket"),
        (GREETING + READY.replace(b"DEALER", b"PUBPUB"), "expected a socket"),
        (GREETING + b"\x04\x0c\x05READY\x05Socke", "cut short"),
        (GREETING + b"\x06" + struct.pack(">Q", 1 << 62), "at most 512"),
        (opening(DEALER) + b"\x04\x05\x04PING", "messages"),
        (opening(DEALER) + b"\x05\x00", "ZMTP 3"),
        (opening(DEALER) + b"\x80\x00", "ZMTP 3"),
        (opening(DEALER) + b"\x01\x01x", "one frame"),
        (opening(DEALER) + b"\x03" + struct.pack(">Q", MAX_BYTES), "one frame"),
        (opening(DEALER) + b"\x01\x00" * 2, "one frame"),
        (opening(DEALER) + b"\x02" + struct.pack(">Q", MAX_BYTES + 1), f"at most {MAX_BYTES}"),
        (opening(DEALER) + b"\x02" + b"\xff" * 8, f"at most {MAX_BYTES}"),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_first_bytes(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        fed(data, [1])


def test_the_last_allowed_size_passes() -> None:
    for size in (0, 255, 256, MAX_BYTES):
        assert fed(opening(DEALER) + header(size) + b"x" * size, [100])[1] == [b"x" * size]


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_real_zmq_sockets_are_understood_and_understand(context: Any, kind: int) -> None:
    """Byte for byte, over a plain socket in place of the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        asker = context.socket(kind)
        asker.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        asker.send(b"question")
        raw, _ = server.accept()
    with raw:
        raw.sendall(opening(ROUTER))
        decoder = Decoder(ROUTER, MAX_BYTES)
        while (message := decoder.take()) is None:
            decoder.feed(raw.recv(1000))
        assert message == b"question"
        assert decoder.is_enveloped is (kind == zmq.REQ)
        for answer in (b"answer", b"x" * 1000)[: 1 if kind == zmq.REQ else 2]:
            raw.sendall(header(len(answer), is_enveloped=decoder.is_enveloped) + answer)
            assert asker.poll(10_000)
            assert asker.recv_multipart() == [answer]
