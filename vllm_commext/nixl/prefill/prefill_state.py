"""The life of a prompt that is computed for another engine, as the scheduler side of its engine
sees it.  docs/design/requests.md draws it.

Pure: who has a state moves it on, and acts on the move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_commext.reasons import Reason

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PrefillPhase(Reason):
    """What becomes of a prompt's blocks."""

    COMPUTED = "computed", "they are filled"
    UNWANTED = "unwanted", "they are filled, and nobody will read them"
    HELD = "held", "they are kept for their readers, under a lease"
    RELEASED = "released", "they are kept until all workers have let go of them"
    FREE = "free", "they are vLLM's again"


MOVES: Mapping[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.COMPUTED: frozenset(set(PrefillPhase) - {PrefillPhase.COMPUTED}),
    PrefillPhase.UNWANTED: frozenset({PrefillPhase.RELEASED, PrefillPhase.FREE}),
    PrefillPhase.HELD: frozenset({PrefillPhase.RELEASED, PrefillPhase.FREE}),
    PrefillPhase.RELEASED: frozenset({PrefillPhase.FREE}),
    PrefillPhase.FREE: frozenset(),
}


@dataclass
class Stream:
    """A prompt that is read while it is computed.

    Attributes:
        key: its router's.
        row: of the workers' progress tables.
        tag: the nonce under which it has begun, which tells it from other requests that get the
            row; 0 before.
        num_blocks: those that are listed, by group.
        is_done: all are listed that are known before the prompt's end.
    """

    key: str
    row: int
    tag: int = 0
    num_blocks: dict[int, int] = field(default_factory=dict[int, int])
    is_done: bool = False


@dataclass(eq=False)
class PrefillState:
    """All that the scheduler side knows of one prompt that is computed for another engine.

    Attributes:
        request: vLLM's.
        phase: of its blocks.
        key: by which its router can have it released, "" for none.
        is_cut: its last token is left to its readers.
        slot: of its fence, -1 for none.
        held_since: when its lease began, in monotonic seconds, None where it has had none.
        has_expired: its lease has run out on a worker.
        stream: how it is read meanwhile, None where it is not.
        block_ids: its blocks by group and position, where a copy of the cache is kept on the host.
    """

    request: Request
    phase: PrefillPhase = PrefillPhase.COMPUTED
    key: str = ""
    is_cut: bool = False
    slot: int = -1
    held_since: float | None = None
    has_expired: bool = False
    stream: Stream | None = None
    block_ids: list[list[int]] = field(default_factory=list[list[int]])

    def move(self, phase: PrefillPhase) -> bool:
        """Go on to a phase; False where the present one is not followed by it, and stays."""
        if phase not in MOVES[self.phase]:
            return False
        self.phase = phase
        return True

    def renounce(self) -> bool:
        """Nobody will read it; whether workers are to let go of it."""
        return self.move(PrefillPhase.UNWANTED) or (
            self.phase is PrefillPhase.HELD and self.move(PrefillPhase.RELEASED)
        )

    @property
    def request_id(self) -> str:
        """The request's id in this engine."""
        return self.request.request_id

    @property
    def row(self) -> int:
        """Where readers are told of its progress, -1 where they are not, or not yet."""
        return self.stream.row if self.stream is not None and self.slot >= 0 else -1
