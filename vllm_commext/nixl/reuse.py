"""Blocks of an engine's requests, on offer to another engine that goes on with their answers, and
those of others that this engine takes.  A question for them that is not answered in time, or not
well, costs its request nothing but that time: the rest is computed.

Equal names of blocks mean equal beginnings of one tenant under one model, and say nothing to who
does not know these. vLLM's own block hashes begin with a number drawn by each process and cannot be
compared. Nothing is kept for readers: a block has a generation, which changes before its bytes do
and which they read after those. docs/design/block_reuse.md shows why that is enough.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_commext.anonymous_memory import Offer
from vllm_commext.compat import fits
from vllm_commext.errors import ProtocolError, UnsupportedError
from vllm_commext.nixl.decode.askers import BlockFinder
from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState, Source
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.prefill.fence import Generations, open_generations
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.messages import HASH_BYTES, FoundBlocks
from vllm_commext.nixl.wire.params import ANSWER, params_of, places_for_reuse
from vllm_commext.nixl.wire.prompt import Prompt, digests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_commext.nixl.engine_context import EngineContext


MAX_NAMED = 256  # blocks that are named before one step, which takes half a millisecond
MAX_FOUND = 256  # blocks that are looked up at a time
_ROOT = b"commext reuse"
_BLOCK = b"commext block"


def root_of(configuration: str, block_size: int, identity: Mapping[str, str]) -> bytes:
    """``HASH_BYTES`` bytes that a chain begins with.

    Args:
        configuration: digest of the facts on which engines must agree.
        block_size: tokens of a block.
        identity: digests of all that the blocks follow from beside the tokens.
    """
    content = msgspec.msgpack.encode((configuration, block_size, sorted(identity.items())))
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=_ROOT).digest()


def chain(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hash of each whole block of these tokens; raises OverflowError."""
    num_blocks = len(token_ids) // block_size
    ids = np.array(token_ids[: num_blocks * block_size], dtype="<u4").tobytes()
    step, last, found = 4 * block_size, root, list[bytes]()
    for begin in range(0, len(ids), step):
        one = hashlib.blake2b(last, digest_size=HASH_BYTES, person=_BLOCK)
        one.update(ids[begin : begin + step])
        last = one.digest()
        found.append(last)
    return found


@dataclass(frozen=True)
class Run:
    """Blocks that hold the beginning of a prompt, by position, and the generation of each."""

    block_ids: list[int]
    generations: list[int]


class OfferTable:
    """Blocks on offer, by name; safe for threads.

    Args:
        tables: the generations of each worker, ``[num_blocks]`` uint64 each.  All hold the same;
            where they begin is drawn, so that no start of an engine repeats another's.
    """

    def __init__(self, tables: Sequence[Generations]) -> None:
        self._tables = tables
        self._lock = threading.Lock()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        first = np.uint64(secrets.randbits(63))
        for table in tables:
            table[:] = first

    def __len__(self) -> int:
        return len(self._hash_of)

    def offer(self, hashes: Iterable[bytes], block_ids: Iterable[int]) -> None:
        """These blocks hold what these hashes say, until ``drop``.  Of two blocks that hold the
        same, the one offered last is found: it is likely to be the last to go."""
        with self._lock:
            for one, block_id in zip(hashes, block_ids, strict=True):
                self._hash_of[block_id] = one
                self._block_of[one] = block_id

    def drop(self, block_id: int) -> None:
        """The block is about to get other bytes: its readers find that out."""
        with self._lock:
            for table in self._tables:
                table[block_id] += np.uint64(1)
            one = self._hash_of.pop(block_id, None)
            if one is not None and self._block_of.get(one) == block_id:
                del self._block_of[one]

    def clear(self) -> None:
        with self._lock:
            for table in self._tables:
                table += np.uint64(1)
            self._block_of.clear()
            self._hash_of.clear()

    def find(self, hashes: Iterable[bytes]) -> Run:
        """The blocks with these hashes, up to the first that is not on offer.  The engine's thread
        never waits for more than ``MAX_FOUND`` of them."""
        run, rest = Run([], []), iter(hashes)
        while asked := list(itertools.islice(rest, MAX_FOUND)):
            with self._lock:
                ids = map(self._block_of.get, asked)
                known = itertools.takewhile(lambda one: one is not None, ids)
                found = [one for one in known if one is not None]
                run.generations.extend(self._tables[0][found].tolist() if found else [])
            run.block_ids.extend(found)
            if len(found) < len(asked):
                break
        return run


class Names:
    """Names of requests' blocks, the same on all engines that are configured alike.

    Args:
        configuration: gives the digest of the facts on which they agree; called once.
    """

    def __init__(
        self, configuration: Callable[[], str], block_size: int, identity: Identity
    ) -> None:
        self._configuration = configuration
        self._identity = identity
        self.block_size = block_size
        self._digest = ""

    def of(self, request: Request, num_tokens: int, more: Sequence[int] = ()) -> list[bytes]:
        """The hash of each whole block of a request's first tokens, with *more* behind them; none
        for a request that does not follow from tokens alone."""
        root = self.root_of(request)
        if root is None:
            return []
        return chain(root, [*request.all_token_ids[:num_tokens], *more], self.block_size)

    def root_of(self, request: Request) -> bytes | None:
        prompt = self._identity.prompt_of(request)
        if not _is_text(request, prompt):
            return None
        self._digest = self._digest or self._configuration()
        return root_of(self._digest, self.block_size, digests(prompt, 0))


def _is_text(request: Any, prompt: Prompt) -> bool:
    is_whole = not request.resumable  # else its tokens may be replaced
    has_ids = prompt.token_ids is not None and prompt.embeddings is None
    return is_whole and has_ids and not prompt.items


def num_complete(request: Request) -> int:
    """Tokens of a running request whose KV is there: all before the last one, once that is an
    answer's, since it has come of them and steps under way write behind them.  After a preemption
    a step may be computing the first ones again."""
    if not request.num_output_tokens or request.num_preemptions:
        return 0
    return min(request.num_computed_tokens, request.num_tokens - 1)


@dataclass
class _Named:
    """A request's ``count`` blocks on offer; ``last`` names the last one, or is the chain's root;
    None if none may be offered."""

    last: bytes | None
    count: int = 0


class Offers:
    """Puts blocks of requests that run on offer in the side channel's table."""

    def __init__(self, names: Names, table: OfferTable, pool: Any) -> None:
        self._names = names
        self._table = table
        self._pool = pool
        self._named: dict[str, _Named] = {}

    def add_running(
        self, running: Iterable[Request], blocks_of: Callable[[str], KVCacheBlocks]
    ) -> None:
        """Offer blocks that are complete since the last step, at most ``MAX_NAMED``."""
        left, size = MAX_NAMED, self._names.block_size
        for request in running:
            num_blocks = num_complete(request) // size
            if not num_blocks:
                continue
            named = self._named.get(request.request_id)
            if named is None:
                named = self._named[request.request_id] = _Named(self._names.root_of(request))
            if named.last is not None and num_blocks > named.count:
                end = min(num_blocks, named.count + left)
                left -= end - named.count
                blocks = blocks_of(request.request_id).blocks[0]
                self._offer(request, named, blocks[named.count : end])
            if not left:
                return

    def _offer(self, request: Request, named: _Named, blocks: Sequence[KVCacheBlock]) -> None:
        assert named.last is not None  # the caller has asked
        size, first = self._names.block_size, named.count
        token_ids = request.all_token_ids[first * size : (first + len(blocks)) * size]
        names = chain(named.last, token_ids, size)
        # Told of their next use, the references as they were.
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, lambda block: self._table.drop(block.block_id))
        self._table.offer(names, [block.block_id for block in blocks])
        named.last, named.count = names[-1], first + len(blocks)

    def forget(self, request_id: str) -> None:
        self._named.pop(request_id, None)

    def forget_running(self, running: Iterable[Request]) -> None:
        self._named |= {request.request_id: _Named(None) for request in running}

    def clear(self, running: Iterable[Request]) -> None:
        self.forget_running(running)
        self._table.clear()


class ReuseSide:
    """Does nothing where the engine's ``reusing`` has a refusal."""

    def __init__(self, engine: EngineContext) -> None:
        reusing, limit_seconds = engine.reusing, engine.config.reuse_lookup_timeout
        self.has_steps = False
        self._engine = engine
        self._names = Names(reusing.configuration, reusing.block_size, engine.identity)
        self._finder = BlockFinder(engine.client, limit_seconds, engine.wakeup.notify)
        self._pool: Any = None
        self._offers: Offers | None = None
        self._running: Callable[[], Iterable[Request]] = tuple
        self._log = RateLimitedLog()
        self.is_on = reusing.refusal is None
        if reusing.refusal:
            self._refuse(reusing.refusal)

    def bind(self, pool: Any) -> None:
        self._pool = pool
        is_told = not fits.why_not("nixl reuse")
        if self.is_on and not is_told:
            self._refuse("this vLLM's block pool does not tell when a block is used again")

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

    def note_step(self, scheduler: Any) -> None:
        self.has_steps, self._running = True, lambda: scheduler.running
        if self._offers is not None:
            self._offers.add_running(scheduler.running, scheduler.kv_cache_manager.get_blocks)

    def forget_running(self, is_concerned: Callable[[Request], bool]) -> None:
        if self._offers is not None:
            self._offers.forget_running(filter(is_concerned, self._running()))

    def clear(self) -> None:
        if self._offers is not None:
            self._offers.clear(self._running())

    def search(self, request: Request, answer: Sequence[int]) -> bool:
        """Look for blocks of a request that goes on with another engine's answer, where its router
        says that they are; whether that is to be waited for.

        Args:
            answer: as much of it as goes on here; where it is drawn again, nothing.
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
                self._refuse("vLLM's own step is in place: what is not read cannot be computed")
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
