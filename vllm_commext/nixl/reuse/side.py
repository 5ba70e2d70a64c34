"""The scheduler side of reuse: what this engine offers to others, and what it takes of theirs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_commext.anonymous_memory import Offer
from vllm_commext.compat import evidence
from vllm_commext.errors import ProtocolError, UnsupportedError
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.reasons import NoReuse
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.reuse.finder import BlockFinder
from vllm_commext.nixl.reuse.generations import open_generations
from vllm_commext.nixl.reuse.offers import Names, Offers
from vllm_commext.nixl.reuse.reusing import Reusing
from vllm_commext.nixl.reuse.table import OfferTable
from vllm_commext.nixl.wire.params import params_of
from vllm_commext.nixl.wire.places import places_for_reuse

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_commext.nixl.wire.client import ClientThread
    from vllm_commext.nixl.wire.messages import FoundBlocks


class ReuseSide:
    """Does nothing where ``reusing`` has a refusal.

    Args:
        reusing: what this engine does of it.
        consumer: this engine's id.
        secret: the side channels' secret, None where there is none.
        client: asks others.
        limit_seconds: how long a request waits for what others have.
        recorder: where counts go.
        notify: called when a request need not wait any more.
    """

    def __init__(
        self,
        reusing: Reusing,
        consumer: str,
        secret: bytes | None,
        client: ClientThread,
        limit_seconds: float,
        recorder: TransferRecorder,
        notify: Callable[[], None],
    ) -> None:
        self._names = Names(reusing.configuration, reusing.block_size)
        self._secret = secret
        self._recorder = recorder
        self._finder = BlockFinder(client, consumer, limit_seconds, notify)
        self._pool: Any = None
        self._offers: Offers | None = None
        self._has_steps = False
        # Requests that wait for answers; what was found for a request, until its load is planned;
        # blocks of the loads under way.
        self._waiting: set[str] = set()
        self._found: dict[str, FoundBlocks] = {}
        self._loading: dict[str, int] = {}
        self._log = RateLimitedLog()
        self._is_on = not reusing.refusal
        if reusing.refusal is not None and reusing.refusal != NoReuse.OFF:
            self._refuse(reusing.refusal.meaning)

    @property
    def is_on(self) -> bool:
        """Whether this engine does anything of it."""
        return self._is_on

    def bind(self, pool: Any) -> None:
        """Learn of vLLM's block pool."""
        self._pool = pool
        is_told = hasattr(pool, "unpin_blocks") and not evidence.why_not("nixl reuse")
        if self._is_on and not is_told:
            self._refuse(NoReuse.POOL.meaning)

    def open(self, tables: Sequence[Offer | None]) -> OfferTable | None:
        """Learn of the workers' generations; what the side channel answers from, None where this
        engine offers nothing."""
        if not self._is_on or self._pool is None:
            return None
        try:
            shared = [open_generations(one) for one in tables if one is not None]
        except UnsupportedError as error:
            self._refuse(str(error))
            return None
        table = OfferTable(shared)
        self._offers = Offers(self._names, table, self._pool)
        return table

    def note_step(self, defer_frees: Callable[[], bool]) -> None:
        """The engine is going to take a step, before which it computes what has failed.

        Args:
            defer_frees: has blocks kept that a step under way may write to, since a load into them
                is not ordered behind it; whether they are kept.
        """
        if not self._has_steps and self._is_on and not defer_frees():
            self._refuse(NoReuse.FREES.meaning)
        self._has_steps = True

    def clear(self) -> None:
        """What this engine has computed so far means nothing any more, nor what others have that
        were like it."""
        if self._offers is not None:
            self._offers.clear()
        for request_id in (*self._waiting, *self._found):
            self.forget(request_id)

    def offer(self, request: Request, block_ids: Sequence[int]) -> None:
        """A request has ended well, and still holds its blocks."""
        if self._offers is not None:
            self._offers.add(request, block_ids)

    def search(self, request: Request) -> None:
        """Look for a new request's blocks where its router says that they may be."""
        is_able = self._is_on and self._pool is not None
        if not is_able or request.skip_reading_prefix_cache:
            return
        try:
            places = places_for_reuse(params_of(request), self._secret)
        except ProtocolError as error:
            self._log.warning("places", f"request {request.request_id} is computed here: {error}")
            return
        # The last token is computed, for its logits.
        hashes = self._names.of(request, request.num_prompt_tokens - 1) if places else []
        if not hashes:
            return
        self._waiting.add(request.request_id)
        self._recorder.count(reuse_lookups=1)
        self._finder.search(request.request_id, hashes, places)

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request waits for an answer that has not come; with one it can still wait for
        something else, such as its grammar."""
        return request_id in self._waiting and not self._finder.is_done(request_id)

    def num_tokens(self, request_id: str, num_computed: int, most: int) -> int | None:
        """Tokens beyond ``num_computed`` that others have, whole blocks; None while they are asked.

        Args:
            request_id: the request.
            num_computed: tokens that are here, whole blocks.
            most: tokens that may be here before it is computed.
        """
        if not self._has_steps and request_id in self._waiting:
            self._refuse(NoReuse.STEPS.meaning)
        if not self._is_on:
            self.forget(request_id)
        if request_id in self._waiting:
            is_useful = most - num_computed >= self._names.block_size
            if is_useful and not self._finder.is_done(request_id):
                return None
            self._waiting.discard(request_id)
            found = self._finder.take(request_id)
            if found is not None and found.block_ids:
                self._found[request_id] = found
        found = self._found.get(request_id)
        num_found = len(found.block_ids) * self._names.block_size if found is not None else 0
        return max(0, num_found - num_computed)

    def take(self, request_id: str, num_external: int) -> RemoteRequest | None:
        """Where ``num_external`` tokens of a request are to be read, which ends what is known of
        it; None where nothing is."""
        found = self._found.pop(request_id, None)
        if found is None or not num_external:
            return None
        num_blocks = num_external // self._names.block_size
        self._loading[request_id] = num_blocks
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

    def note_end(self, request_id: str, *, failed: bool) -> None:
        """A request's load has ended on all workers."""
        num_blocks = self._loading.pop(request_id, 0)
        if failed:
            self._recorder.count(reuse_recomputed_blocks=num_blocks)
        else:
            self._recorder.count(reuse_blocks=num_blocks)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._waiting.discard(request_id)
        self._found.pop(request_id, None)
        self._finder.take(request_id)

    def _refuse(self, why: str) -> None:
        self._is_on = False
        logger.warning("reuse_blocks has no effect: %s", why)
