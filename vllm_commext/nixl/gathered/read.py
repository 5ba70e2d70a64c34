"""One gathered read: asks for its parts, and moves each from the peer's slot to where it belongs.

A part counts when a look at the slots' words, begun after it was read, still finds it in its slot.
Whatever goes wrong, or does not come in time, the parts that are missing are read in pieces.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from vllm_commext.nixl.gathered.reader import GatheredReader
from vllm_commext.nixl.gathered.slots import (
    MAX_TICKET,
    PART_BITS,
    Int64Array,
    aligned,
    cut,
    offsets_of,
    word_of,
)
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.mapped.gather import MAX_PIECES
from vllm_commext.nixl.transport.posting import Posting, UnderWay
from vllm_commext.nixl.wire import messages as wire

PATIENCE_SECONDS = 0.1
"""Without any part that moves on, the rest is read in pieces."""
MAX_ASK_BYTES = 48 << 10
"""Of numbers of descriptors in one message."""
_log = RateLimitedLog()


class Claim(NamedTuple):
    """By what a prefill worker knows a request whose blocks it is to pack: its id, its fence, and
    its row where it is read while it is computed, else -1."""

    request_id: str
    fence_slot: int
    nonce: int
    row: int


class _Phase(Enum):
    """Of a part: waits to be packed, its slot is read, it is to be proven that the slot had it all
    the while, it is unpacked, it is here."""

    WAITING = auto()
    READING = auto()
    PROVING = auto()
    UNPACKING = auto()
    HERE = auto()


@dataclass(eq=False)
class _Part:
    """A part of a read.

    Attributes:
        word: what stands for it.
        pieces: which of the read's.
        lengths: of the pieces.
        targets: where they belong.
        theirs: the peer's slot that it is in, -1 before that is known.
        own: this worker's slot, -1 while it has none.
        posting: the read of the slot, or its unpacking.
    """

    word: int
    pieces: slice
    lengths: Int64Array
    targets: Int64Array
    phase: _Phase = _Phase.WAITING
    theirs: int = -1
    own: int = -1
    posting: Posting | None = None


class GatheredRead:
    """One read under way, see ``UnderWay``; its parts go on side by side."""

    def __init__(self, reader: GatheredReader, pairs: Pairs, claim: Claim) -> None:
        self._reader = reader
        self._pairs = pairs
        targets, lengths = reader.local.at(pairs.local)
        self._ticket = secrets.randbelow(MAX_TICKET - 1) + 1
        self._parts = [
            _Part(word_of(self._ticket, number), pieces, lengths[pieces], targets[pieces])
            for number, pieces in enumerate(cut(lengths, reader.part_bytes, MAX_PIECES))
        ]
        self._words: Posting | None = None
        self._cells: list[int] = []
        self._proving: list[_Part] = []
        self._failure = ""
        self._rest: UnderWay | None = None
        self._moved = time.monotonic()
        self.num_merged = self.num_gathered = 0
        for message in self._asks(claim):
            reader.tell(message)

    def _asks(self, claim: Claim) -> Iterator[wire.GatherAsk]:
        contents = [self._pairs.remote[part.pieces].astype("<i4").tobytes() for part in self._parts]
        ends = np.cumsum([len(one) for one in contents])
        first = 0
        while first < len(contents):
            room = MAX_ASK_BYTES + (int(ends[first - 1]) if first else 0)
            stop = max(int(np.searchsorted(ends, room, side="right")), first + 1)
            yield wire.GatherAsk(
                ticket=self._ticket,
                plan=self._reader.plan_digest,
                first=first,
                parts=contents[first:stop],
                **claim._asdict(),
            )
            first = stop

    @property
    def num_open(self) -> int:
        """See ``UnderWay``."""
        missing = sum(part.phase is not _Phase.HERE for part in self._parts)
        rest = missing if self._rest is None else self._rest.num_open
        return rest + (self._words is not None)

    def look(self) -> str | None:
        """See ``UnderWay``."""
        if self._rest is None:
            self._go_on()
        elif self._words is not None:
            self._look_at_words()
        error = "" if self._rest is None else self._rest.look()
        if self.num_open or error is None:
            return None
        if self._rest is not None:
            self.num_merged += self._rest.num_merged
        return error

    def _go_on(self) -> None:
        for part in self._parts:
            if part.posting is not None:
                self._look_at(part, part.posting)
        self._look_at_words()
        if not self._failure:
            self._read_slots()
        missing = self._open()
        is_moving = any(part.posting is not None or part.theirs >= 0 for part in missing)
        is_late = time.monotonic() - self._moved >= PATIENCE_SECONDS
        if missing and not is_moving and is_late:
            self._fail("nothing came")
        if self._failure and not any(part.posting is not None for part in self._parts):
            self._read_rest()

    def _open(self) -> list[_Part]:
        return [part for part in self._parts if part.phase is not _Phase.HERE]

    def _look_at(self, part: _Part, posting: Posting) -> None:
        """Go on with a part whose slot is read, or which is unpacked."""
        error = posting.look()
        if error is None:
            return
        part.posting = None
        if error:
            self._fail(error)
        elif part.phase is _Phase.UNPACKING:
            self.num_gathered += int(part.lengths.sum())
            self._move(part, _Phase.HERE)
        else:
            self.num_merged += posting.num_merged
            self._move(part, _Phase.PROVING)
        if part.phase is _Phase.HERE or self._failure:
            self._give_back(part)

    def _move(self, part: _Part, phase: _Phase) -> None:
        part.phase, self._moved = phase, time.monotonic()

    def _give_back(self, part: _Part) -> None:
        """It needs its slot here no more."""
        if part.own >= 0:
            self._reader.incoming.give_back(part.own)
        part.own = -1

    def _look_at_words(self) -> None:
        """See what is in the peer's slots, and begin to look anew, as long as anything is awaited
        from it."""
        for _ in range(2):  # within a host a look has ended by the time that it is begun
            if self._words is not None:
                error = self._words.look()
                if error is None:
                    return
                words = self._reader.peer.words.own.cells[self._cells[0]].tolist()
                self._end_look()
                if error:
                    self._fail(error)
                elif not self._failure:
                    self._judge(words)
            if self._failure or not any(
                part.theirs < 0 or part.phase is _Phase.PROVING for part in self._open()
            ):
                return
            self._begin_look()

    def _begin_look(self) -> None:
        table = self._reader.peer.words
        self._cells = table.own.take() or []
        if not self._cells:
            return  # others look; later
        self._proving = [part for part in self._parts if part.phase is _Phase.PROVING]
        try:
            self._words = Posting(self._reader.agent, [table.make_read(self._cells, [0])])
        except Exception as error:  # noqa: BLE001 NIXL raises many types
            self._end_look()
            self._fail(str(error))

    def _end_look(self) -> None:
        self._words = None
        self._reader.peer.words.own.give_back(self._cells)
        self._cells = []

    def _judge(self, words: list[int]) -> None:
        """What a look has found: parts that have been packed, and parts that were read and are
        still there."""
        slots = {word: number for number, word in enumerate(words)}
        for part in self._parts:
            if part.phase is _Phase.WAITING and part.theirs < 0:
                part.theirs = slots.get(part.word, -1)
        kept = [part for part in self._proving if slots.get(part.word, -1) == part.theirs]
        if len(kept) < len(self._proving):
            self._fail("a slot was used again before it was read")
            return
        for part in kept:
            self._unpack(part)
        if kept and not self._failure:
            taken = [part.word & (1 << PART_BITS) - 1 for part in kept]
            phases = (_Phase.UNPACKING, _Phase.HERE)
            self._say(taken, ends=all(part.phase in phases for part in self._parts))

    def _say(self, taken: list[int], *, ends: bool) -> None:
        try:
            self._reader.tell(wire.GatherTaken(ticket=self._ticket, parts=taken, ends=ends))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer forgets in time
            self._fail(str(error))

    def _read_slots(self) -> None:
        """Read the slots that have been packed, as far as there are slots here."""
        for part in self._parts:
            if part.phase is not _Phase.WAITING or part.theirs < 0:
                continue
            own = self._reader.incoming.take()
            if own is None:
                return
            part.own = own
            num_bytes = int(aligned(part.lengths).sum())
            try:
                read = self._reader.make_read(part.theirs, own, num_bytes)
                part.posting = Posting(self._reader.agent, [read])
            except Exception as error:  # noqa: BLE001 NIXL raises many types
                self._give_back(part)
                self._fail(str(error))
                return
            self._move(part, _Phase.READING)

    def _unpack(self, part: _Part) -> None:
        if self._failure:
            return
        sources = self._reader.incoming.place.slot(part.own) + offsets_of(part.lengths)
        places = np.stack((sources, part.targets), axis=1)
        try:
            part.posting = self._reader.gathering.copy(places, part.lengths)
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            self._fail(str(error))
            return
        self._move(part, _Phase.UNPACKING)

    def _fail(self, reason: str) -> None:
        """The rest is to be read in pieces, when nothing else is under way."""
        if self._failure:
            return
        self._failure = reason
        _log.warning(
            "gathered",
            f"a gathered read from {self._reader.peer.engine_id!r} goes on in pieces: {reason}",
        )
        for part in self._parts:
            if part.posting is None:
                self._give_back(part)
        self._say([], ends=True)
        if not any(part.theirs >= 0 for part in self._parts):
            self._reader.avoid()

    def _read_rest(self) -> None:
        missing = [np.arange(part.pieces.start, part.pieces.stop) for part in self._open()]
        if not missing:
            return
        chosen, num_bytes = np.concatenate(missing), sum(int(p.lengths.sum()) for p in self._open())
        rest = Pairs(self._pairs.local[chosen], self._pairs.remote[chosen], num_bytes)
        try:
            self._rest = self._reader.pieces.post(rest)
        except Exception as error:  # noqa: BLE001 NIXL raises many types
            self._rest = _Failed(str(error) or "cannot be posted")


class _Failed:
    """A read that could not be begun, see ``UnderWay``."""

    num_merged = num_gathered = num_open = 0

    def __init__(self, error: str) -> None:
        self._error = error

    def look(self) -> str:
        return self._error


class ClaimedReader:
    """Reads blocks of one request; see ``Reader``."""

    name = "a gathered read"
    is_mapped = False

    def __init__(self, reader: GatheredReader, claim: Claim) -> None:
        self._reader = reader
        self._claim = claim

    def post(self, pairs: Pairs) -> UnderWay:
        """Begin a read; see ``Reader``."""
        self._reader.introduce()
        return GatheredRead(self._reader, pairs, self._claim)
