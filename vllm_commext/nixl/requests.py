"""Messages about single requests between the scheduler side and the worker side."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.wire.connection import endpoint


class PeerKey(NamedTuple):
    """A prefill worker: engine id, host and port of its side channel, its number there."""

    engine_id: str
    host: str
    port: int
    number: int

    def __str__(self) -> str:
        return f"{self.engine_id} at {endpoint(self.host, self.port)} (rank {self.number})"


Listed = tuple[tuple[int, tuple[int, ...]], ...]
"""Block ids for a row of a prompt that is read meanwhile, each run with its place in the row."""


@dataclass(frozen=True)
class RemoteRequest:
    """A finished prefill, as its engine's request parameters describe it, or one that goes on.

    Attributes:
        block_ids: its blocks there, a list a group; the last one of each holds the last token.
        fence_slot: slot of its fence, -1 where the parameters do not say.
        fence_nonce: what stands in the slot as long as the blocks are held.
        stream_row: where its progress stands, as it is read while it is computed and its
            ``block_ids`` are not known yet; -1 for one that has been.
        stream_regions: where each group's block ids begin in the row, in pieces; see
            ``stream.progress``.
        stream_tag: what tells it from other requests that get the row.
        generations: one a block, where the blocks have no lease: what was read counts if each
            still stands there afterwards, see ``reuse``. Without fence and lease.
    """

    engine_id: str
    incarnation: str
    host: str
    port: int
    tp_size: int
    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    fence_slot: int = -1
    fence_nonce: int = 0
    stream_row: int = -1
    stream_tag: int = 0
    stream_regions: tuple[int, ...] = ()
    pp_size: int = 1
    generations: tuple[int, ...] = ()

    @property
    def is_kept(self) -> bool:
        """True if its engine keeps the blocks until their readers release them."""
        return not self.generations


@dataclass
class Load:
    """One request's blocks to be read.

    Attributes:
        blocks: this engine's blocks to be filled, an entry a group; empty where nothing is missing.
        awaited: the scheduler waits for the outcome; otherwise the blocks are only released.
        refusal: why the load must fail without being tried, "" to try it.
        recomputes: a failure is the scheduler side's, which may have the request computed whatever
            vLLM's policy.
    """

    request_id: str
    remote: RemoteRequest | None
    blocks: tuple[Blocks, ...] = ()
    num_tokens: int = 0
    awaited: bool = True
    refusal: str = ""
    recomputes: bool = False

    @property
    def block_ids(self) -> list[int]:
        return [block_id for blocks in self.blocks for block_id in blocks.block_ids]


@dataclass(frozen=True)
class Wait:
    """A request whose load will begin later; until then its blocks must be kept where they are."""

    request_id: str
    remote: RemoteRequest


@dataclass(frozen=True)
class Hold:
    """A finished prefill whose blocks are kept for its readers for at most ``lease_seconds``.

    Its fence's nonce is replaced when that ends; slot -1 for no fence.  Without a lease there
    is no reader any more: that ends at once.  With a ``stream_row`` the row says so, too; what is
    ``listed`` there first are the blocks that are known at the end alone.
    """

    request_id: str
    lease_seconds: float
    fence_slot: int = -1
    fence_nonce: int = 0
    stream_row: int = -1
    listed: Listed = ()


@dataclass(frozen=True)
class Release:
    """A finished prefill without a reader."""

    request_id: str


@dataclass(frozen=True)
class Chunk:
    """The part of a streamed prompt that a step computes.

    Attributes:
        begins: the prompt gets its row with this step.
    """

    row: int
    nonce: int
    listed: Listed
    num_tokens: int
    begins: bool = False


@dataclass(frozen=True)
class Restart:
    """A prompt that is read meanwhile was preempted: its blocks are free, before the step's kernels
    are launched.  Its row goes on under the nonce that follows in its fence's slot."""

    row: int
    slot: int
    nonce: int


class FailedLoad(NamedTuple):
    """One of ``recorder.FAILURE_REASONS``, and how many of the prompt's first tokens are here all
    the same."""

    reason: str
    num_read: int = 0


@dataclass
class Outcomes:
    """Request ids whose transfers ended on a worker since the last call.

    Attributes:
        failed: those of the received ones.
        expired: those of the sent ones whose leases have run out.
        late: loads past their deadline that are still under way.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, FailedLoad] = field(default_factory=dict[str, FailedLoad])
    expired: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)


class CompletionQueue:
    """Collects outcomes until they are taken; safe for threads.

    Attributes: ``on_first``: called when there is something to take and there was nothing before;
        where it raises, the outcome is taken at the next look.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._outcomes = Outcomes()
        self._log = RateLimitedLog()

    def take(self) -> Outcomes:
        with self._lock:
            taken, self._outcomes = self._outcomes, Outcomes()
        return taken

    def note(self, request_id: str, *kinds: str, failure: FailedLoad | None = None) -> None:
        with self._lock:
            is_first = self._outcomes == Outcomes()
            if failure is not None:
                self._outcomes.failed[request_id] = failure
            for kind in kinds:
                getattr(self._outcomes, kind).add(request_id)
        if not is_first:
            return
        try:
            self.on_first()
        except Exception as error:  # noqa: BLE001 who reports an outcome has to go on after it
            self._log.warning(
                "ring", f"failed to wake the engine for a finished transfer: {error!r}"
            )
