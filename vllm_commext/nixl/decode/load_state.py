"""The life of a request whose prompt's blocks are on other engines, as the scheduler side that has
them read sees it.  docs/design/requests.md draws it.

Pure: who has a state moves it on, and acts on the move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.errors import CommextError
from vllm_commext.nixl.wire.messages import FoundBlocks
from vllm_commext.nixl.wire.params import TransferParams
from vllm_commext.reasons import Reason

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Source(Reason):
    """What says where a request's blocks are."""

    GIVEN = "given", "the request's parameters"
    STREAMED = "streamed", "the side channel of the prefill engine that computes the prompt"
    REUSED = "reused", "the side channels of engines that may hold blocks of it"


class LoadPhase(Reason):
    """What is under way for a request's blocks."""

    ASKED = "asked", "side channels are asked where they are; none is allocated here"
    KNOWN = "known", "it is known where they are, or why they cannot be read"
    LOADING = "loading", "the workers fill them"
    LATE = "late", "they are out of use until no worker fills them any more"
    DONE = "done", "nothing"


class TokenPhase(Reason):
    """Where a request's first token comes from."""

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
        request: vLLM's.
        source: what says where the blocks are.
        phase: of the load.
        token_phase: of the first token.
        answer: where the blocks are, or why they cannot be read; None before that is known, after
            the load is planned, and for nothing to read.
        first_token: the prefill engine's, once it is ready.
        arrived: when the request came in, in monotonic seconds, None where its load is not timed.
        is_void: what other engines have computed for it counts no more.
        blocks: its blocks here, from the plan on.
        num_missing: those of them that the workers fill.
        num_unsettled: workers that may still fill blocks of a late load.
        failure: why the load has failed on a worker, "" for none.
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
        """The request's id in this engine."""
        return self.request.request_id

    @property
    def params(self) -> TransferParams:
        """Where the prompt is, from a prefill engine's answer until the plan.

        Raises:
            CommextError: it cannot be read.
        """
        if isinstance(self.answer, CommextError):
            raise self.answer
        assert isinstance(self.answer, TransferParams)
        return self.answer

    @property
    def must_compute(self) -> bool:
        """Whether the request is computed here if its load fails, whatever vLLM's policy."""
        is_sent = self.token_phase is TokenPhase.SENT
        return is_sent or self.is_void or self.source is Source.REUSED
