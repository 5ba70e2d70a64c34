"""The side channel's bounds, at both ends: what is not finished in time, and answers that are not
whole."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.descriptions import description
from tests.kit.inquiry import Inquiry, wait_for
from tests.kit.ports import LOOPBACK, free_port
from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.networks import network_of
from vllm_commext.nixl.prefill import listener
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.wire import connection, zmtp
from vllm_commext.nixl.wire import messages as wire

BOUND_SECONDS = 20.0
FINISH_SECONDS = 0.3
REQUEST = wire.DescribeRequest(engine_id="p", tp_rank=0)
OPENING = zmtp.opening(zmtp.DEALER)
ASKED = zmtp.header(len(wire.encode(REQUEST))) + wire.encode(REQUEST)
MIB = 1 << 20


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SideChannelServer, int]]:
    """A server whose askers have little time, and its port."""
    monkeypatch.setattr(listener, "FINISH_SECONDS", FINISH_SECONDS)
    number = free_port()
    described = description("p", b"m" * 100_000)
    server = SideChannelServer("p", "start-1", LOOPBACK, number, {0: described})
    yield server, number
    server.close()


@pytest.fixture
def port(served: tuple[SideChannelServer, int]) -> int:
    return served[1]


def test_no_connection_waits_for_a_wider_table_of_descriptors(port: int) -> None:
    _, status = Path("/proc/self/status").read_text().split("FDSize:")
    assert int(status.split()[0]) >= 2 * listener._max_connections()


@pytest.mark.parametrize(
    "sent",
    [b"", OPENING[:5], OPENING, OPENING + ASKED[:-1], OPENING + ASKED + ASKED[:3]],
    ids=["nothing", "half a greeting", "a greeting", "half a message", "half of the second"],
)
def test_who_does_not_finish_in_time_is_closed_and_who_has_asked_is_kept(
    port: int, sent: bytes
) -> None:
    patient = Inquiry(LOOPBACK, port, REQUEST)
    wait_for(patient.poll)
    with socket.create_connection((LOOPBACK, port), BOUND_SECONDS) as slow:
        slow.sendall(sent)
        while slow.recv(1 << 16):
            pass
    time.sleep(FINISH_SECONDS)
    assert patient.is_connected()
    patient.close()


@pytest.mark.parametrize("is_good", [True, False])
def test_refused_messages_give_no_more_time(is_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taken = [0.0], list[bytes]()
    monkeypatch.setattr(listener, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def answer(connection: listener.Connection, message: bytes) -> None:
        connection.is_admitted = is_good
        taken.append(message)
        bound.send(connection, b"an answer")

    bound = listener.Listener(socket.create_server((LOOPBACK, 0)), 100, answer, lambda _: None)
    with socket.create_connection(bound._bound.getsockname()) as asker:
        asker.sendall(OPENING)
        for number in range(1, 4):
            asker.sendall(ASKED)
            while len(taken) < number:
                bound.turn(0.0)
            clock[0] += listener.FINISH_SECONDS / 2.5
        asker.sendall(ASKED[:1])
        bound.turn(0.0)
        assert len(bound) == is_good
    bound.close()


def test_connections_count_for_an_ipv4_address_or_an_ipv6_network() -> None:
    hosts = ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1:7", "fe80::7%lo")
    networks = ["192.0.2.7", "192.0.2.7", "2001:db8::/64", "fe80::/64"]
    assert [network_of(host) for host in hosts] == networks


def test_who_does_not_read_its_answers_is_closed(served: tuple[SideChannelServer, int]) -> None:
    server, port = served
    with socket.socket() as unread:
        unread.settimeout(BOUND_SECONDS)
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect((LOOPBACK, port))
        unread.sendall(OPENING + ASKED * 100)
        wait_for(lambda: len(server._listener))
        wait_for(lambda: not len(server._listener))
        num_bytes = 0
        while data := unread.recv(1 << 16):
            num_bytes += len(data)
        assert num_bytes < 100 * 100_000


class Teaser:
    """Answers of which the end does not come."""

    def __init__(self) -> None:
        self._bound = socket.create_server((LOOPBACK, 0))
        self.port: int = self._bound.getsockname()[1]
        self._made: list[socket.socket] = []

    def answer(self, inquiry: Inquiry, announced: int, sent: int) -> None:
        """Send so much to an asker, which takes it meanwhile."""
        made, _ = self._bound.accept()
        self._made.append(made)
        made.setblocking(False)
        left = memoryview(zmtp.opening(zmtp.ROUTER) + zmtp.header(announced) + bytes(sent))
        while left:
            assert inquiry.poll() is None
            try:
                left = left[made.send(left) :]
            except BlockingIOError:
                time.sleep(0.0005)
        for _ in range(100):  # the rest, which the kernel has
            assert inquiry.poll() is None
            time.sleep(0.0005)

    def close(self) -> None:
        for one in (self._bound, *self._made):
            one.close()


@pytest.fixture
def teaser() -> Iterator[Teaser]:
    made = Teaser()
    yield made
    made.close()


def test_an_answer_may_have_so_many_bytes_and_no_more(teaser: Teaser) -> None:
    inquiry = Inquiry(LOOPBACK, teaser.port, REQUEST)
    with pytest.raises(ProtocolError, match=f"at most {wire.MAX_REPLY_BYTES} bytes"):
        teaser.answer(inquiry, wire.MAX_REPLY_BYTES + 1, MIB)
    inquiry.close()


def test_all_unfinished_answers_together_are_bounded(port: int, teaser: Teaser) -> None:
    inquiries: list[Inquiry] = []
    num_whole, rest = divmod(connection.MAX_UNFINISHED_BYTES, 3 * MIB)
    assert wire.MAX_REPLY_BYTES > 3 * MIB > rest
    for _ in range(num_whole):
        inquiries.append(Inquiry(LOOPBACK, teaser.port, REQUEST))
        teaser.answer(inquiries[-1], wire.MAX_REPLY_BYTES, 3 * MIB)
    last = Inquiry(LOOPBACK, teaser.port, REQUEST)
    with pytest.raises(CommextError, match="bytes of unfinished answers"):
        teaser.answer(last, wire.MAX_REPLY_BYTES, 3 * MIB)
    assert [one.poll() for one in inquiries] == [None] * num_whole
    assert all(one.is_connected() for one in inquiries)
    for one in inquiries:
        one.close()
    honest = Inquiry(LOOPBACK, port, REQUEST)
    assert wait_for(honest.poll).incarnation == "start-1"
    honest.close()
