"""Blocks of an engine's requests, on offer to another engine that goes on with their answers.

Each block of a running request is named and put on offer once it is complete, a bounded number of
them before each step, so that a question is answered from a table.

A block's name is a hash of all that its bytes follow from: the tokens in it, the hash of the block
before it, and at the root the engine's configuration and weights, the block size, the LoRA adapter
and the cache salt. So equal hashes mean equal beginnings of one tenant under one model, and a hash
says nothing to who does not know them. vLLM's own block hashes begin with a number drawn by each
process and cannot be compared.

Nothing is kept: blocks are freed as ever, and vLLM's block pool tells when it hands one out
again, before it does (``unpin_blocks``). Each block has a generation, a number
that changes before the block's bytes do, in memory that a worker shares with its scheduler's
process and has registered with NIXL. The scheduler side raises it when the block is handed out
again, which is before any worker is told to write into it; a peer reads the generations after the
blocks. Where it finds those that it was told with the blocks' ids, it has read what was on offer:

    scheduler: raise (R) -> step sent -> worker: overwrite (W)
    peer:      blocks read to the end (B) -> generation read (G)

R comes before W, since W is caused by a message that is sent after R; B ends before G begins. If G
does not see R, G comes before R, so B before W.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_commext.anonymous_memory import AnonymousMemory, Offer
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import GENERATIONS
from vllm_commext.nixl.wire.messages import HASH_BYTES
from vllm_commext.nixl.wire.prompt import Prompt, digests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


Generations = npt.NDArray[np.uint64]
MIN_CELLS = 4096  # generations that one worker can read at a time, or those of its longest prompt
_GENERATION_BYTES = 8


class GenerationTable:
    """One worker's generations.

    Attributes:
        generations: ``[num_blocks]`` uint64; written by the scheduler side alone.
        table: the same, for peers.
    """

    def __init__(self, num_blocks: int, num_cells: int) -> None:
        self._memory = AnonymousMemory.create("commext-generations", _GENERATION_BYTES * num_blocks)
        self.offer = self._memory.offer
        self.generations: Generations = np.frombuffer(self._memory.map, dtype=np.uint64)
        self.table = Table(GENERATIONS, self.generations, num_cells)

    def close(self) -> None:
        """Let go of the memory's name; the scheduler side has opened it, or never will."""
        self._memory.forget_file()


def open_generations(offer: Offer) -> Generations:
    """A worker's generations, in the scheduler's process; raises UnsupportedError."""
    memory = AnonymousMemory.open(offer)
    memory.forget_file()
    return np.frombuffer(memory.map, dtype=np.uint64)


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
        """The block is about to get other bytes: whoever reads it meanwhile finds that out."""
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
                known = itertools.takewhile(_is_known, map(self._block_of.get, asked))
                found = [one for one in known if one is not None]
                run.generations.extend(self._tables[0][found].tolist() if found else [])
            run.block_ids.extend(found)
            if len(found) < len(asked):
                break
        return run


def _is_known(block_id: int | None) -> bool:
    return block_id is not None


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


class Running(Protocol):
    """An engine's requests that run."""

    def __iter__(self) -> Iterator[Request]: ...

    def blocks_of(self, request: Request) -> Sequence[KVCacheBlock]: ...


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

    def add_running(self, running: Running) -> None:
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
                self._offer(request, named, running.blocks_of(request)[named.count : end])
            if not left:
                return

    def _offer(self, request: Request, named: _Named, blocks: Sequence[KVCacheBlock]) -> None:
        assert named.last is not None  # the caller has asked
        size, first = self._names.block_size, named.count
        token_ids = request.all_token_ids[first * size : (first + len(blocks)) * size]
        names = chain(named.last, token_ids, size)
        # Told of their next use, the references as they were.
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, self._note_use)
        self._table.offer(names, [block.block_id for block in blocks])
        named.last, named.count = names[-1], first + len(blocks)

    def forget(self, request_id: str) -> None:
        self._named.pop(request_id, None)

    def forget_running(self, running: Iterable[Request]) -> None:
        self._named |= {request.request_id: _Named(None) for request in running}

    def clear(self, running: Iterable[Request]) -> None:
        self.forget_running(running)
        self._table.clear()

    def _note_use(self, block: KVCacheBlock) -> None:
        self._table.drop(block.block_id)
