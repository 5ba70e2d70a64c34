"""Asking side channels which blocks they have: right answers, and what comes of no answer."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from tests.kit.descriptions import description
from tests.kit.inquiry import ask, wait_for
from tests.kit.ports import free_port
from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.decode.askers import BlockFinder
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.reuse import OfferTable
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.connection import endpoint
from vllm_commext.nixl.wire.params import places_for_reuse, write_place

BOUND_SECONDS = 60.0
HOST = "127.0.0.1"
SECRET, OTHER = b"s" * 32, b"o" * 32
NAMES = [bytes([number]) * 32 for number in range(10)]


def start(port: int, *, offers: bool = True, secret: bytes | None = None) -> tuple[Any, Any]:
    table = OfferTable([np.zeros(16, dtype=np.uint64)]) if offers else None
    described = {0: description("o")}
    server = SideChannelServer("o", "start-1", HOST, port, described, secret, blocks=table)
    return server, table


class Finder:
    """A finder whose notifications are counted."""

    def __init__(self, limit_seconds: float, secret: bytes | None = None) -> None:
        self.num_rings = 0
        self.client = ClientThread(secret)
        self.asks = BlockFinder(self.client, limit_seconds, self._ring)

    def _ring(self) -> None:
        self.num_rings += 1

    def find(self, name: str, hashes: list[bytes], *ports: int) -> wire.FoundBlocks | None:
        self.asks.search(name, hashes, [(HOST, port) for port in ports])
        return self.answer(name)

    def answer(self, name: str) -> wire.FoundBlocks | None:
        wait_for(lambda: self.asks.is_done(name))
        return self.asks.take(name)


@pytest.fixture
def make() -> Iterator[Callable[..., Finder]]:
    made: list[Finder] = []

    def finder(limit_seconds: float = BOUND_SECONDS, secret: bytes | None = None) -> Finder:
        made.append(Finder(limit_seconds, secret))
        return made[-1]

    yield finder
    for one in made:
        one.client.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[int, Any]]]:
    made: list[Any] = []

    def served(port: int = 0, **settings: Any) -> tuple[int, Any]:
        port = port or free_port(HOST)
        server, table = start(port, **settings)
        made.append(server)
        return port, table

    yield served
    for server in made:
        server.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_run_that_is_on_offer_is_found(make: Any, serve: Any, secret: bytes | None) -> None:
    port, table = serve(secret=secret)
    table.offer(NAMES[:3], [5, 2, 7])
    finder = make(secret=secret)
    found = finder.find("r", NAMES, port)
    assert (found.block_ids, found.generations) == ([5, 2, 7], table.find(NAMES).generations)
    assert (found.engine_id, found.host, found.port, found.tp_size) == ("o", HOST, port, 1)
    table.drop(2)
    assert finder.find("again", NAMES, port).block_ids == [5]
    assert finder.find("others", NAMES[3:], port) is None
    assert finder.num_rings == 3


def test_a_long_prompt_is_one_question(make: Any, serve: Any) -> None:
    port, table = serve()
    hashes = [number.to_bytes(32, "big") for number in range(wire.MAX_HASHES)]
    table.offer(hashes[:15], range(1, 16))
    assert len(make().find("r", [*hashes, *hashes], port).block_ids) == 15


@pytest.mark.parametrize(
    ("server", "own"),
    [
        ({"offers": False}, None),
        ({"secret": SECRET}, None),
        ({"secret": SECRET}, OTHER),
        ({}, SECRET),
    ],
    ids=["offers nothing", "secret there", "another secret", "secret here"],
)
def test_who_refuses_has_nothing_and_rings(
    make: Any, serve: Any, server: Any, own: bytes | None
) -> None:
    port, _ = serve(**server)
    finder = make(secret=own)
    assert finder.find("r", NAMES, port) is None
    assert finder.num_rings == 1


@pytest.fixture
def other(context: Any) -> tuple[Any, int]:
    """An engine that says what a test says, and its port."""
    socket, port = context.socket(zmq.ROUTER), free_port(HOST)
    socket.bind(endpoint(HOST, port))
    return socket, port


def test_who_does_not_answer_costs_the_limit_once(make: Any, other: tuple[Any, int]) -> None:
    silent, port = other
    finder = make(0.3)
    assert finder.find("r", NAMES, port) is None
    # The next one is asked nothing: it would have to wait, too.
    assert finder.find("next", NAMES, port) is None
    silent.recv_multipart()
    assert silent.poll(0) == 0


def test_who_is_not_there_is_no_reason_to_wait(make: Any, serve: Any) -> None:
    port, table = serve()
    table.offer(NAMES[:3], [5, 2, 7])
    assert len(make().find("r", NAMES, free_port(HOST), port).block_ids) == 3


def test_side_channels_of_the_past_are_forgotten(
    make: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines come and go, each at an address of its own: what is kept of them is bounded."""
    monkeypatch.setattr("vllm_commext.nixl.decode.askers.MAX_CHANNELS", 4)
    finder = make()
    used = [serve() for _ in range(6)]
    for number, (port, table) in enumerate(used):
        table.offer(NAMES[:2], [5, 2])
        assert len(finder.find(f"r{number}", NAMES, port).block_ids) == 2
        assert len(finder.asks._channels) <= 4
    assert list(finder.asks._channels) == [(HOST, port) for port, _ in used[2:]]
    assert len(finder.find("again", NAMES, used[2][0], used[0][0]).block_ids) == 2
    last = [(HOST, used[n][0]) for n in (2, 0)]
    assert list(finder.asks._channels)[-2:] == last


FOUND = wire.FoundBlocks(
    engine_id="o",
    incarnation="1",
    host=HOST,
    port=1,
    tp_size=1,
    block_ids=[1, 2],
    generations=[3, 4],
)
OF_STREAMS = wire.FoundStreams(
    engine_id="o", incarnation="1", host=HOST, port=1, tp_size=1, pp_size=1, found={}
)


@pytest.mark.parametrize(
    "answer",
    [
        FOUND,
        OF_STREAMS,
        replace(FOUND, block_ids=[1, 2, 3]),
        replace(FOUND, block_ids=[1, 2, 3], generations=[3, 4, 5]),
        replace(FOUND, generations=[1]),
        replace(FOUND, block_ids=[0, 1]),
        replace(FOUND, block_ids=[1, -1]),
        replace(FOUND, block_ids=[1, 1 << 31]),
        replace(FOUND, generations=[1, -1]),
        replace(FOUND, port=65536),
        replace(FOUND, tp_size=1025),
    ],
)
def test_an_answer_that_no_engine_gives_counts_for_nothing(
    make: Any, other: tuple[Any, int], answer: Any
) -> None:
    socket, port = other
    finder = make()
    finder.asks.search("r", NAMES[:2], [(HOST, port)])
    assert socket.poll(int(BOUND_SECONDS * 1000))
    *envelope, _ = socket.recv_multipart()
    socket.send_multipart([*envelope, wire.encode(answer)])
    assert finder.answer("r") == (FOUND if answer is FOUND else None)


@pytest.mark.parametrize("length", [31, 33, 32 * wire.MAX_HASHES + 32])
def test_what_is_no_list_of_hashes_is_refused(serve: Any, length: int) -> None:
    port, _ = serve()
    with pytest.raises(ProtocolError, match="expected at most .* hashes"):
        ask(HOST, port, wire.FindBlocks(hashes=bytes(length)))


def test_places_are_read_as_they_were_written_and_proven() -> None:
    params = {"reuse_from": [write_place("d0", 5600, SECRET), write_place("d1", 5601, SECRET)]}
    assert places_for_reuse(params, SECRET) == [("d0", 5600), ("d1", 5601)]
    assert places_for_reuse({"reuse_from": [write_place("d0", 1)] * 2}) == [("d0", 1)]
    assert places_for_reuse({}) == places_for_reuse(None) == []
    for wrong in ({"host": "d1"}, {"port": 5601}, {"seal": ""}, {"seal": "0" * 64}):
        place = {**write_place("d0", 5600, SECRET), **wrong}
        with pytest.raises(ProtocolError):
            places_for_reuse({"reuse_from": [place]}, SECRET)
    with pytest.raises(ProtocolError):
        places_for_reuse(params, OTHER)
