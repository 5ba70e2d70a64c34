"""Asks side channels, all those of a process from one thread: questions with deadlines, one after
the other over a connection that stays open, and one way to wait after failures.
"""

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
from vllm_commext.nixl.wire.connection import SideChannelAddress, SideChannelSocket
from vllm_commext.nixl.wire.inquiry import Inquiry
from vllm_commext.nixl.wire.seal import OtherAnswerError

CHECK_SECONDS = 0.1
"""Between two looks whether connections over which nothing is asked have closed."""
LOOK_SECONDS = 0.01
"""Between two looks at a connection that is being made."""
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True)
class BackOff:
    """How long to wait after failed attempts: twice as long after each, up to a cap that is short
    enough for an engine that has come back to be found soon.

    Attributes:
        first_seconds: the longest wait after the first failure.
        most_seconds: the longest wait at all.
    """

    first_seconds: float = 0.5
    most_seconds: float = 10.0

    def seconds(self, num_failures: int, random: float) -> float:
        """The wait after so many failures in a row, at least 1; between half and all of the longest
        one, by a random number from 0 to 1, so that many workers do not ask at the same time."""
        doublings = min(num_failures - 1, 62)
        longest = min(self.most_seconds, self.first_seconds * 2.0**doublings)
        return longest * (1 + random) / 2


NO_BACK_OFF = BackOff(0.0, 0.0)


class _Question(NamedTuple):
    """until: when it fails without an answer, in seconds of ``time.monotonic``."""

    request: wire.AnyRequest
    until: float
    on_reply: Callable[[wire.AnyReply], None]
    on_error: Callable[[CommextError], None]


class SideChannel:
    """One engine's side channel. It is connected to with the first question, and anew with the
    first one after the connection has closed.  Owned by its client's thread.

    Attributes:
        error: why the last attempt failed.
        num_failures: attempts that have failed since the last one that has not.
        retry_at: when it may be asked again, in seconds of ``time.monotonic``.

    Args:
        client: asks.
        address: of the side channel.
        back_off: how long it is not asked again after failures.
        on_draining: called when the engine has said whether it drains.
        on_closed: called when the connection has closed while nothing was asked.
    """

    def __init__(
        self,
        client: SideChannelClient,
        address: SideChannelAddress,
        back_off: BackOff,
        on_draining: Callable[[bool], None] | None = None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.error = CommextError()
        self.num_failures = 0
        self.retry_at = 0.0
        self._client = client
        self._back_off = back_off
        self._on_draining = on_draining
        self._on_closed = on_closed
        self._inquiry: Inquiry | None = None
        # The first one is under way where it has been sent.
        self._questions: deque[_Question] = deque()
        self._is_sent = False

    def ask(
        self,
        request: wire.AnyRequest,
        seconds: float,
        on_reply: Callable[[wire.AnyReply], None],
        on_error: Callable[[CommextError], None],
        *,
        replaces: bool = False,
    ) -> None:
        """Ask; a later ``poll`` of the client calls one of the two functions.

        Args:
            request: the question.
            seconds: how long it may take to be answered.
            on_reply: given the answer; what it raises is the error.
            on_error: given why there is no good answer.
            replaces: it takes the place of the question before, of which nothing is said any more.

        Raises:
            CommextError: an attempt has failed a moment ago.
        """
        now = time.monotonic()
        if now < self.retry_at:
            raise type(self.error)(
                f"{self.error}; it is asked again in {self.retry_at - now:.1g} s"
            ) from self.error
        if replaces:
            self._questions.clear()
            self._is_sent = False
        self._questions.append(_Question(request, now + seconds, on_reply, on_error))
        self._client.add(self)

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._questions)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._inquiry is not None

    @property
    def socket(self) -> SideChannelSocket | None:
        """What a poller waits for while an answer is awaited; None where there is no socket yet."""
        inquiry = self._inquiry if self._is_sent else None
        return inquiry.socket if inquiry is not None and inquiry.socket.fileno() >= 0 else None

    def seconds_to_poll(self, now: float) -> float:
        """Until it is to be polled while an answer is awaited, even if nothing arrives."""
        if not self._is_sent:
            return 0.0
        look = CHECK_SECONDS if self.socket is not None else LOOK_SECONDS
        return min(self._questions[0].until - now, look)

    def poll(self, now: float) -> None:
        """Go on with the questions, or look whether the connection is still there."""
        try:
            while self._questions and self._go_on(now):
                pass
            if not self._questions and self._inquiry is not None:
                self._look(self._inquiry)
        except Exception as error:  # noqa: BLE001 whatever it is, it concerns this engine alone
            self._fail(_as_error(error, self.address))

    def close(self) -> None:
        """Hang up; nothing is said of what was asked.  It can be asked again."""
        self._questions.clear()
        self._hang_up()
        self._client.remove(self)

    def _hang_up(self) -> None:
        inquiry, self._inquiry, self._is_sent = self._inquiry, None, False
        if inquiry is not None:
            inquiry.close()

    def _fail(self, error: CommextError) -> None:
        """Hang up, and say why; where something was asked, nothing is for a while."""
        questions = [*self._questions]
        self.close()
        if not questions:
            self._on_closed()
            return
        self.num_failures += 1
        wait = self._back_off.seconds(self.num_failures, random.random())
        self.error, self.retry_at = error, time.monotonic() + wait
        for question in questions:
            question.on_error(error)

    def _go_on(self, now: float) -> bool:
        """Send the first question, or take what has come; False where nothing has."""
        question = self._questions[0]
        inquiry = self._send(question.request)
        try:
            reply = inquiry.poll()
        except OtherAnswerError:
            return True  # to a question that this one has replaced
        if reply is None:
            if now < question.until:
                return False
            raise CommextTimeoutError(
                f"no answer from the prefill engine's side channel {inquiry.address} in time: is "
                "it up, and can this host reach it? Its VLLM_NIXL_SIDE_CHANNEL_HOST must be an "
                "address that decode engines reach"
            )
        self._questions.popleft()
        self._is_sent = False
        try:
            question.on_reply(reply)
        except Exception:
            self._questions.appendleft(question)
            raise
        self.num_failures = 0
        return True

    def _send(self, request: wire.AnyRequest) -> Inquiry:
        """Send a question if it was not."""
        if not self._is_sent and self._inquiry is not None and not self._inquiry.is_connected():
            self._hang_up()
        if self._inquiry is None:
            self._inquiry = Inquiry(*self.address, request, self._client.secret)
        elif not self._is_sent:
            self._inquiry.ask(request)
        self._is_sent = True
        return self._inquiry

    def _look(self, inquiry: Inquiry) -> None:
        """Hear whether the engine drains, and whether the connection has closed."""
        if self._on_draining is not None and (news := inquiry.take_news()) is not None:
            self._on_draining(news.drains)
        if not inquiry.is_connected():
            raise ProtocolError(inquiry.socket.error)


class SideChannelClient:
    """All that one thread asks side channels.  Owned by that thread, which polls it often.

    Args:
        secret: the side channels' secret, None where there is none.
    """

    def __init__(self, secret: bytes | None) -> None:
        self.secret = secret
        self._channels: dict[SideChannel, None] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._next_check = 0.0
        self._log = RateLimitedLog()

    def add(self, channel: SideChannel) -> None:
        """Poll a channel from now on."""
        self._channels[channel] = None

    def remove(self, channel: SideChannel) -> None:
        """Poll it no more."""
        self._channels.pop(channel, None)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done by a later `poll`."""
        when = time.monotonic() + seconds
        heapq.heappush(self._timers, (when, next(self._numbers), action))

    @property
    def asking(self) -> list[SideChannel]:
        """Those whose answers are awaited."""
        return [channel for channel in self._channels if channel.is_asking]

    def poll(self) -> None:
        """Do what is due, and take what has come."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guard(heapq.heappop(self._timers)[2])
        channels = self.asking
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            channels = [*self._channels]
        for channel in channels:
            self._guard(partial(channel.poll, now))

    def close(self) -> None:
        """Hang up everywhere."""
        self._timers.clear()
        for channel in [*self._channels]:
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
        """The same after what was called."""
        while self._calls:
            self._guard(self._calls.popleft())
        super().poll()

    def close(self) -> None:
        """End the thread, bounded; may be called again."""
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
        """Until something arrives or is called, or it is time to look."""
        now, asking = time.monotonic(), self.asking
        waits = [channel.seconds_to_poll(now) for channel in asking]
        waits += [self._timers[0][0] - now] if self._timers else []
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        for channel in asking:
            if (socket := channel.socket) is not None:
                poller.register(socket, socket.events)
        poller.poll(max(0, math.ceil(1000 * min(waits))) if waits else None)
        self._wakeup.clear()


def _as_error(error: Exception, address: SideChannelAddress) -> CommextError:
    if isinstance(error, CommextError):
        return error
    return ProtocolError(f"asking the side channel {address} failed: {error!r}")
