"""One prompt that is computed for another engine, as its scheduler side sees it; its life is drawn
in docs/design/requests.md.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_commext.errors import Reason
from vllm_commext.nixl.wire.params import as_key

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class PrefillPhase(Reason):
    """What becomes of a prompt's blocks."""

    COMPUTED = "computed", "they are filled"
    UNWANTED = "unwanted", "they are filled, and will not be read"
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
        tag: its first nonce, which tells it from other requests that get the row; 0 before.
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
        key: its router releases it by this key, "" for none.
        is_cut: its last token is left to its readers.
        held_since: when its lease began, in monotonic seconds, None where it has had none.
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
        return self.move(PrefillPhase.UNWANTED) or (
            self.phase is PrefillPhase.HELD and self.move(PrefillPhase.RELEASED)
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def row(self) -> int:
        return self.stream.row if self.stream is not None and self.slot >= 0 else -1


MAX_RELEASES = 1024  # keys that one request may name
MAX_EARLY = 4096  # keys remembered whose prefills have not come in


def prefill_key_of(params: Mapping[str, Any] | None) -> str:
    return as_key((params or {}).get("prefill_key"))


def releases_of(params: Mapping[str, Any] | None) -> list[str]:
    named = (params or {}).get("release")
    return [as_key(one) for one in named[:MAX_RELEASES]] if isinstance(named, list) else []


class PrefillKeys:
    def __init__(self) -> None:
        self._states: dict[str, PrefillState] = {}
        self._early: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str, state: PrefillState) -> None:
        if key in self._early:
            del self._early[key]
            state.move(PrefillPhase.UNWANTED)
        elif key and key not in self._states:
            self._states[key], state.key = state, key

    def release(self, key: str) -> PrefillState | None:
        """Forget a key and return its prefill; None where it is not known, or not yet."""
        state = self._states.get(key)
        if state is not None:
            self.forget(state)
        elif key:
            self._early[key] = None
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
        return state

    def forget(self, state: PrefillState) -> None:
        self._states.pop(state.key, None)
        state.key = ""


@dataclass(frozen=True)
class Progress:
    """One request's part of a step.

    Attributes:
        begins: ``block_ids`` are all of its blocks; otherwise they come behind those it has.
    """

    request_id: str
    begins: bool
    block_ids: Sequence[Sequence[int]]
    num_computed: int
    end: int


def progress_in(step: SchedulerOutput) -> Iterator[Progress]:
    counts = step.num_scheduled_tokens
    for new in step.scheduled_new_reqs:
        end = new.num_computed_tokens + counts.get(new.req_id, 0)
        yield Progress(new.req_id, True, new.block_ids, new.num_computed_tokens, end)
    cached = step.scheduled_cached_reqs
    columns = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)
    for request_id, block_ids, num_computed in zip(*columns, strict=True):
        end = num_computed + counts.get(request_id, 0)
        begins = request_id in cached.resumed_req_ids
        yield Progress(request_id, begins, block_ids or (), num_computed, end)


def completes(state: PrefillState, progress: Progress) -> bool:
    if progress.begins:
        state.block_ids = []
    if progress.block_ids:
        state.block_ids = state.block_ids or [[] for _ in progress.block_ids]
        for known, added in zip(state.block_ids, progress.block_ids, strict=True):
            known += added
    return progress.num_computed < state.request.num_prompt_tokens <= progress.end
