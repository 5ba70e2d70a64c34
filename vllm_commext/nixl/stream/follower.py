"""The decode worker's side of chunk streaming: looks how far each prompt is, and says what to read
next.

Looks read a peer's row into memory of their own, never into blocks: a shard with nothing but a look
under way can end at once. The chunks themselves are ordinary reads, each with its fence behind it;
here is only decided which comes next, and what an end of one means. Nothing that a row says is
relied on: what was read counts when the fence, read after it, still has the nonce."""

import time

import numpy as np

from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.decode.transfers import Failure, ShardRead, Use
from vllm_commext.nixl.geometry.layout import Int32Array
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.stream.cursor import LONGEST_SECONDS, Cursor, Look, Wanted, cursor_of
from vllm_commext.nixl.stream.progress import ENDED, MAX_PIECES, Header, header_of, pieces
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.wire.description import STREAM_HEADERS, STREAM_PIECES

RETRY_SECONDS = 0.005  # from a refused chunk to the next look
MAX_RESTARTS = 2  # restarts of one load because its prompt was preempted
_ENDED = (
    "the prefill engine has freed the blocks: the prefill was aborted, or its lease has ended "
    "before all was read"
)


class Follower:
    """Shards of one worker that are read while their prompts are computed.  Owned by one thread."""

    def __init__(self, agent: NixlAgent, limit_seconds: float) -> None:
        self._agent = agent
        self._limit_seconds = limit_seconds
        self._cursors: list[Cursor] = []
        self._looks: list[Look] = []
        self.num_moves = 0

    def __len__(self) -> int:
        return len(self._cursors)

    @property
    def num_looks(self) -> int:
        return len(self._looks)

    def seconds_to_look(self) -> float:
        now = time.perf_counter()
        times = (one.next_look - now for one in self._cursors if not one.is_reading)
        return max(min(times, default=LONGEST_SECONDS), 0.0)

    def begin(self, shard: ShardRead, link: Link) -> None:
        """Read a shard, from where it was before a new connection; raises ProtocolError."""
        new = cursor_of(shard, link)
        cursor = shard.cursor = shard.cursor or new
        cursor.link = new.link
        self._cursors.append(cursor)

    def withdraw(self, use: Use) -> list[ShardRead]:
        found = [one for one in self._cursors if one.shard.use is use and not one.is_reading]
        for cursor in found:
            self._leave(cursor)
        return [cursor.shard for cursor in found]

    def poll_left(self) -> None:
        for look in list(self._looks):
            if not look.is_wanted:
                self._advance(look)

    def end_all(self) -> None:
        for cursor in list(self._cursors):
            self._leave(cursor)

    def due(self) -> list[Cursor]:
        now = time.perf_counter()
        return [one for one in self._cursors if not one.is_reading and self._is_due(one, now)]

    @staticmethod
    def _is_due(cursor: Cursor, now: float) -> bool:
        return cursor.look is not None or cursor.has_more or now >= cursor.next_look

    def advance(self, cursor: Cursor) -> Pairs | None:
        """The next chunk of a shard that is due, None where there is none yet.

        Raises:
            CommextError: the shard has failed.
            Exception: what NIXL raises where the peer cannot be reached.
        """
        self._check_time(cursor)
        if cursor.look is not None or not cursor.is_known:
            self._look_on(cursor)
        if cursor.pairs is None and cursor.look is None and cursor.is_known:
            cursor.pairs = cursor.next_pairs()
        return cursor.pairs

    def note_posted(self, cursor: Cursor) -> None:
        cursor.is_reading, cursor.has_read, cursor.pairs = True, True, None

    def leave(self, shard: ShardRead) -> None:
        for cursor in [one for one in self._cursors if one.shard is shard]:
            self._leave(cursor)

    def note_end(self, shard: ShardRead, failure: Failure | None) -> bool:
        cursor = shard.cursor
        assert cursor is not None  # only reads of streams are told here
        cursor.is_reading = False
        goes_on = shard.use.failure is None and self._goes_on(cursor, failure)
        if not goes_on:
            self._leave(cursor)
        return goes_on

    def _goes_on(self, cursor: Cursor, failure: Failure | None) -> bool:
        now = time.perf_counter()
        cursor.next_look = 0.0
        if failure is not None:
            # The row may tell of a new beginning; what was read counts for nothing.
            cursor.num_refused += 1
            cursor.target, cursor.is_whole = cursor.done, False
            cursor.next_look = now + RETRY_SECONDS
            return failure.reason == "expired" and cursor.num_refused <= MAX_RESTARTS
        cursor.note_read()
        return not cursor.is_over

    def _leave(self, cursor: Cursor) -> None:
        self._cursors.remove(cursor)
        if cursor.look is not None:
            cursor.look.is_wanted = False
            cursor.look = None
        cursor.link.drop()

    def _check_time(self, cursor: Cursor) -> None:
        if cursor.link.closed:
            raise _UnreachableError("the prefill engine has gone or restarted")
        moved = cursor.moved
        if cursor.look is not None or cursor.has_more:
            moved = max(moved, cursor.link.progressed)
        if time.perf_counter() - moved >= self._limit_seconds:
            raise CommextTimeoutError(
                f"the prefill engine has computed nothing more of the prompt for "
                f"{self._limit_seconds:g} s"
            )

    def _look_on(self, cursor: Cursor) -> None:
        if cursor.look is None:
            cursor.look = self._post_look(cursor)
            if cursor.look is None:
                return
        look = cursor.look
        try:
            if not self._advance(look):
                return
            self.num_moves += 1
            tables, first = look.link.tables, look.cell * MAX_PIECES
            self._judge(cursor, header_of(tables[STREAM_HEADERS].own.cells[look.cell]))
            end = first + sum(one.num_pieces for one in look.wanted)
            cursor.take(look.wanted, tables[STREAM_PIECES].own.cells[first:end].flatten())
        except Exception:
            self._end_look(cursor)
            raise
        self._end_look(cursor)

    def _post_look(self, cursor: Cursor) -> Look | None:
        link, row, wanted = cursor.link, cursor.shard.remote.stream_row, cursor.wanted()
        headers, ids = link.tables[STREAM_HEADERS], link.tables[STREAM_PIECES]
        cells = headers.own.take()
        if cells is None:
            return None
        (cell,) = cells
        try:
            reads = [headers.make_read(cells, [row])]
            if wanted:
                places = np.concatenate([self._places(cursor, one) for one in wanted])
                first = cell * MAX_PIECES
                reads.append(ids.make_read(range(first, first + len(places)), places))
            posting = Posting(self._agent, reads)
        except Exception:
            headers.own.give_back(cells)
            raise
        look = Look(link.hold(), cell, posting, wanted)
        self._looks.append(look)
        self.num_moves += 1
        return look

    @staticmethod
    def _places(cursor: Cursor, wanted: Wanted) -> Int32Array:
        row, first = cursor.shard.remote.stream_row, cursor.regions[wanted.group].first
        per_row = cursor.link.pieces_per_row
        return pieces(row, per_row, first + wanted.first, wanted.num_pieces)

    def _judge(self, cursor: Cursor, header: Header) -> None:
        now = time.perf_counter()
        remote, candidate = cursor.shard.remote, cursor.candidate
        cursor.candidate = ENDED
        cursor.next_look = now + cursor.schedule.wait(cursor.num_tokens, now)
        if header.tag != remote.stream_tag:
            if cursor.has_begun:
                raise _ExpiredError(_ENDED)
            return  # its workers may be busy with the step before
        cursor.has_begun = True
        if header.nonce == ENDED:
            raise _ExpiredError(_ENDED)
        if header.nonce == cursor.nonce:
            cursor.note_progress(header)
            cursor.next_look = now + cursor.schedule.wait(cursor.num_tokens, now)
        elif header.nonce != candidate:
            cursor.candidate = header.nonce  # counts when it is there at the next look, too
        elif cursor.num_restarts == MAX_RESTARTS:
            raise _ExpiredError(f"the prefill was preempted more than {MAX_RESTARTS} times")
        else:
            cursor.start_again(header.nonce)
            cursor.moved = now

    def _advance(self, look: Look) -> bool:
        """True if the last posting has arrived; raises ProtocolError."""
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
        look.link.tables[STREAM_HEADERS].own.give_back([look.cell])
        look.link.drop()


class _ExpiredError(ProtocolError):
    """The row is the request's no more, or its prompt begins again too often."""


class _UnreachableError(ProtocolError):
    """A look has failed."""


def failure_of_stream(error: Exception) -> Failure:
    if isinstance(error, _ExpiredError):
        return Failure("expired", error)
    if isinstance(error, CommextTimeoutError):
        return Failure("timeout", error)
    if isinstance(error, ProtocolError) and not isinstance(error, _UnreachableError):
        return Failure("request", error)
    return Failure("transfer", error)
