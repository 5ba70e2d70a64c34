"""The life of a request whose prompt's blocks are on other engines, as the scheduler side that has
them read sees it, which docs/design/requests.md draws; and blocks of reads that did not end in
time, which are kept out of use until they do.
A read that NIXL was told to drop can still write its bytes later, so a late request's blocks must
not go to another request. The scheduler side therefore takes one more reference on them, only then
lets the workers report the load as failed, and drops the reference when every worker says that
nothing is under way any more. So a load can outlive its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.errors import CommextError, Reason
from vllm_commext.nixl.wire.messages import FoundBlocks
from vllm_commext.nixl.wire.params import TransferParams

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Source(Reason):
    """Who knows where a request's blocks are."""

    GIVEN = "given", "the request's parameters"
    STREAMED = "streamed", "the side channel of the prefill engine that computes the prompt"
    REUSED = "reused", "the side channels of engines that may hold blocks of it"


class LoadPhase(Reason):
    """The phase of a request's load."""

    ASKED = "asked", "side channels are asked where they are; none is allocated here"
    KNOWN = "known", "it is known where they are, or why they cannot be read"
    LOADING = "loading", "the workers fill them"
    LATE = "late", "they are out of use until no worker fills them any more"
    DONE = "done", "nothing"


class TokenPhase(Reason):
    """The source of a request's first token."""

    AWAITED = "awaited", "the prefill engine, if that offers one in time"
    READY = "ready", "the prefill engine; it is sent before the next step"
    SENT = "sent", "the prefill engine; the client has it"
    COMPUTED = "computed", "this engine"


Phase = LoadPhase | TokenPhase
MOVES: Mapping[Phase, frozenset[Phase]] = {
    LoadPhase.ASKED: frozenset({LoadPhase.KNOWN, LoadPhase.DONE}),
    LoadPhase.KNOWN: frozenset({LoadPhase.LOADING, LoadPhase.DONE}),
    LoadPhase.LOADING: frozenset({LoadPhase.DONE, LoadPhase.LATE}),
    LoadPhase.LATE: frozenset({LoadPhase.DONE}),
    LoadPhase.DONE: frozenset(),
    TokenPhase.AWAITED: frozenset({TokenPhase.READY, TokenPhase.COMPUTED}),
    TokenPhase.READY: frozenset({TokenPhase.SENT, TokenPhase.COMPUTED}),
    TokenPhase.SENT: frozenset(),
    TokenPhase.COMPUTED: frozenset(),
}


@dataclass(eq=False)
class LoadState:
    """All that the scheduler side knows of one request whose blocks other engines have.

    Attributes:
        answer: where the blocks are, or why they cannot be read; None before that is known, after
            the load is planned, and for nothing to read.
        is_void: what other engines have computed for it counts no more.
        num_missing: those of them that the workers fill.
        num_read: of the prompt's first tokens, how many a failed load has brought on all workers.
        is_unread: the load has failed, and vLLM is not told of it.
    """

    request: Request
    source: Source
    phase: LoadPhase = LoadPhase.ASKED
    token_phase: TokenPhase = TokenPhase.AWAITED
    answer: TransferParams | FoundBlocks | CommextError | None = None
    first_token: int = -1
    arrived: float | None = None
    is_void: bool = False
    blocks: tuple[KVCacheBlock, ...] = ()
    num_missing: int = 0
    num_unsettled: int = 0
    failure: str = ""
    num_read: int = 0
    is_unread: bool = False

    def move(self, phase: Phase) -> bool:
        """Go on to a phase; False where the present one is not followed by it, and stays."""
        if phase not in MOVES[self.token_phase if isinstance(phase, TokenPhase) else self.phase]:
            return False
        if isinstance(phase, TokenPhase):
            self.token_phase = phase
        else:
            self.phase = phase
        return True

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> TransferParams:
        """A prefill engine's answer, until the plan; raises CommextError."""
        if isinstance(self.answer, CommextError):
            raise self.answer
        assert isinstance(self.answer, TransferParams)
        return self.answer

    @property
    def must_compute(self) -> bool:
        is_sent = self.token_phase is TokenPhase.SENT
        return is_sent or self.is_void or self.source is Source.REUSED


class Quarantine:
    """Loads under way, and those that are late.

    Without a block pool a late load is not given up: it goes on until it ends.

    Args:
        num_workers: workers that must settle before blocks are given back.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: BlockPool | None = None
        self._loading: dict[str, LoadState] = {}
        self._late: dict[str, LoadState] = {}

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return sum(len(state.blocks) for state in self._late.values())

    @property
    def has_loads(self) -> bool:
        return bool(self._loading)

    def find(self, request_id: str) -> LoadState | None:
        return self._loading.get(request_id) or self._late.get(request_id)

    def begin(self, state: LoadState) -> None:
        if state.move(LoadPhase.LOADING):
            self._loading[state.request_id] = state

    def end(self, request_id: str) -> LoadState | None:
        """All workers have reported the load, which is returned; if late, its blocks are kept."""
        state = self._loading.pop(request_id, None)
        if state is None:
            return self._late.get(request_id)
        state.move(LoadPhase.DONE)
        state.blocks = ()
        return state

    def note_late(self, request_ids: Iterable[str]) -> list[str]:
        """Workers say that loads are late: take their blocks out of use.  Returns those that the
        workers may report as failed."""
        given_up: list[str] = []
        for request_id in request_ids:
            state = self._loading.get(request_id)
            if self._pool is None or state is None or not state.move(LoadPhase.LATE):
                continue
            state.num_unsettled = self._num_workers
            self._pool.touch(state.blocks)
            self._late[request_id] = self._loading.pop(request_id)
            given_up.append(request_id)
        return given_up

    def note_settled(self, settled: Mapping[str, int]) -> None:
        for request_id, num_workers in settled.items():
            state = self._late.get(request_id)
            if state is None:
                continue
            state.num_unsettled -= num_workers
            if state.num_unsettled <= 0 and state.move(LoadPhase.DONE):
                assert self._pool is not None  # blocks are only kept where there is a pool
                self._pool.free_blocks(reversed(self._late.pop(request_id).blocks))
