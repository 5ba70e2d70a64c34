"""One gathered read: asks for its parts, and moves each from the peer's slot to where it belongs.

A part counts when a look at the slots' words, begun after it was read, still finds it in its slot.
Whatever goes wrong, or does not come in time, the parts that are missing are read in pieces.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

import numpy as np

from vllm_commext.nixl.gathered.compression import Stepwise, decompress
from vllm_commext.nixl.gathered.exponents import max_level, num_blocks, packed_bytes
from vllm_commext.nixl.gathered.reader import GatheredReader, Words
from vllm_commext.nixl.gathered.slots import (
    MAX_TICKET,
    PART_BITS,
    begins_of,
    cut,
    split_level,
    word_of,
)
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.mapped.gather import MAX_PIECES
from vllm_commext.nixl.transport.posting import Posting, UnderWay
from vllm_commext.nixl.wire import messages as wire

PATIENCE_SECONDS, LONG_PATIENCE_SECONDS = 0.1, 2.0
"""Without any part that moves on, the rest is read in pieces; parts that are to be compressed take
longer, and so do the pieces."""
MAX_READING = 2
"""Compressed parts that are read at a time: of more, all would arrive late, and then have to be
unpacked one by one."""
SAY_SECONDS = 0.25
"""A peer hears of a read that goes on as often, however long a slot takes."""
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


class _Phase(IntEnum):
    """Of a part: waits to be packed, is packed, its slot is read, it is to be proven that the slot
    had it all the while, it is to be unpacked, is unpacked, is here."""

    WAITING = auto()
    PACKED = auto()
    READING = auto()
    PROVING = auto()
    PROVEN = auto()
    UNPACKING = auto()
    HERE = auto()


@dataclass(eq=False)
class _Part:
    """A part of a read.

    Attributes:
        word: what stands for it.
        pieces: which of the read's.
        num_bytes: of its pieces in a slot.
        level: how they are compressed there, 0 where they are not.
        theirs: the peer's slot that it is in, -1 before that is known.
        own: this worker's slot, -1 while it has none.
        posting: the read of the slot, or its unpacking.
    """

    word: int
    pieces: slice
    num_bytes: int
    phase: _Phase = _Phase.WAITING
    level: int = 0
    theirs: int = -1
    own: int = -1
    posting: Posting | Stepwise | None = None

    @property
    def wire_bytes(self) -> int:
        """That are read of the slot."""
        if not self.level:
            return self.num_bytes
        return packed_bytes(num_blocks(self.num_bytes), self.level)


class GatheredRead:
    """One read under way, see ``UnderWay``; its parts go on side by side."""

    def __init__(self, reader: GatheredReader, pairs: Pairs, claim: Claim) -> None:
        self._reader = reader
        self._pairs = pairs
        self._lengths = reader.local.lengths_of(pairs.local)
        self._begins = begins_of(self._lengths)
        sizes, self._compresses = reader.part_sizes(pairs), reader.compresses(pairs)
        self._ticket = secrets.randbelow(MAX_TICKET - 1) + 1
        self._parts = [
            _Part(word_of(self._ticket, number), pieces, self._size(pieces))
            for number, pieces in enumerate(cut(self._begins, sizes, MAX_PIECES))
        ]
        self._words: Words | None = None
        self._proving: list[_Part] = []
        self._failure = ""
        self._rest: UnderWay | None = None
        self.num_merged = self.num_gathered = self.num_saved = 0
        for message in self._asks(claim):
            reader.tell(message)
        self._moved = self._said = time.monotonic()

    def _size(self, pieces: slice) -> int:
        return int(self._begins[pieces.stop] - self._begins[pieces.start])

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
                compressed=self._compresses,
                first=first,
                parts=contents[first:stop],
                **claim._asdict(),
            )
            first = stop

    @property
    def num_open(self) -> int:
        """See ``UnderWay``; a part counts as many times as there are phases before it."""
        if self._rest is not None:
            return self._rest.num_open + (self._words is not None)
        return sum(_Phase.HERE - part.phase for part in self._parts) + (self._words is not None)

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
        if time.monotonic() - self._said >= SAY_SECONDS and not self._failure:
            self._say([], ends=False)
        for step in (self._read_slots, self._unpack):  # as the peer, and the way here, are idle
            if not self._failure:
                step()
        if self._failure and not any(part.posting is not None for part in self._parts):
            self._read_rest()

    def _open(self) -> list[_Part]:
        return [part for part in self._parts if part.phase is not _Phase.HERE]

    def _look_at(self, part: _Part, posting: Posting | Stepwise) -> None:
        """Go on with a part whose slot is read, or which is unpacked."""
        error = posting.look()
        if error is None:
            return
        part.posting = None
        if error:
            self._fail(error)
        elif part.phase is _Phase.UNPACKING:
            self.num_gathered += int(self._lengths[part.pieces].sum())
            self.num_saved += part.num_bytes - part.wire_bytes
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
        """See what is in the peer's slots, as long as anything is awaited from it."""
        try:
            is_old = self._words is not None and self._words.is_open
            if self._see_words() and is_old:
                self._see_words()  # what has ended since that look was begun
            words, is_needed = self._words, any(part.phase < _Phase.PROVEN for part in self._parts)
            if words is not None and not words.is_open and (self._failure or not is_needed):
                self._words = None
                words.close()
        except Exception as error:  # noqa: BLE001 NIXL raises many types
            self._fail(str(error) or "its words cannot be read")

    def _awaits(self) -> bool:
        """Whether a look would be of use."""
        phases = (_Phase.WAITING, _Phase.PROVING)
        return not self._failure and any(part.phase in phases for part in self._parts)

    def _see_words(self) -> bool:
        """Begin a look unless one is under way, and judge by what it has found; False where nothing
        is known yet."""
        self._words = self._words or (self._reader.look() if self._awaits() else None)
        if self._words is None:
            return False  # others look; later
        if not self._words.is_open:
            if not self._awaits():
                return False
            self._proving = [part for part in self._parts if part.phase is _Phase.PROVING]
            self._words.begin()
        words = self._words.take()
        if words is not None and not self._failure:
            self._judge(words, self._words.begun)
        return words is not None

    def _judge(self, words: list[int], begun: float) -> None:
        """What a look has found: parts that have been packed, and parts that were read and are
        still there."""
        slots = {word: (slot, level) for slot, (word, level) in enumerate(map(split_level, words))}
        for part in self._parts:
            if part.phase is _Phase.WAITING and part.word in slots:
                part.theirs, part.level = slots[part.word]
                if part.level > self._max_level(part):
                    self._fail(f"a part of {part.num_bytes} bytes has level {part.level}")
                    return
                self._move(part, _Phase.PACKED)
        if any(slots.get(part.word) != (part.theirs, part.level) for part in self._proving):
            self._fail("a slot was used again before it was read")
            return
        for part in self._proving:
            self._move(part, _Phase.PROVEN)
        if self._proving:
            taken = [part.word & (1 << PART_BITS) - 1 for part in self._proving]
            self._say(taken, ends=all(part.phase >= _Phase.PROVEN for part in self._parts))
            return
        patience = LONG_PATIENCE_SECONDS if self._compresses else PATIENCE_SECONDS
        if begun - self._moved >= patience and self._waits_in_vain():
            self._fail("nothing came")

    def _max_level(self, part: _Part) -> int:
        return max_level(num_blocks(part.num_bytes)) if self._compresses else 0

    def _waits_in_vain(self) -> bool:
        """Whether nothing is under way but what the peer is to pack.  What this thread did else for
        long, or a look that took long, says nothing of the peer: what counts is that a look that
        was begun after all that has found nothing."""
        return all(part.phase in (_Phase.WAITING, _Phase.HERE) for part in self._parts)

    def _say(self, taken: list[int], *, ends: bool) -> None:
        self._said = time.monotonic()
        try:
            self._reader.tell(wire.GatherTaken(ticket=self._ticket, parts=taken, ends=ends))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer forgets in time
            self._fail(str(error))

    @property
    def _num_reading(self) -> int:
        return sum(part.phase is _Phase.READING for part in self._parts)

    def _read_slots(self) -> None:
        """Read the slots that have been packed, as far as there are slots here."""
        for part in self._parts:
            if part.phase is not _Phase.PACKED:
                continue
            if self._compresses and self._num_reading >= MAX_READING:
                return
            own = self._reader.incoming.take()
            if own is None:
                return
            part.own = own
            try:
                read = self._reader.make_read(part.theirs, own, part.wire_bytes)
                part.posting = Posting(self._reader.agent, [read])
            except Exception as error:  # noqa: BLE001 NIXL raises many types
                self._give_back(part)
                self._fail(str(error))
                return
            self._move(part, _Phase.READING)

    def _unpack(self) -> None:
        """Unpack what is proven."""
        reader = self._reader
        for part in self._parts:
            if part.phase is not _Phase.PROVEN:
                continue
            pieces, place = part.pieces, reader.incoming.place
            begins = self._begins[pieces.start : pieces.stop + 1] - self._begins[pieces.start]
            pieces_here = reader.local.at(self._pairs.local[pieces])
            try:
                if part.level:
                    slot, gathering = reader.gathering.slot(place, part.own), reader.gathering
                    steps = decompress(gathering, slot, part.level, begins, *pieces_here)
                    part.posting = Stepwise(steps)
                else:
                    sources = place.slot(part.own) + begins[:-1]
                    part.posting = reader.gathering.copy(sources, *pieces_here)
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
        chosen = np.concatenate(missing)
        num_bytes = int(self._lengths[chosen].sum())
        rest = Pairs(self._pairs.local[chosen], self._pairs.remote[chosen], num_bytes)
        try:
            self._rest = self._reader.pieces.post(rest)
        except Exception as error:  # noqa: BLE001 NIXL raises many types
            self._rest = _Failed(str(error) or "cannot be posted")


class _Failed:
    """A read that could not be begun, see ``UnderWay``."""

    num_merged = num_gathered = num_saved = num_open = 0

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
