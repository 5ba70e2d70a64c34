"""The scheduler side of reuse: what this engine offers to others, and what it takes of theirs.

Where a request goes on with an answer that another engine has begun, that one is asked which blocks
of it are on offer. A question that is not answered in time, or not well, costs its request nothing
but that time: the rest is computed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_commext.anonymous_memory import Offer
from vllm_commext.compat import fits
from vllm_commext.errors import CommextError, ProtocolError, UnsupportedError
from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState, Source
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.reasons import NoReuse
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.reuse.offers import Names, Offers, OfferTable, Running, open_generations
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import BackOff, ClientThread, SideChannel
from vllm_commext.nixl.wire.connection import SideChannelAddress
from vllm_commext.nixl.wire.messages import FoundBlocks
from vllm_commext.nixl.wire.params import ANSWER, params_of, places_for_reuse

if TYPE_CHECKING:
    from vllm.v1.request import Request


BACK_OFF = BackOff()
MAX_CHANNELS = 128
"""Side channels that are known at a time; the one that was asked least recently makes room."""


@dataclass(eq=False)
class _Search:
    """One request's questions."""

    request_id: str
    question: wire.FindBlocks
    until: float
    num_open: int
    best: wire.FoundBlocks | None = None


class BlockFinder:
    """Requests whose blocks are being looked for."""

    def __init__(
        self, client: ClientThread, consumer: str, limit_seconds: float, notify: Callable[[], None]
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
        asked = b"".join(hashes[: wire.MAX_HASHES])
        question = wire.FindBlocks(hashes=asked, consumer=self._consumer)
        until = time.monotonic() + self._limit_seconds
        search = self._searches[request_id] = _Search(request_id, question, until, len(addresses))
        self._client.call(self._ask, search, addresses)

    def is_done(self, request_id: str) -> bool:
        search = self._searches.get(request_id)
        return search is None or search.num_open <= 0 or time.monotonic() >= search.until

    def take(self, request_id: str) -> wire.FoundBlocks | None:
        search = self._searches.pop(request_id, None)
        return search.best if search is not None else None

    def _ask(self, search: _Search, addresses: Sequence[SideChannelAddress]) -> None:
        for address in addresses:
            channel = self._channels.pop(address, None)
            channel = channel or SideChannel(self._client, address, BACK_OFF)
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
        idle = [key for key, channel in self._channels.items() if not channel.is_asking]
        for key in idle[:num_over]:
            self._channels.pop(key).close()

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
            f"block lookup at {channel.address} failed, retrying in "
            f"{channel.retry_at - time.monotonic():.2g} s: {error}",
        )
        self._note_end(search)

    def _note_end(self, search: _Search) -> None:
        is_last = search.num_open == 1 and search.request_id in self._searches
        search.num_open -= 1
        if is_last:
            self._notify()


class ReuseSide:
    """Does nothing where the engine's ``reusing`` has a refusal."""

    def __init__(self, engine: EngineContext) -> None:
        reusing, limit_seconds = engine.reusing, engine.config.reuse_lookup_timeout
        self.has_steps = False
        self._engine = engine
        self._names = Names(reusing.configuration, reusing.block_size, engine.identity)
        self._finder = BlockFinder(
            engine.client, engine.engine_id, limit_seconds, engine.wakeup.notify
        )
        self._pool: Any = None
        self._offers: Offers | None = None
        self._running: Iterable[Request] = ()
        self._log = RateLimitedLog()
        self.is_on = not reusing.refusal
        if reusing.refusal is not None and reusing.refusal != NoReuse.OFF:
            self._refuse(reusing.refusal.meaning)

    def bind(self, pool: Any) -> None:
        self._pool = pool
        is_told = not fits.why_not("nixl reuse")
        if self.is_on and not is_told:
            self._refuse(NoReuse.POOL.meaning)

    def open(self, tables: Sequence[Offer | None]) -> OfferTable | None:
        """Learn of the workers' generations; what the side channel answers from, None where this
        engine offers nothing."""
        if not self.is_on or self._pool is None:
            return None
        try:
            shared = [open_generations(one) for one in tables if one is not None]
        except UnsupportedError as error:
            self._refuse(str(error))
            return None
        table = OfferTable(shared)
        self._offers = Offers(self._names, table, self._pool)
        return table

    def note_step(self, running: Running) -> None:
        self.has_steps, self._running = True, running
        if self._offers is not None:
            self._offers.add_running(running)

    def forget_running(self, is_concerned: Callable[[Request], bool]) -> None:
        if self._offers is not None:
            self._offers.forget_running(filter(is_concerned, self._running))

    def clear(self) -> None:
        if self._offers is not None:
            self._offers.clear(self._running)

    def search(self, request: Request, answer: Sequence[int]) -> bool:
        """Look for blocks of a request that goes on with another engine's answer, where its router
        says that they are; whether that is to be waited for.

        Args:
            answer: as much of it as goes on here; where it is drawn anew, nothing.
        """
        params = params_of(request) or {}
        is_able = self.is_on and self._pool is not None and ANSWER in params
        if not is_able or request.skip_reading_prefix_cache:
            return False
        try:
            places = places_for_reuse(params, self._engine.secret)
        except ProtocolError as error:
            self._log.warning("places", f"request {request.request_id} is computed here: {error}")
            return False
        # The last token is computed, for its logits.
        num_prompt = request.num_prompt_tokens - (not answer)
        hashes = self._names.of(request, num_prompt, answer[:-1]) if places else []
        if hashes:
            self._engine.recorder.count(reuse_lookups=1)
            self._finder.search(request.request_id, hashes, places)
        return bool(hashes)

    def is_answered(self, request_id: str) -> bool:
        return self._finder.is_done(request_id)

    def num_tokens(self, state: LoadState, num_computed: int) -> int | None:
        """Tokens of a request beyond ``num_computed``, which are here, that others have, whole
        blocks; None while they are asked."""
        if state.phase is LoadPhase.ASKED:
            if not self.has_steps:
                self._refuse(NoReuse.STEPS.meaning)
            most, block_size = state.request.num_prompt_tokens - 1, self._names.block_size
            is_useful = self.is_on and most - num_computed >= block_size
            if is_useful and not self.is_answered(state.request_id):
                return None
            state.answer = _up_to(self._finder.take(state.request_id), most // block_size)
            state.move(LoadPhase.KNOWN)
        is_known = self.is_on and state.phase is LoadPhase.KNOWN
        if not (is_known and isinstance(state.answer, FoundBlocks)):
            return 0
        return max(0, len(state.answer.block_ids) * self._names.block_size - num_computed)

    def take(self, state: LoadState, num_external: int) -> RemoteRequest | None:
        found = state.answer
        if not isinstance(found, FoundBlocks) or not num_external:
            return None
        num_blocks = num_external // self._names.block_size
        return RemoteRequest(
            engine_id=found.engine_id,
            incarnation=found.incarnation,
            host=found.host,
            port=found.port,
            tp_size=found.tp_size,
            request_id=f"reuse-{uuid.uuid4().hex}",
            block_ids=(tuple(found.block_ids[-num_blocks:]),),
            num_tokens=len(found.block_ids) * self._names.block_size,
            generations=tuple(found.generations[-num_blocks:]),
        )

    def forget(self, state: LoadState) -> None:
        if state.source is Source.REUSED and state.phase in (LoadPhase.ASKED, LoadPhase.KNOWN):
            self._finder.take(state.request_id)
            state.move(LoadPhase.DONE)

    def end(self, request_id: str) -> None:
        if self._offers is not None:
            self._offers.forget(request_id)

    def _refuse(self, why: str) -> None:
        self.is_on = False
        logger.warning("reuse_blocks has no effect: %s", why)


def _up_to(found: FoundBlocks | None, num_blocks: int) -> FoundBlocks | None:
    if found is None or len(found.block_ids) <= num_blocks:
        return found
    ids, generations = found.block_ids[:num_blocks], found.generations[:num_blocks]
    return msgspec.structs.replace(found, block_ids=ids, generations=generations)
