"""Asks other engines, from the scheduler's process, which blocks of a prompt they have on offer.

One thread asks each side channel one question after the other, over a connection that stays open.
A question that is not answered in time, or not well, costs its request nothing but that time: what
nobody has is computed.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import SideChannelAddress
from vllm_commext.nixl.wire.inquiry import Inquiry

BACK_OFF_SECONDS = 5.0
"""A side channel that did not answer is not asked again for as long."""
MAX_CHANNELS = 128
"""Side channels that are known at a time; the one that was asked least recently makes room."""
_LOOK_SECONDS = 0.001
_CLOSE_SECONDS = 1.0
_QUESTION_BYTES = 16


@dataclass(eq=False)
class _Search:
    """One request's questions. until: in seconds of ``time.monotonic``; num_open: places that have
    not answered; best: the longest answer."""

    request_id: str
    hashes: Sequence[bytes]
    until: float
    num_open: int
    best: wire.FoundBlocks | None = None


@dataclass(eq=False)
class _Channel:
    """One side channel, with the searches that wait for it, the first of which is being asked."""

    place: SideChannelAddress
    searches: deque[_Search] = field(default_factory=deque[_Search])
    inquiry: Inquiry | None = None
    question: bytes = b""
    not_before: float = 0.0


class BlockFinder:
    """Requests whose blocks are being looked for.

    Args:
        consumer: this engine's id.
        secret: the side channels' secret, None where there is none.
        limit_seconds: how long one request waits.
        notify: called when an answer can be taken.
    """

    def __init__(
        self, consumer: str, secret: bytes | None, limit_seconds: float, notify: Callable[[], None]
    ) -> None:
        self._consumer = consumer
        self._secret = secret
        self._limit_seconds = limit_seconds
        self._notify = notify
        # The one that was asked last comes last; those whose connections are to be closed.
        self._channels: dict[SideChannelAddress, _Channel] = {}
        self._unused: list[_Channel] = []
        self._searches: dict[str, _Search] = {}
        self._wakes = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._log = RateLimitedLog()

    def search(
        self, request_id: str, hashes: Sequence[bytes], places: Sequence[SideChannelAddress]
    ) -> None:
        """Look for the blocks with these hashes at these side channels."""
        until = time.monotonic() + self._limit_seconds
        one = _Search(request_id, hashes[: wire.MAX_HASHES], until, len(places))
        with self._wakes:
            self._searches[request_id] = one
            for place in places:
                channel = self._channels.pop(place, None) or _Channel(place)
                channel.searches.append(one)
                self._channels[place] = channel
            self._make_room()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="commext-reuse", daemon=True)
                self._thread.start()
            self._wakes.notify()

    def _make_room(self) -> None:
        """Forget the side channels that nobody has asked for the longest."""
        num_over = max(0, len(self._channels) - MAX_CHANNELS)
        idle = [one for one in self._channels.values() if not one.searches][:num_over]
        for channel in idle:
            self._unused.append(self._channels.pop(channel.place))

    def is_done(self, request_id: str) -> bool:
        """Whether all have answered, or no time is left."""
        with self._wakes:
            one = self._searches.get(request_id)
        return one is None or one.num_open <= 0 or time.monotonic() >= one.until

    def take(self, request_id: str) -> wire.FoundBlocks | None:
        """The longest run of blocks that was found, None for none; ends the search."""
        with self._wakes:
            one = self._searches.pop(request_id, None)
        return one.best if one is not None else None

    def close(self) -> None:
        """End the thread, bounded; may be called again."""
        with self._wakes:
            self._is_closed = True
            self._wakes.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_closed or self._has_work())
                if self._is_closed:
                    break
                channels = [one for one in self._channels.values() if one.searches]
                unused, self._unused = self._unused, []
            for channel in unused:
                _hang_up(channel)
            for channel in channels:
                try:
                    self._look(channel)
                except Exception as error:  # noqa: BLE001 one engine's error is no other's
                    self._fail(channel, error)
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_closed, _LOOK_SECONDS)
        for channel in (*self._channels.values(), *self._unused):
            _hang_up(channel)

    def _has_work(self) -> bool:
        return any(one.searches for one in self._channels.values())

    def _look(self, channel: _Channel) -> None:
        """One step of a channel: ask, or take the answer."""
        search, now = channel.searches[0], time.monotonic()
        if now < channel.not_before or (now >= search.until and not channel.question):
            self._end(channel, None)
        elif not channel.question:
            self._ask(channel, search)
        elif (found := self._answer(channel)) is not None:
            self._end(channel, found)
        elif now >= search.until:
            raise CommextTimeoutError(f"no answer within {self._limit_seconds:g} s")

    def _ask(self, channel: _Channel, search: _Search) -> None:
        channel.question = secrets.token_bytes(_QUESTION_BYTES)
        question = wire.FindBlocks(
            question=channel.question, hashes=b"".join(search.hashes), consumer=self._consumer
        )
        if channel.inquiry is not None and not channel.inquiry.is_connected():
            channel.inquiry.close()
            channel.inquiry = None
        if channel.inquiry is None:
            channel.inquiry = Inquiry(*channel.place, question, self._secret)
        else:
            channel.inquiry.ask(question)

    def _answer(self, channel: _Channel) -> wire.FoundBlocks | None:
        assert channel.inquiry is not None  # there is a question
        reply = channel.inquiry.poll()
        if reply is None:
            return None
        if not isinstance(reply, wire.FoundBlocks) or reply.question != channel.question:
            raise ProtocolError("expected an answer about these blocks, got another one")
        return checked(reply, len(channel.searches[0].hashes))

    def _end(self, channel: _Channel, found: wire.FoundBlocks | None) -> None:
        """The first search has its answer from this channel."""
        channel.question = b""
        with self._wakes:
            search = channel.searches.popleft()
            search.num_open -= 1
            longest = len(search.best.block_ids) if search.best is not None else 0
            if found is not None and len(found.block_ids) > longest:
                search.best = found
            is_done = search.num_open <= 0 and search.request_id in self._searches
        if is_done:
            self._notify()

    def _fail(self, channel: _Channel, error: Exception) -> None:
        """Nothing can be asked there for a while."""
        _hang_up(channel)
        channel.not_before = time.monotonic() + BACK_OFF_SECONDS
        self._log.warning(
            "reuse",
            f"the engine at {channel.place} was asked in vain which blocks it has, and is not "
            f"asked again for {BACK_OFF_SECONDS:g} s: {error}",
        )
        while channel.searches:
            self._end(channel, None)


def checked(found: wire.FoundBlocks, num_asked: int) -> wire.FoundBlocks:
    """An answer whose numbers can be worked with.

    Raises:
        ProtocolError: they cannot be those of an engine.
    """
    num_blocks, most = len(found.block_ids), (1 << 31) - 1
    good = num_blocks == len(found.generations) <= num_asked
    good = good and all(0 < block_id <= most for block_id in found.block_ids)
    good = good and all(0 <= one < 1 << 64 for one in found.generations)
    good = good and 0 < found.port < 65536 and 0 < found.tp_size <= 1024
    if not good:
        raise ProtocolError(
            f"expected at most {num_asked} blocks with ids from 1 to {most} and a generation each, "
            f"a port and a number of ranks, got {num_blocks} blocks with "
            f"{len(found.generations)} generations at port {found.port}"
        )
    return found


def _hang_up(channel: _Channel) -> None:
    inquiry, channel.inquiry, channel.question = channel.inquiry, None, b""
    if inquiry is not None:
        inquiry.close()
