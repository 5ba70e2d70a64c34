"""Questions about streams: held by a side channel until something is known, asked by a thread."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.descriptions import description
from tests.kit.inquiry import Inquiry, wait_for
from tests.kit.ports import free_port
from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.decode.askers import StreamAsker
from vllm_commext.nixl.prefill import side_channel
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.stream.producer import StreamDirectory
from vllm_commext.nixl.wire import client as client_module
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.params import TransferParams
from vllm_commext.nixl.wire.prompt import DIGEST_DIGITS

HOST = "127.0.0.1"
BOUND_SECONDS = 20.0
SECRET = b"s" * 32


def key(number: int) -> str:
    return f"{number:032x}"


class Served:
    """A prefill engine's side channel."""

    def __init__(self, secret: bytes | None) -> None:
        self.directory, self.port = StreamDirectory(), free_port(HOST)
        self.secret = secret
        described = {0: description("p")}
        self.server = SideChannelServer(
            "p", "start-1", HOST, self.port, described, secret, streams=self.directory
        )

    def begin(self, number: int) -> None:
        stream = wire.FoundStream(
            request_id=f"p{number}",
            num_tokens=40,
            row=3,
            tag=77,
            fence_slot=5,
            fence_nonce=77,
            prompt={"tokens": "0" * DIGEST_DIGITS},
            regions=[0],
        )
        self.directory.open(key(number), stream)


@pytest.fixture(params=[None, SECRET], ids=["open", "with a secret"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(request.param)
    yield made
    made.server.close()


@pytest.fixture
def asker(served: Served) -> Iterator[StreamAsker]:
    client = ClientThread(served.secret)
    yield StreamAsker(client, BOUND_SECONDS, BOUND_SECONDS, lambda: None)
    client.close()


def ask(served: Served, question: wire.FindStreams) -> Inquiry:
    """A question that has been sent; whoever asks really looks for its answer all the time."""
    inquiry = Inquiry(HOST, served.port, question, served.secret)
    while inquiry.is_connected() and not inquiry.channel._socket._decoder.is_ready:
        pass
    inquiry._look()
    return inquiry


def answer_to(inquiry: Inquiry) -> Any:
    found = wait_for(inquiry.poll)
    inquiry.close()
    return found.found


def test_a_question_is_held_until_a_prompt_begins(served: Served) -> None:
    question = wire.FindStreams(keys=[key(1), key(2)], wait_seconds=wire.MAX_WAIT_SECONDS)
    inquiry = ask(served, question)
    wait_for(lambda: served.server._held)
    assert inquiry.poll() is None
    served.begin(3)
    served.begin(2)
    assert set(answer_to(inquiry)) == {key(2)}
    assert served.server._held == {}


@pytest.mark.parametrize("wait_seconds", [0.0, 0.05, -1.0, 1e9, float("nan")])
def test_a_question_is_answered_when_its_time_is_over(served: Served, wait_seconds: float) -> None:
    question = wire.FindStreams(keys=[key(1)], wait_seconds=wait_seconds)
    begun = time.monotonic()
    assert answer_to(ask(served, question)) == {}
    assert time.monotonic() - begun >= (wait_seconds if wait_seconds == 0.05 else 0.0)


def test_an_awaited_token_is_told_when_it_is_there(served: Served) -> None:
    served.begin(1)
    question = wire.FindStreams(keys=[], awaited=[key(1)], wait_seconds=wire.MAX_WAIT_SECONDS)
    inquiry = ask(served, question)
    wait_for(lambda: served.server._held)
    assert inquiry.poll() is None
    served.directory.tell(key(1), 7, "drawn")
    found = answer_to(inquiry)
    assert (found[key(1)].first_token, found[key(1)].sampling) == (7, "drawn")


def test_a_question_takes_the_place_of_the_one_before(served: Served) -> None:
    inquiry = ask(served, wire.FindStreams(keys=[key(1)], wait_seconds=1.0))
    wait_for(lambda: served.server._held)
    inquiry.ask(wire.FindStreams(keys=[key(2)], wait_seconds=1.0))
    wait_for(lambda: next(iter(served.server._held.values())).asked.keys == [key(2)])
    served.begin(2)
    assert set(answer_to(inquiry)) == {key(2)}


def test_too_many_keys_are_refused(served: Served) -> None:
    keys = [key(number) for number in range(wire.MAX_KEYS)]
    inquiry = ask(served, wire.FindStreams(keys=keys, awaited=[key(99)]))
    with pytest.raises(ProtocolError, match="at most"):
        wait_for(inquiry.poll)
    inquiry.close()


def test_more_questions_than_are_held_are_answered_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "MAX_HELD", 1)
    first = ask(served, wire.FindStreams(keys=[key(1)], wait_seconds=1.0))
    wait_for(lambda: served.server._held)
    found = answer_to(ask(served, wire.FindStreams(keys=[key(2)], wait_seconds=1.0)))
    assert found == {}
    assert first.poll() is None
    first.close()


def test_begins_and_tokens_reach_the_requests_that_wait_for_them(
    served: Served, asker: StreamAsker
) -> None:
    place = (HOST, served.port)
    for number in range(100):  # more than one question takes
        asker.watch(f"d{number}", key(number), place, awaits_token=number % 2 == 0)
    for number in range(100):
        served.begin(number)
    for number in range(100):
        assert isinstance(wait_for(lambda one=number: asker.answer(f"d{one}")), TransferParams)
    for number in range(100):
        served.directory.tell(key(number), number, "drawn")
    told: dict[str, tuple[int, str]] = {}
    for number in range(0, 100, 2):
        asker.wait_for_token(f"d{number}", BOUND_SECONDS)
        told |= asker.take_tokens()
    assert told == {f"d{number}": (number, "drawn") for number in range(0, 100, 2)}
    for number in range(100):
        asker.forget(f"d{number}")
    wait_for(lambda: not (asker._waiters or asker._answers or asker._awaited))
    assert not asker._tokens


def test_a_request_that_is_added_while_a_question_is_held_is_asked_for_at_once(
    served: Served, asker: StreamAsker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CHECK_SECONDS", BOUND_SECONDS)
    asker.watch("d1", key(1), (HOST, served.port))
    wait_for(lambda: served.server._held)
    served.begin(2)
    asker.watch("d2", key(2), (HOST, served.port))
    wait_for(lambda: asker.answer("d2"))
    assert asker.answer("d1") is None


def test_a_prompt_that_ends_without_a_token_is_awaited_no_more(
    served: Served, asker: StreamAsker
) -> None:
    served.begin(1)
    asker.watch("d1", key(1), (HOST, served.port), awaits_token=True)
    wait_for(lambda: asker.answer("d1"))
    served.directory.end(key(1))
    wait_for(lambda: not asker._waiters)
    asker.wait_for_token("d1", BOUND_SECONDS)
    assert asker.take_tokens() == {}


def test_a_side_channel_that_closes_fails_what_waits_and_leaves_what_has_its_answer(
    served: Served, asker: StreamAsker
) -> None:
    served.begin(1)
    asker.watch("d1", key(1), (HOST, served.port), awaits_token=True)
    asker.watch("d2", key(2), (HOST, served.port))
    wait_for(lambda: asker.answer("d1"))
    served.server.close()
    assert isinstance(wait_for(lambda: asker.answer("d2")), CommextError)
    assert isinstance(asker.answer("d1"), TransferParams)
    wait_for(lambda: not asker._waiters)
