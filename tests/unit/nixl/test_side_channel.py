"""The side channel over real sockets on loopback: right answers, and whatever else may arrive."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.chaos.census import take_census
from tests.kit.descriptions import description
from tests.kit.inquiry import ask as answer_of
from tests.kit.inquiry import wait_for
from tests.kit.ports import free_port
from vllm_commext.errors import ConfigError, ProtocolError
from vllm_commext.nixl.prefill.side_channel import SideChannelServer, resolve
from vllm_commext.nixl.wire import connection
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import endpoint
from vllm_commext.nixl.wire.description import encode_description, open_description

Served = tuple[SideChannelServer, int]
BOUND_SECONDS = 20.0
HOST = "127.0.0.1"
REQUEST = wire.DescribeRequest(engine_id="p", tp_rank=1)


def described(rank: int) -> bytes:
    return description("p", b"m" * 10_000, tp_size=2, tp_rank=rank)


def start(host: str = HOST, port: int = 0) -> Served:
    port = port or free_port(resolve(host, 1))
    descriptions = {rank: described(rank) for rank in (0, 1)}
    return SideChannelServer("p", "start-1", host, port, descriptions), port


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for many tests: what one of them sends must not harm the next."""
    server, port = start()
    yield server, port
    server.close()


@pytest.fixture
def dealer(context: Any, served: Served) -> Any:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.RCVTIMEO, int(BOUND_SECONDS * 1000))
    made.connect(endpoint(HOST, served[1]))
    return made


def ask(port: int, request: wire.DescribeRequest = REQUEST, host: str = HOST) -> wire.Described:
    return answer_of(host, port, request)


def test_the_rank_that_was_asked_for_is_described(served: Served) -> None:
    refused_before = served[0].num_refused
    for rank in (0, 1):
        request = wire.DescribeRequest(engine_id="p", tp_rank=rank)
        reply = ask(served[1], request)
        assert reply.incarnation == "start-1"
        assert encode_description(open_description(reply)) == described(rank)
    assert served[0].num_refused == refused_before


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (wire.DescribeRequest(engine_id="q", tp_rank=1), ["'p'", "'q'"]),
        (wire.DescribeRequest(engine_id="p", tp_rank=2), ["[0, 1]", "worker 2"]),
        (wire.DescribeRequest(engine_id="p", tp_rank=-1), ["[0, 1]", "worker -1"]),
        (wire.DescribeRequest(engine_id="p", tp_rank=1, version=9), ["protocol 4", "protocol 9"]),
        (wire.DescribeRequest(engine_id="p", tp_rank=1, magic="m"), ["commext-nixl"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    served: Served, request_: wire.DescribeRequest, words: list[str]
) -> None:
    refused_before = served[0].num_refused
    with pytest.raises(ProtocolError) as raised:
        ask(served[1], request_)
    for word in words:
        assert word in str(raised.value)
    assert served[0].num_refused == refused_before + 1
    assert ask(served[1])


def test_garbage_of_a_req_socket_is_refused_and_the_next_request_served(
    served: Served, dealer: Any
) -> None:
    refused_before = served[0].num_refused
    dealer.send_multipart([b"", b"hello"])
    envelope, answer = dealer.recv_multipart()
    assert envelope == b""
    assert isinstance(wire.decode_reply(answer), wire.Refused)
    assert served[0].num_refused == refused_before + 1
    assert ask(served[1])


@pytest.mark.parametrize(
    "frames",
    [
        [b"a", b"b", b"c"],
        [wire.encode(REQUEST), b""],
        [b"", b"", wire.encode(REQUEST)],
        [b"", wire.encode(REQUEST), b"more"],
        [b"0", wire.encode(REQUEST)],
        [b"x"] * 5000,
    ],
    ids=lambda frames: f"{len(frames)} frames, {frames[0]!r} first",
)
def test_a_message_of_several_frames_closes_its_connection_and_no_other(
    served: Served, dealer: Any, frames: list[bytes]
) -> None:
    refused_before = served[0].num_refused
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.send_multipart(frames)
    wait_for(lambda: served[0].num_refused > refused_before)
    assert dealer.poll(100) == 0
    assert ask(served[1])


@pytest.mark.parametrize("host", ["a b", "*", "a/b", "nul\0", "half\ud800"])
def test_an_impossible_host_is_refused_at_once(host: str) -> None:
    with pytest.raises(ProtocolError, match="not an address"):
        answer_of(host, 5600, REQUEST)


def test_no_more_sockets_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(connection.socket, "socket", none_left)
        with pytest.raises(ProtocolError, match="Too many open files"):
            answer_of(HOST, 5600, REQUEST)


def test_a_description_that_no_peer_would_take_is_not_served() -> None:
    decoded = msgspec.msgpack.decode(described(0))
    decoded["layout"]["num_blocks"] = 2
    with pytest.raises(ProtocolError, match="expected a row a block"):
        SideChannelServer("p", "start-1", HOST, free_port(), {0: msgspec.msgpack.encode(decoded)})


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="65536"):
        start(port=65536)


def test_a_host_without_address_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(ConfigError, match=r"'no\.such\.host' has no address"):
            SideChannelServer("p", "start-1", "no.such.host", 5600, {})


def test_both_sides_take_the_same_address_of_a_name(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As glibc answers where a name has addresses of both kinds. ZMQ, which connects by IPv4 unless
    # told otherwise, must find what was bound.
    port = free_port()
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, port)),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
        server = SideChannelServer("p", "start-1", "localhost", port, {1: described(1)})
    try:
        assert ask(port)
    finally:
        server.close()


def test_ipv6() -> None:
    try:
        server, port = start("::1")
    except (ConfigError, OSError) as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    try:
        assert endpoint("::1", port) == f"tcp://[::1]:{port}"
        assert ask(port, host="::1")
    finally:
        server.close()


def test_close_is_bounded_ends_the_thread_and_frees_the_port(context: Any) -> None:
    before = threading.active_count()
    server, port = start()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)  # the server may close before it has taken the request
    dealer.connect(endpoint(HOST, port))
    dealer.send(wire.encode(REQUEST))
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(BOUND_SECONDS)
    assert not closing.is_alive()
    assert threading.active_count() == before
    start(port=port)[0].close()


@pytest.mark.parametrize("host", ["0.0.0.0", HOST])
def test_a_start_that_fails_leaves_no_socket_open(served: Served, host: str) -> None:
    before = take_census([os.getpid()]).descriptors
    with pytest.raises(ConfigError) as raised:
        SideChannelServer("p", "start", host, served[1], {})
    assert take_census([os.getpid()]).descriptors == before, f"after {raised.value}"
    if host == HOST:
        assert f"{HOST}:{served[1]}" in str(raised.value)
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "::ffff:0.0.0.0"])
def test_an_address_that_nobody_can_connect_to_stops_the_start(host: str) -> None:
    with pytest.raises(ConfigError, match="stands for all addresses") as raised:
        SideChannelServer("p", "start", host, 5600, {})
    assert repr(host) in str(raised.value)
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in str(raised.value)
