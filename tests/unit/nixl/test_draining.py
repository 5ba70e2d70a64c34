"""A prefill engine that drains says so on its side channel to whoever has asked, with its secret
where it has one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kit.descriptions import description
from tests.kit.inquiry import Inquiry, wait_for
from tests.kit.ports import free_port
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire import zmtp
from vllm_commext.nixl.wire.client import MAX_FRAMES
from vllm_commext.nixl.wire.description import describe

HOST = "127.0.0.1"
SECRET = b"a secret of sixteen bytes and more"
REQUEST = wire.DescribeRequest(engine_id="p", tp_rank=0)


@contextmanager
def serving(drains: threading.Event, secret: bytes | None = None) -> Iterator[int]:
    port = free_port()
    descriptions = {0: description("p")}
    server = SideChannelServer("p", "start-1", HOST, port, descriptions, secret, drains.is_set)
    try:
        yield port
    finally:
        server.close()


@contextmanager
def asking(port: int, secret: bytes | None = None) -> Iterator[Inquiry]:
    """An engine that has its answer and keeps the connection."""
    inquiry = Inquiry(HOST, port, REQUEST, secret)
    try:
        assert wait_for(inquiry.poll).incarnation == "start-1"
        yield inquiry
    finally:
        inquiry.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_whoever_has_asked_is_told_and_told_again_when_it_is_over(secret: bytes | None) -> None:
    drains = threading.Event()
    with serving(drains, secret) as port, asking(port, secret) as one, asking(port, secret) as two:
        assert one.take_news() is None
        for expected in (True, False):
            drains.set() if expected else drains.clear()
            for inquiry in (one, two):
                wait_for(lambda asked=inquiry: asked.is_connected() and asked._news)
                assert inquiry.take_news() is expected
                assert inquiry.take_news() is None, "once"
                assert inquiry.is_connected()


def test_who_asks_later_is_told_behind_the_answer() -> None:
    drains = threading.Event()
    drains.set()
    with serving(drains) as port, asking(port) as first:
        assert wait_for(first.take_news)
        with asking(port) as second:
            assert wait_for(second.take_news)


def test_a_flood_of_news_is_taken_piece_by_piece() -> None:
    with socket.create_server((HOST, 0)) as bound:
        inquiry = Inquiry(HOST, bound.getsockname()[1], REQUEST)
        flooder, _ = bound.accept()
        told = [describe(b"", "start-1"), *[wire.Draining(drains=True)] * 1000]
        frames = [wire.encode(one) for one in told]
        flooder.sendall(zmtp.opening(zmtp.ROUTER))
        flooder.sendall(b"".join(zmtp.header(len(frame)) + frame for frame in frames))
        assert wait_for(inquiry.poll).incarnation == "start-1"
        for _ in range(10):
            before = len(inquiry._news)
            inquiry._look()
            assert len(inquiry._news) - before <= MAX_FRAMES
        inquiry.close()
        flooder.close()
