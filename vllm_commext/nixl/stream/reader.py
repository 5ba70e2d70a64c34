"""The decode worker's side of chunk streaming: looks how far each prompt is, and says what to read
next.

Looks read a peer's row into memory of their own, never into blocks: a part with nothing but a look
under way can end at once.  The chunks themselves are ordinary reads, each with its fence behind it;
here is only decided which comes next, and what an end of one means.  Nothing that a row says is
relied on: what was read counts when the fence, read after it, still has the nonce.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.decode.transfers import Failure, Part, Use
from vllm_commext.nixl.geometry.layout import FULL
from vllm_commext.nixl.geometry.plan import Blocks, Pairs, num_blocks_for
from vllm_commext.nixl.stream.progress import ENDED, Header, ProgressTable
from vllm_commext.nixl.stream.rows import PIECE_IDS, next_chunk, pieces
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.pauses import pause
from vllm_commext.nixl.transport.posting import Posting

LOOK_SECONDS = 0.005
"""Between two looks at one row."""
MAX_RESTARTS = 2
"""Of one load, because its prompt was preempted."""


@dataclass(eq=False)
class Look:
    """A row's header, then block ids, on their way into a cell."""

    link: Link
    cell: int
    posting: Posting
    posted: float
    num_pieces: int = 0
    is_wanted: bool = True


@dataclass(eq=False)
class Cursor:
    """How far a part has come; times in seconds of ``time.perf_counter``.

    Attributes:
        part: what is loaded.
        link: where from; held while the part is here.
        nonce: what the fence must have.
        step: tokens in which chunks are counted.
        first: tokens that this engine has already.
        done: tokens that are here.
        target: the same after the chunk that is being read or is to be.
        block_ids: the peer's blocks as far as they are known.
        look: under way, None between two.
        next_look: when the row is looked at again.
        pairs: what the next chunk copies, once it is known.
        is_reading: a chunk is being read.
        candidate: another nonce that the last look has found.
        num_restarts: times that the prompt has begun again.
        num_refused: fences in a row that did not have the nonce.
        has_begun: the row was seen to be the request's.
        moved: when something was last new.
    """

    part: Part
    link: Link
    nonce: int
    step: int
    first: int
    done: int
    target: int = 0
    block_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    look: Look | None = None
    next_look: float = 0.0
    pairs: Pairs | None = None
    is_reading: bool = False
    candidate: int = ENDED
    num_restarts: int = 0
    num_refused: int = 0
    has_begun: bool = False
    moved: float = field(default_factory=time.perf_counter)

    @property
    def block_size(self) -> int:
        """Tokens of a block of the peer's."""
        return self.link.plan.remote.groups[0].block_size

    def start_again(self, nonce: int) -> None:
        """The prompt goes on from its first token, under another nonce."""
        self.nonce, self.done, self.target = nonce, self.first, self.first
        self.block_ids = np.empty(0, dtype=np.uint32)
        self.num_restarts += 1
        self.num_refused, self.candidate = 0, ENDED


def cursor_of(part: Part, link: Link) -> Cursor:
    """A part that begins to be read while its prompt is computed.

    Raises:
        ProtocolError: the peer streams nothing, its row or fence is none, or one side's blocks do
            not all stay until the prompt is computed.
    """
    remote, plan = part.remote, link.plan
    if link.stream_headers is None or link.fence_list is None:
        raise ProtocolError(
            "the request is to be read while it is computed, and one of the engines streams "
            "nothing: set stream_chunks in kv_connector_extra_config of both"
        )
    if remote.stream_row >= link.num_stream_rows or remote.fence_slot >= link.num_fence_slots:
        raise ProtocolError(
            f"expected a row below {link.num_stream_rows} and a fence below "
            f"{link.num_fence_slots}, got {remote.stream_row} and {remote.fence_slot}"
        )
    groups = (*plan.local.groups, *plan.remote.groups)
    if len(groups) != 2 or any(group.kind != FULL for group in groups):
        raise ProtocolError("expected one group of blocks that all stay on both sides")
    own, theirs = (group.block_size for group in groups)
    num_blocks = num_blocks_for(remote.num_tokens, theirs)
    if num_blocks > link.pieces_per_row * PIECE_IDS:
        raise ProtocolError(f"the prompt's {num_blocks} blocks do not fit the peer's rows")
    first = part.load.blocks[0].first * own
    return Cursor(part, link.hold(), remote.fence_nonce, math.lcm(own, theirs), first, first, first)


def chunk_of(cursor: Cursor) -> Pairs:
    """What the next chunk copies.

    Raises:
        ProtocolError: a block id of the peer's is none of its blocks.
    """
    load, link = cursor.part.load, cursor.link
    blocks, size = load.blocks[0], link.plan.local.groups[0].block_size
    begin, end = cursor.done // size, num_blocks_for(cursor.target, size)
    own = blocks.block_ids[begin - blocks.first : end - blocks.first]
    return link.plan.pairs(
        [Blocks(begin, own)],
        [cursor.block_ids[: num_blocks_for(cursor.target, cursor.block_size)].tolist()],
        num_tokens=cursor.target,
        num_remote_tokens=cursor.target,
        pause=pause,
    )


class StreamReader:
    """Parts of one worker that are read while their prompts are computed.  Owned by one thread.

    Args:
        agent: the agent with the worker's memory registered.
        limit_seconds: a part fails when nothing is new for as long.
    """

    def __init__(self, agent: NixlAgent, limit_seconds: float) -> None:
        self._agent = agent
        self._limit_seconds = limit_seconds
        self._cursors: list[Cursor] = []
        self._looks: list[Look] = []

    def __len__(self) -> int:
        """Parts that are read."""
        return len(self._cursors)

    @property
    def num_looks(self) -> int:
        """Looks under way."""
        return len(self._looks)

    def begin(self, part: Part, link: Link) -> None:
        """Read a part, from where it was where its connection was made anew.

        Raises:
            ProtocolError: it cannot be read in this way.
        """
        new = cursor_of(part, link)
        known = part.stream
        if known is None:
            part.stream = new
        else:
            known.link = new.link
        self._cursors.append(part.stream or new)

    def withdraw(self, use: Use) -> list[Part]:
        """Take back the parts of a use of which no chunk is being read."""
        found = [one for one in self._cursors if one.part.use is use and not one.is_reading]
        for cursor in found:
            self._leave(cursor)
        return [cursor.part for cursor in found]

    def poll_left(self) -> None:
        """Give back what looks hold that nobody waits for any more."""
        for look in list(self._looks):
            if not look.is_wanted:
                self._advance(look)

    def end_all(self) -> None:
        """Read nothing more."""
        for cursor in list(self._cursors):
            self._leave(cursor)

    def due(self) -> list[Cursor]:
        """The parts that are to be looked at, whose next chunk can be read, or that may have
        failed."""
        now = time.perf_counter()
        return [one for one in self._cursors if not one.is_reading and self._is_due(one, now)]

    @staticmethod
    def _is_due(cursor: Cursor, now: float) -> bool:
        return cursor.look is not None or cursor.target > cursor.done or now >= cursor.next_look

    def advance(self, cursor: Cursor) -> Pairs | None:
        """The next chunk of a part that is due, None where there is none yet.

        Raises:
            CommextError: the part has failed.
            Exception: what NIXL raises where the peer cannot be reached.
        """
        self._check_time(cursor)
        if cursor.target <= cursor.done or cursor.look is not None:
            self._look_on(cursor)
        if cursor.pairs is None and cursor.look is None and cursor.target > cursor.done:
            cursor.pairs = chunk_of(cursor)
        return cursor.pairs

    def note_posted(self, cursor: Cursor) -> None:
        """The next chunk is being read."""
        cursor.is_reading, cursor.pairs = True, None

    def leave(self, part: Part) -> None:
        """A part has failed, or is to be tried over another connection."""
        cursor = part.stream
        if cursor is not None and cursor in self._cursors:
            self._leave(cursor)

    def note_end(self, part: Part, failure: Failure | None) -> bool:
        """A chunk has ended; whether more of the part is to be read."""
        cursor = part.stream
        assert cursor is not None  # only reads of streams are told here
        cursor.is_reading = False
        goes_on = part.use.failure is None and self._goes_on(cursor, failure)
        if not goes_on:
            self._leave(cursor)
        return goes_on

    def _goes_on(self, cursor: Cursor, failure: Failure | None) -> bool:
        now = time.perf_counter()
        cursor.next_look = 0.0
        if failure is not None:
            # The row may tell of a new beginning; what was read counts for nothing.
            cursor.num_refused += 1
            cursor.target = cursor.done
            cursor.next_look = now + LOOK_SECONDS
            return failure.reason == "expired" and cursor.num_refused <= MAX_RESTARTS
        cursor.done, cursor.num_refused, cursor.moved = cursor.target, 0, now
        return cursor.done < cursor.part.load.num_tokens

    def _leave(self, cursor: Cursor) -> None:
        self._cursors.remove(cursor)
        if cursor.look is not None:
            cursor.look.is_wanted = False
            cursor.look = None
        cursor.link.drop()

    def _check_time(self, cursor: Cursor) -> None:
        if cursor.link.lost:
            raise _UnreachableError("the prefill engine has gone or restarted")
        moved = cursor.moved
        if cursor.look is not None or cursor.target > cursor.done:
            moved = max(moved, cursor.link.progressed)
        if time.perf_counter() - moved >= self._limit_seconds:
            raise CommextTimeoutError(
                f"the prefill engine has computed nothing more of the prompt for "
                f"{self._limit_seconds:g} s"
            )

    def _look_on(self, cursor: Cursor) -> None:
        """Go on with a look, or begin one."""
        if cursor.look is None:
            cursor.look = self._post_look(cursor)
            if cursor.look is None:
                return
        look = cursor.look
        try:
            if not self._advance(look):
                return
            if look.num_pieces:
                self._take_ids(cursor, look)
            else:
                self._judge(cursor, self._progress.header_in(look.cell))
                if cursor.target > cursor.done and self._post_ids(cursor, look):
                    return  # looked at again at once, in the next turn
        except Exception:
            self._end_look(cursor)
            raise
        self._end_look(cursor)

    def _post_look(self, cursor: Cursor) -> Look | None:
        cell = self._progress.take_cell()
        if cell is None:
            return None
        link, row = cursor.link, cursor.part.remote.stream_row
        try:
            read = self._agent.make_header_read(link.stream_headers, cell, row)
            posting = Posting(self._agent, [read])
        except Exception:
            self._progress.give_back_cell(cell)
            raise
        look = Look(link.hold(), cell, posting, time.perf_counter())
        self._looks.append(look)
        return look

    def _post_ids(self, cursor: Cursor, look: Look) -> bool:
        """Read the block ids that the next chunk needs; whether any were missing."""
        needed = num_blocks_for(cursor.target, cursor.block_size)
        known = len(cursor.block_ids)
        if known >= needed:
            return False
        link = cursor.link
        wanted = pieces(cursor.part.remote.stream_row, link.pieces_per_row, known, needed)
        read = self._agent.make_pieces_read(link.stream_pieces, look.cell, wanted)
        look.posting = Posting(self._agent, [read])
        look.num_pieces = len(wanted)
        return True

    def _take_ids(self, cursor: Cursor, look: Look) -> None:
        """The ids have arrived; where they are not all that was asked for, the chunk is cut."""
        first = len(cursor.block_ids) // PIECE_IDS * PIECE_IDS
        new = self._progress.ids_in(look.cell, look.num_pieces)
        needed = num_blocks_for(cursor.target, cursor.block_size)
        cursor.block_ids = np.concatenate([cursor.block_ids[:first], new])[:needed]
        num_known = len(cursor.block_ids) * cursor.block_size
        if num_known < cursor.target:
            cursor.target = next_chunk(cursor.done, num_known, cursor.target, cursor.step)

    def _judge(self, cursor: Cursor, header: Header) -> None:
        """What a header says of the request."""
        now = time.perf_counter()
        cursor.next_look = now + LOOK_SECONDS
        remote, candidate = cursor.part.remote, cursor.candidate
        cursor.candidate = ENDED
        if header.tag != remote.stream_tag:
            if cursor.has_begun:
                raise _EndedError
            return  # its workers may be busy with the step before
        cursor.has_begun = True
        if header.nonce == ENDED:
            raise _EndedError
        if header.nonce == cursor.nonce:
            wanted = min(cursor.part.load.num_tokens, remote.num_tokens)
            cursor.target = next_chunk(cursor.done, header.num_tokens, wanted, cursor.step)
        elif header.nonce != candidate:
            cursor.candidate = header.nonce  # counts when it is there at the next look, too
        elif cursor.num_restarts == MAX_RESTARTS:
            raise _PreemptedError
        else:
            cursor.start_again(header.nonce)
            cursor.moved = now

    def _advance(self, look: Look) -> bool:
        """Whether what was posted last has arrived.

        Raises:
            ProtocolError: it will not.
        """
        error = look.posting.look()
        if error is None:
            return False
        if not look.is_wanted:
            self._forget(look)
        if error and look.is_wanted:
            raise _UnreachableError(f"NIXL: {error}")
        return True

    def _end_look(self, cursor: Cursor) -> None:
        look, cursor.look = cursor.look, None
        if look is None:
            return
        if look.posting.num_open:
            look.is_wanted = False  # goes on until it has ended, into a cell of its own
        else:
            self._forget(look)

    def _forget(self, look: Look) -> None:
        self._looks.remove(look)
        self._progress.give_back_cell(look.cell)
        look.link.drop()

    @property
    def _progress(self) -> ProgressTable:
        assert self._agent.streams is not None  # links have lists of headers only with a table
        return self._agent.streams


class _EndedError(ProtocolError):
    """The row is the request's no more."""

    def __init__(self) -> None:
        super().__init__(
            "the prefill engine has freed the blocks: the prefill was aborted, or its lease has "
            "ended before all was read"
        )


class _PreemptedError(ProtocolError):
    """The prompt begins again too often."""

    def __init__(self) -> None:
        super().__init__(f"the prefill was preempted more than {MAX_RESTARTS} times")


class _UnreachableError(ProtocolError):
    """A look has failed."""


def failure_of_stream(error: Exception) -> Failure:
    """Why a part that is read while its prompt is computed has failed."""
    if isinstance(error, (_EndedError, _PreemptedError)):
        return Failure("expired", error)
    if isinstance(error, CommextTimeoutError):
        return Failure("timeout", error)
    if isinstance(error, ProtocolError) and not isinstance(error, _UnreachableError):
        return Failure("request", error)
    return Failure("transfer", error)
