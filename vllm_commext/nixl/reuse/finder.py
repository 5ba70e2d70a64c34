"""Asks other engines, from the scheduler's process, which blocks of a prompt they have on offer.

A question that is not answered in time, or not well, costs its request nothing but that time: what
nobody has is computed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.reuse.hashes import HASH_BYTES
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import BackOff, ClientThread, SideChannel
from vllm_commext.nixl.wire.connection import SideChannelAddress

BACK_OFF = BackOff()
MAX_CHANNELS = 128
"""Side channels that are known at a time; the one that was asked least recently makes room."""


@dataclass(eq=False)
class _Search:
    """One request's questions.

    Attributes:
        request_id: the request.
        question: the same to each engine.
        until: when the request waits no more, in seconds of ``time.monotonic``.
        num_open: engines that have not answered.
        best: the longest answer.
    """

    request_id: str
    question: wire.FindBlocks
    until: float
    num_open: int
    best: wire.FoundBlocks | None = None


class BlockFinder:
    """Requests whose blocks are being looked for.

    Args:
        client: asks; what is done by its thread begins with ``_``.
        consumer: this engine's id.
        limit_seconds: how long one request waits.
        notify: called when an answer can be taken.
    """

    def __init__(
        self,
        client: ClientThread,
        consumer: str,
        limit_seconds: float,
        notify: Callable[[], None],
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._limit_seconds = limit_seconds
        self._notify = notify
        self._searches: dict[str, _Search] = {}
        # The one that was asked last comes last.
        self._channels: dict[SideChannelAddress, SideChannel] = {}
        self._log = RateLimitedLog()

    def search(
        self, request_id: str, hashes: Sequence[bytes], places: Sequence[SideChannelAddress]
    ) -> None:
        """Look for the blocks with these hashes at these side channels."""
        question = wire.FindBlocks(
            hashes=b"".join(hashes[: wire.MAX_HASHES]), consumer=self._consumer
        )
        until = time.monotonic() + self._limit_seconds
        search = self._searches[request_id] = _Search(request_id, question, until, len(places))
        self._client.call(self._ask, search, places)

    def is_done(self, request_id: str) -> bool:
        """Whether all have answered, or no time is left."""
        search = self._searches.get(request_id)
        return search is None or search.num_open <= 0 or time.monotonic() >= search.until

    def take(self, request_id: str) -> wire.FoundBlocks | None:
        """The longest run of blocks that was found, None for none; ends the search."""
        search = self._searches.pop(request_id, None)
        return search.best if search is not None else None

    def _ask(self, search: _Search, places: Sequence[SideChannelAddress]) -> None:
        for place in places:
            channel = self._channels.pop(place, None)
            if channel is None:
                channel = SideChannel(self._client, place, BACK_OFF)
            self._channels[place] = channel
            try:
                channel.ask(
                    search.question,
                    self._limit_seconds,
                    partial(self._note_reply, search),
                    partial(self._note_error, search, channel),
                )
            except CommextError:
                self._note_end(search)
        num_over = max(0, len(self._channels) - MAX_CHANNELS)
        idle = [channel for channel in self._channels.values() if not channel.is_asking]
        for channel in idle[:num_over]:
            channel.close()
            del self._channels[channel.address]

    def _note_reply(self, search: _Search, found: wire.FoundBlocks) -> None:
        check(found, len(search.question.hashes) // HASH_BYTES)
        longest = len(search.best.block_ids) if search.best is not None else 0
        if len(found.block_ids) > longest:
            search.best = found
        self._note_end(search)

    def _note_error(self, search: _Search, channel: SideChannel, error: CommextError) -> None:
        self._log.warning(
            "reuse",
            f"the engine at {channel.address} was asked in vain which blocks it has, and is not "
            f"asked again for {channel.retry_at - time.monotonic():.1g} s: {error}",
        )
        self._note_end(search)

    def _note_end(self, search: _Search) -> None:
        """One of the engines has answered, or does not."""
        is_last = search.num_open == 1 and search.request_id in self._searches
        search.num_open -= 1
        if is_last:
            self._notify()


def check(found: wire.FoundBlocks, num_asked: int) -> None:
    """Raise ProtocolError where an answer's numbers cannot be those of an engine."""
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
