"""Asks side channels, all those of a process from one thread."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.wakeup import Wakeup
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import SideChannelAddress, SideChannelSocket, endpoint
from vllm_commext.nixl.wire.seal import FrameSigner, OtherAnswerError

CHECK_SECONDS = 0.1  # between two looks whether connections over which nothing is asked have closed
LOOK_SECONDS = 0.01  # between two looks at a connection that is being made
MAX_FRAMES = 4  # taken of one engine at a time, so that none that floods holds up the others
_CLOSE_SECONDS = 1.0
_ANSWERS = {
    wire.DescribeRequest: wire.Described,
    wire.FindStreams: wire.FoundStreams,
    wire.FindBlocks: wire.FoundBlocks,
}


@dataclass(frozen=True)
class BackOff:
    """How long to wait after failed attempts: twice as long after each, up to a cap that is short
    enough for an engine that has come back to be found soon."""

    first_seconds: float = 0.5
    most_seconds: float = 10.0

    def seconds(self, num_failures: int, random: float) -> float:
        """The wait after this many failures in a row, at least 1.

        ``random``, from 0 to 1, takes half to all of it, so that many workers do not ask at once.
        """
        doublings = min(num_failures - 1, 62)
        longest = min(self.most_seconds, self.first_seconds * 2.0**doublings)
        return longest * (1 + random) / 2


NO_BACK_OFF = BackOff(0.0, 0.0)


class _Question(NamedTuple):
    """until: when it fails without an answer, in seconds of ``time.monotonic``."""

    request: wire.AnyRequest
    seconds: float
    until: float
    on_reply: Callable[[Any], None]
    on_error: Callable[[CommextError], None]


class SideChannel:
    """One engine's side channel, connected to with the first question, and again with the first one
    after the connection has closed.  Owned by its client's thread.

    Attributes:
        retry_at: when it may be asked again, in seconds of ``time.monotonic``.

    Args:
        on_closed: takes the error when the connection has ended while nothing was asked.
    """

    def __init__(
        self,
        client: SideChannelClient,
        address: SideChannelAddress,
        back_off: BackOff,
        on_draining: Callable[[bool], None] | None = None,
        on_closed: Callable[[CommextError], None] = lambda _: None,
    ) -> None:
        self.address = address
        self.error = CommextError()
        self.num_failures = 0
        self.retry_at = 0.0
        self._name = f"the prefill engine's side channel {endpoint(*address)}"
        self._client = client
        self._back_off = back_off
        self._on_draining = on_draining
        self._on_closed = on_closed
        self._socket: SideChannelSocket | None = None
        self._signer = FrameSigner(client.secret)
        # The first one is under way where it has been sent.
        self._questions: deque[_Question] = deque()
        self._is_sent = False

    def ask(
        self,
        request: wire.AnyRequest,
        seconds: float,
        on_reply: Callable[[Any], None],
        on_error: Callable[[CommextError], None],
        *,
        replaces: bool = False,
    ) -> None:
        """Ask; a later ``poll`` of the client calls one of the two functions.

        Args:
            on_reply: takes the answer; an exception of it is the error.
            on_error: takes the error where there is no good answer.
            replaces: drops the questions before, and their answers.

        Raises:
            CommextError: an attempt has failed a moment ago.
        """
        now = time.monotonic()
        if now < self.retry_at:
            raise type(self.error)(
                f"{self.error}; it is asked again in {self.retry_at - now:.2g} s"
            ) from self.error
        if replaces:
            self._questions.clear()
            self._is_sent = False
        self._questions.append(_Question(request, seconds, now + seconds, on_reply, on_error))
        self._client.channels[self] = None

    @property
    def is_asking(self) -> bool:
        return bool(self._questions)

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        self._questions.clear()
        self._hang_up()
        self._client.channels.pop(self, None)

    def poll(self, now: float) -> None:
        try:
            for _ in range(MAX_FRAMES):
                if self._socket is None or (frame := self._socket.receive()) is None:
                    break
                self._take(frame)
            self._check(now)
            if self._questions and not self._is_sent:
                self._send(self._questions[0].request)
        except Exception as error:  # noqa: BLE001 whatever it is, it concerns this engine alone
            self._fail(_as_error(error, self._name))

    def wait_by(self, poller: select.poll, now: float) -> float:
        if not self._is_sent or self._socket is None:
            return 0.0
        if self._socket.fileno() < 0:
            return LOOK_SECONDS
        poller.register(self._socket, self._socket.events)
        return min(self._questions[0].until - now, CHECK_SECONDS)

    def _send(self, request: wire.AnyRequest) -> None:
        if self._socket is None:
            self._socket = SideChannelSocket(*self.address, wire.MAX_REPLY_BYTES)
        self._socket.send(self._signer.prove(wire.encode(request)))
        self._is_sent = True

    def _take(self, frame: bytes) -> None:
        try:
            frame = self._signer.check(frame)
        except OtherAnswerError:
            return  # to a replaced question, or of a drain, of which the answer to come tells again
        reply = wire.decode_reply(frame)
        if isinstance(reply, wire.Draining):
            if self._on_draining is not None:
                self._on_draining(reply.drains)
            return
        if not self._is_sent:
            return  # the same without a secret
        _check_kind(reply, self._questions[0].request)
        question = self._questions.popleft()
        self._is_sent = False
        try:
            question.on_reply(reply)
        except Exception:
            self._questions.appendleft(question)
            raise
        self.num_failures = 0

    def _check(self, now: float) -> None:
        if self._socket is None:
            return
        if self._socket.error and self._questions and not self._is_sent:
            self._hang_up()
        elif self._socket.error:
            kind = ProtocolError if self._socket.is_refused else CommextError
            raise kind(
                f"connection refused by {self._name}, or closed "
                f"({self._socket.error}): is the engine up, and does this host reach the address, "
                "which VLLM_NIXL_SIDE_CHANNEL_HOST names on the prefill host?"
            )
        elif self._is_sent and now >= self._questions[0].until:
            raise CommextTimeoutError(
                f"no answer from {self._name} within {self._questions[0].seconds:g} s: is it up, "
                "and can this host reach it? VLLM_NIXL_SIDE_CHANNEL_HOST there must be an address "
                "that decode engines reach"
            )

    def _hang_up(self) -> None:
        socket, self._socket, self._is_sent = self._socket, None, False
        if socket is not None:
            socket.close()

    def _fail(self, error: CommextError) -> None:
        questions = [*self._questions]
        self.close()
        if not questions:
            self._on_closed(error)
            return
        self.num_failures += 1
        wait = self._back_off.seconds(self.num_failures, random.random())
        self.error, self.retry_at = error, time.monotonic() + wait
        for question in questions:
            question.on_error(error)


class SideChannelClient:
    """All that one thread asks side channels.  Owned by that thread, which polls it often."""

    def __init__(self, secret: bytes | None) -> None:
        self.secret = secret
        self.channels: dict[SideChannel, None] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._next_check = 0.0
        self._log = RateLimitedLog()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        when = time.monotonic() + seconds
        heapq.heappush(self._timers, (when, next(self._numbers), action))

    @property
    def asking(self) -> list[SideChannel]:
        return [channel for channel in self.channels if channel.is_asking]

    def poll(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guard(heapq.heappop(self._timers)[2])
        channels = self.asking
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            channels = [*self.channels]
        for channel in channels:
            self._guard(partial(channel.poll, now))

    def close(self) -> None:
        self._timers.clear()
        for channel in [*self.channels]:
            channel.close()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 one engine's error is no other's
            self._log.exception("side channel", "a step of the side channels' client failed")


class ClientThread(SideChannelClient):
    """A client with a thread of its own, which begins with the first `call`.  All but `call` and
    `close` is for that thread."""

    def __init__(self, secret: bytes | None) -> None:
        super().__init__(secret)
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def call(self, action: Callable[..., None], *args: Any) -> None:
        """Have the thread do something, in the order of the calls; from any one other thread."""
        if self._is_closed:
            return
        self._calls.append(partial(action, *args))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="commext-side-channels", daemon=True
            )
            self._thread.start()
        self._wakeup.notify()

    def poll(self) -> None:
        while self._calls:
            self._guard(self._calls.popleft())
        super().poll()

    def close(self) -> None:
        self._is_closed = True
        self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        else:
            self._wakeup.close()

    def _run(self) -> None:
        while not self._is_closed:
            self.poll()
            self._sleep()
        super().close()
        self._wakeup.close()

    def _sleep(self) -> None:
        now, poller = time.monotonic(), select.poll()
        poller.register(self._wakeup, select.POLLIN)
        waits = [channel.wait_by(poller, now) for channel in self.asking]
        waits += [self._timers[0][0] - now] if self._timers else []
        poller.poll(max(0, math.ceil(1000 * min(waits))) if waits else None)
        self._wakeup.clear()


def _check_kind(reply: wire.AnyReply | wire.Refused, request: wire.AnyRequest) -> None:
    if isinstance(reply, wire.Refused):
        raise ProtocolError(f"the prefill engine refused the handshake: {reply.reason[:1000]}")
    expected = _ANSWERS[type(request)]
    if type(reply) is not expected:
        raise ProtocolError(f"expected {expected.__name__}, got {type(reply).__name__}")


def _as_error(error: Exception, name: str) -> CommextError:
    return error if isinstance(error, CommextError) else ProtocolError(f"{name}: {error!r}")
