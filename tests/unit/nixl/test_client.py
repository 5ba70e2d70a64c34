"""The asking end of side channels: deadlines, waits after failures, connections that end, and what
arrives when nobody waits for it."""

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError, UnsupportedError
from vllm_commext.nixl.wire import client as module
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import (
    CHECK_SECONDS,
    NO_BACK_OFF,
    BackOff,
    SideChannel,
    SideChannelClient,
)
from vllm_commext.nixl.wire.description import describe
from vllm_commext.nixl.wire.seal import FrameVerifier

ADDRESS = ("prefill-0", 5600)
SECRET = b"a secret of sixteen bytes and more"
BACK_OFF = BackOff(first_seconds=8.0, most_seconds=40.0)
QUESTION = wire.FindBlocks(hashes=b"h" * wire.HASH_BYTES)


def found(*block_ids: int) -> wire.FoundBlocks:
    return wire.FoundBlocks(
        engine_id="p",
        incarnation="start-1",
        host="prefill-0",
        port=5600,
        tp_size=1,
        block_ids=[*block_ids],
        generations=[7 for _ in block_ids],
    )


class Connection:
    """What stands in for a socket: a test puts in what arrives, and looks at what was sent."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[wire.AnyRequest] = []
        self.frames: deque[bytes] = deque()
        self.error = ""
        self.is_refused = False
        self.events = 1
        self.number = -1

    def send(self, frame: bytes) -> None:
        self.sent.append(wire.decode_request(frame))

    def receive(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        self.error = "closed"


class Asked:
    """A client under a clock of the test's, its connections, and what was said of its questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **channel: Any) -> None:
        self.now = 1000.0
        self.connections: list[Connection] = []
        self.told: list[Any] = []
        self.news: list[bool] = []
        self.closed: list[CommextError] = []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, "random", SimpleNamespace(random=lambda: 1.0))
        monkeypatch.setattr(module, "SideChannelSocket", self._connect)
        self.client = SideChannelClient(None)
        self.channel = SideChannel(
            self.client,
            ADDRESS,
            BACK_OFF,
            **{"on_draining": self.news.append, "on_closed": self.closed.append} | channel,
        )

    def _connect(self, host: str, port: int, max_bytes: int) -> Connection:
        assert (host, port, max_bytes) == (*ADDRESS, wire.MAX_REPLY_BYTES)
        self.connections.append(Connection())
        return self.connections[-1]

    def ask(
        self,
        seconds: float = 5.0,
        on_reply: Callable[[Any], None] | None = None,
        request: wire.AnyRequest = QUESTION,
        *,
        replaces: bool = False,
    ) -> None:
        said, how = on_reply or self.told.append, {"replaces": True} if replaces else {}
        self.channel.ask(request, seconds, said, self.told.append, **how)

    def poll(self, *arriving: wire.Frame, after: float = 0.0) -> None:
        """Look once, when this has arrived and so many seconds have passed."""
        self.now += after
        if arriving:
            self.connections[-1].frames += map(wire.encode, arriving)
        self.client.poll()

    def take(self) -> list[Any]:
        told, self.told[:] = [*self.told], []
        return told


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_questions_go_one_after_the_other_over_one_connection(asked: Asked) -> None:
    assert not asked.channel.is_open
    others = [wire.FindBlocks(hashes=bytes([n]) * wire.HASH_BYTES) for n in range(3)]
    for one in others:
        asked.ask(request=one)
    for number in range(3):
        asked.poll()
        (connection,) = asked.connections
        assert connection.sent == others[: number + 1]
        assert (asked.channel.is_asking, asked.client.asking) == (True, [asked.channel])
        asked.poll(found(number + 1))
        assert asked.take() == [found(number + 1)]
    assert (asked.channel.is_asking, asked.client.asking) == (False, [])
    assert asked.channel.is_open


def unfit(_: Any) -> None:
    raise UnsupportedError("does not fit")


def buggy(_: Any = None) -> None:
    raise ValueError("a bug")


# What arrives, why the connection has ended, what takes the answer, and the error.
BAD_ANSWERS: list[Any] = [
    (wire.Refused(reason="not here"), "", None, ProtocolError, "refused.*not here"),
    (describe(b"", "start-1"), "", None, ProtocolError, "expected FoundBlocks, got Described"),
    (QUESTION, "", None, ProtocolError, "not a frame of this protocol"),
    (None, "reset", None, CommextError, "closed .*reset"),
    (None, "refused", None, ProtocolError, "closed .*refused"),
    (found(), "", unfit, UnsupportedError, "^does not fit$"),
    (found(), "", buggy, ProtocolError, "prefill-0:5600: ValueError.*a bug"),
]


@pytest.mark.parametrize(("arriving", "closes", "on_reply", "kind", "words"), BAD_ANSWERS)
def test_what_is_no_good_answer_is_told_to_all_that_wait(
    asked: Asked, arriving: Any, closes: str, on_reply: Any, kind: type[CommextError], words: str
) -> None:
    asked.ask(on_reply=on_reply)
    asked.ask()
    asked.poll()
    asked.connections[0].error = closes
    asked.connections[0].is_refused = closes == "refused"
    asked.poll(*[arriving] if arriving else [])
    errors = asked.take()
    assert len(errors) == 2
    for error in errors:
        assert type(error) is kind
        with pytest.raises(kind, match=words):
            raise error
    assert (asked.channel.is_open, asked.channel.is_asking) == (False, False)
    assert asked.connections[0].error
    assert asked.closed == []


def test_an_answer_counts_until_its_question_is_given_up(asked: Asked) -> None:
    asked.ask(seconds=5.0)
    asked.poll()
    asked.poll(after=4.9)
    assert asked.take() == []
    asked.poll(found(1), after=5.0)  # nobody has looked since
    assert asked.take() == [found(1)]
    asked.ask(seconds=5.0)
    asked.poll()
    asked.poll(after=5.0)
    (error,) = asked.take()
    assert isinstance(error, CommextTimeoutError)
    assert "within 5 s" in str(error)
    assert "tcp://prefill-0:5600" in str(error)
    asked.poll(found(2), after=CHECK_SECONDS)
    assert asked.take() == []


def test_the_time_of_a_question_begins_when_it_is_asked(asked: Asked) -> None:
    asked.ask(seconds=10.0)
    asked.ask(seconds=6.0)
    asked.poll()
    asked.poll(found(1), after=6.0)
    assert asked.take() == [found(1)]
    asked.poll()
    (error,) = asked.take()
    assert isinstance(error, CommextTimeoutError)


def test_waits_after_failures_grow_and_an_answer_ends_them(asked: Asked) -> None:
    for number, wait in enumerate((8.0, 16.0, 32.0, 40.0, 40.0), 1):
        asked.ask(seconds=1.0)
        asked.poll()
        asked.poll(after=1.0)
        assert asked.channel.error in asked.take()
        assert asked.channel.num_failures == number
        assert asked.channel.retry_at == asked.now + wait
        asked.now += wait / 2
        with pytest.raises(CommextTimeoutError, match=f"is asked again in {wait / 2:.2g} s"):
            asked.ask()
        asked.now += wait / 2
    asked.ask()
    asked.poll()
    asked.poll(found())
    assert asked.channel.num_failures == 0
    asked.ask(seconds=1.0)
    asked.poll()
    asked.poll(after=1.0)
    assert asked.channel.retry_at == asked.now + 8.0


def test_without_a_back_off_it_is_asked_again_at_once(asked: Asked) -> None:
    asked.channel = SideChannel(asked.client, ADDRESS, NO_BACK_OFF)
    asked.ask(seconds=1.0)
    asked.poll()
    asked.poll(after=1.0)
    asked.take()
    asked.ask()
    asked.poll()
    assert len(asked.connections) == 2


def test_a_connection_that_ends_while_nothing_is_asked_costs_no_question(asked: Asked) -> None:
    asked.ask()
    asked.poll()
    asked.poll(found(), after=CHECK_SECONDS)
    asked.connections[0].error = "the other end has closed it"
    asked.poll()  # it is not looked at as often as where an answer is awaited
    assert asked.channel.is_open
    asked.poll(after=CHECK_SECONDS)
    (error,) = asked.closed
    assert "the other end has closed it" in str(error)
    assert (asked.channel.is_open, asked.channel.num_failures) == (False, 0)
    asked.take()
    for number in (1, 2):
        asked.ask()
        asked.poll()
        asked.poll(found(number))
        assert asked.take() == [found(number)]
        # The engine's process may end between two questions without anybody noticing.
        asked.connections[-1].error = "the other end has closed it"
    assert len(asked.connections) == 3
    assert len(asked.closed) == 1


@pytest.mark.parametrize(
    ("arriving", "is_open"),
    [
        (found(1), True),  # to a question that was replaced
        (wire.Draining(drains=True, version=9), False),
        (QUESTION, False),
    ],
)
def test_what_arrives_unasked_is_an_answer_or_news_or_ends_the_connection(
    asked: Asked, arriving: wire.Frame, is_open: bool
) -> None:
    asked.ask()
    asked.poll()
    asked.poll(found(2))
    asked.poll(arriving, after=CHECK_SECONDS)
    assert (asked.channel.is_open, asked.take(), asked.news) == (is_open, [found(2)], [])
    assert len(asked.closed) == (0 if is_open else 1)


@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("listens", [False, True])
def test_drains_are_told_whether_an_answer_is_awaited_or_not(
    monkeypatch: pytest.MonkeyPatch, is_awaited: bool, listens: bool
) -> None:
    asked = Asked(monkeypatch, **({} if listens else {"on_draining": None}))
    asked.ask()
    asked.poll()
    asked.poll(found(1))
    if is_awaited:
        asked.ask()
        asked.poll()
    for drains in (True, False):
        asked.poll(wire.Draining(drains=drains), after=CHECK_SECONDS)
    assert asked.news == ([True, False] if listens else [])
    assert asked.channel.is_asking == is_awaited
    asked.poll(*[found(2)] * is_awaited)
    assert asked.take() == [found(1), *[found(2)] * is_awaited]
    assert asked.connections[0].error == ""


def test_a_question_that_is_replaced_is_not_spoken_of_any_more(asked: Asked) -> None:
    asked.ask(seconds=1.0)
    asked.poll()
    asked.ask(seconds=9.0, replaces=True)
    asked.poll(found(1))  # before the second one was sent
    asked.poll(after=5.0)
    assert asked.take() == []
    asked.poll(found(2))
    assert asked.take() == [found(2)]
    assert [len(one.sent) for one in asked.connections] == [2]


def test_with_a_secret_an_answer_to_a_replaced_question_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch)
    asked.channel = SideChannel(SideChannelClient(SECRET), ADDRESS, BACK_OFF)
    asked.client = asked.channel._client
    verifier, nonces = FrameVerifier(SECRET), list[bytes]()

    def receive_question(self: Connection, frame: bytes) -> None:
        nonces.append(verifier.admit(frame, time.time())[1])

    monkeypatch.setattr(Connection, "send", receive_question)
    for replaces in (False, True):
        asked.ask(replaces=replaces)
        asked.poll()
    first, second = nonces
    for nonce, expected in ((first, []), (second, [found(2)])):
        answer = verifier.prove(wire.encode(found(2)), nonce, time.time())
        asked.connections[0].frames.append(answer)
        asked.poll()
        assert asked.take() == expected


def test_who_hangs_up_hears_nothing_and_may_ask_again(asked: Asked) -> None:
    asked.ask()
    asked.poll()
    asked.channel.close()
    asked.poll(after=CHECK_SECONDS)
    assert (asked.take(), asked.closed, asked.client.channels) == ([], [], {})
    assert asked.connections[0].error == "closed"
    asked.ask()
    asked.poll()
    asked.poll(found(1))
    assert asked.take() == [found(1)]
    asked.client.close()
    assert asked.connections[1].error == "closed"


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_waits_grow_up_to_the_cap_and_differ(failures: int, number: float, other: float) -> None:
    back_off = BackOff(0.1, 1.0)
    wait = back_off.seconds(failures, number)
    longest = min(1.0, 0.1 * 2 ** min(failures - 1, 10))
    assert longest / 2 <= wait <= longest
    assert (wait < back_off.seconds(failures, other)) <= (number < other)
    assert back_off.seconds(failures + 1, number) >= wait
