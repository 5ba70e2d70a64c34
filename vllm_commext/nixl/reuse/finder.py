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
        self, request_id: str, hashes: Sequence[bytes], addresses: Sequence[SideChannelAddress]
    ) -> None:
        """Look for the blocks with these hashes at these side channels."""
        question = wire.FindBlocks(
            hashes=b"".join(hashes[: wire.MAX_HASHES]), consumer=self._consumer
        )
        until = time.monotonic() + self._limit_seconds
        search = self._searches[request_id] = _Search(request_id, question, until, len(addresses))
        self._client.call(self._ask, search, addresses)

    def is_done(self, request_id: str) -> bool:
        """Whether all have answered, or no time is left."""
        search = self._searches.get(request_id)
        return search is None or search.num_open <= 0 or time.monotonic() >= search.until

    def take(self, request_id: str) -> wire.FoundBlocks | None:
        """The longest run of blocks that was found, None for none; ends the search."""
        search = self._searches.pop(request_id, None)
        return search.best if search is not None else None

    def _ask(self, search: _Search, addresses: Sequence[SideChannelAddress]) -> None:
        for address in addresses:
            channel = self._channels.pop(address, None)
            if channel is None:
                channel = SideChannel(self._client, address, BACK_OFF)
            self._channels[address] = channel
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
        num_found, num_asked = len(found.block_ids), len(search.question.hashes) // wire.HASH_BYTES
        if not num_found == len(found.generations) <= num_asked:
            raise ProtocolError(
                f"expected at most {num_asked} blocks with a generation each, got {num_found} with "
                f"{len(found.generations)}"
            )
        longest = len(search.best.block_ids) if search.best is not None else 0
        if num_found > longest:
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
