"""One gathered read: asks for its parts, and moves each from the peer's slot to where it belongs.

A part counts when a look at the slots' words, begun after it was read, still finds it in its slot.
Whatever goes wrong, or does not come in time, the parts that are missing are read in pieces.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from vllm_commext.nixl.gathered.staging import copies_of
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.mapped.gather import MAX_PIECES, Batch
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
    """Of a part: waits to be packed, is packed, its slot is read, it is unpacked, is here."""

    WAITING = auto()
    PACKED = auto()
    READING = auto()
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
        batches: its unpacking, the pieces at their distance from where they are read to; empty
            before that is worked out.
        is_proven: whether the peer's slot had it until it was read.
    """

    word: int
    pieces: slice
    num_bytes: int
    phase: _Phase = _Phase.WAITING
    level: int = 0
    theirs: int = -1
    own: int = -1
    posting: Posting | Stepwise = field(init=False)
    batches: Sequence[Batch] = ()
    is_proven: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether its pieces are here, and are those that were asked for."""
        return self.is_proven and self.phase is _Phase.HERE

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
        self._waiting = {part.word: part for part in self._parts}
        self._packed: deque[_Part] = deque()
        self._reading: deque[_Part] = deque()
        self._unpacking: deque[_Part] = deque()
        self._unproven: list[_Part] = []
        self._unprepared = iter(self._parts)
        self._num_steps = len(self._parts) * (_Phase.HERE - _Phase.WAITING + 2)
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
        """See ``UnderWay``; a part counts as many times as there are steps before it."""
        num_steps = self._num_steps if self._rest is None else self._rest.num_open
        return num_steps + (self._words is not None)

    def look(self) -> str | None:
        """See ``UnderWay``."""
        if self._rest is None:
            self._go_on()
        elif self._words is not None:
            self._look_at_words()
        error = "" if self._rest is None else self._rest.look()
        if self.num_open or error is None:
            return None
        self._count()
        return error

    def _count(self) -> None:
        for part in self._parts:
            if part.is_complete:
                self.num_gathered += int(self._lengths[part.pieces].sum())
                self.num_saved += part.num_bytes - part.wire_bytes
        if self._rest is not None:
            self.num_merged += self._rest.num_merged

    @property
    def _is_read(self) -> bool:
        """Whether all slots have been read, if not proven or unpacked."""
        return not (self._waiting or self._packed or self._reading)

    def _go_on(self) -> None:
        """Go on with what has ended, the oldest first; reads are begun before anything is unpacked,
        as the way here would be idle."""
        moved = self._moved
        for part in self._ended(self._unpacking):
            self._give_back(part)
            self._move(part, _Phase.HERE)
        has_read = self._ended(self._reading)
        self.num_merged += sum(part.posting.num_merged for part in has_read)
        self._unproven += has_read
        self._look_at_words()
        if time.monotonic() - self._said >= SAY_SECONDS and not self._failure:
            self._say([], ends=False)
        self._read_slots()
        for part in has_read:
            self._unpack(part)
        if self._moved == moved and (part := next(self._unprepared, None)) is not None:
            self._batches(part)  # while there is time
        if self._failure and not self._reading and not self._unpacking:
            self._read_rest()

    def _ended(self, parts: deque[_Part]) -> list[_Part]:
        """Take those away of which what is posted has ended well."""
        ended: list[_Part] = []
        while parts and (error := parts[0].posting.look()) is not None:
            part = parts.popleft()
            if error:
                self._give_back(part)
                self._fail(error)
            else:
                ended.append(part)
        return ended

    def _move(self, part: _Part, phase: _Phase) -> None:
        self._num_steps -= phase - part.phase
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
            words, is_over = self._words, self._is_read and not self._unproven
            if words is not None and not words.is_open and (self._failure or is_over):
                self._words = None
                words.close()
        except Exception as error:  # noqa: BLE001 NIXL raises many types
            self._fail(str(error) or "its words cannot be read")

    def _awaits(self) -> bool:
        """Whether a look would be of use: the peer may have packed what there is a slot for on both
        sides, or has half of its slots to get back, or the last ones."""
        if self._failure:
            return False
        num_slots, num_read = self._reader.peer.offer.num_slots, len(self._unproven)
        if self._waiting and not self._packed and len(self._reading) + num_read < num_slots:
            return True
        return num_read > 0 and (self._is_read or 2 * num_read >= num_slots)

    def _see_words(self) -> bool:
        """Begin a look unless one is under way, and judge by what it has found; False where nothing
        is known yet."""
        self._words = self._words or (self._reader.look() if self._awaits() else None)
        if self._words is None:
            return False  # others look; later
        if not self._words.is_open:
            if not self._awaits():
                return False
            self._proving = self._unproven[:]
            self._words.begin()
        words = self._words.take()
        if words is not None and not self._failure:
            self._judge(words, self._words.begun)
        return words is not None

    def _judge(self, words: list[int], begun: float) -> None:
        """What a look has found: parts that have been packed, and parts that were read and are
        still there."""
        for slot, (word, level) in enumerate(map(split_level, words)):
            part = self._waiting.pop(word, None)
            if part is None:
                continue
            part.theirs, part.level = slot, level
            self._packed.append(part)
            self._move(part, _Phase.PACKED)
            if level > self._max_level(part):
                self._fail(f"a part of {part.num_bytes} bytes has level {level}")
                return
        if any(
            split_level(words[part.theirs]) != (part.word, part.level) for part in self._proving
        ):
            self._fail("a slot was used again before it was read")
            return
        if self._proving:
            self._take_proven()
            return
        patience = LONG_PATIENCE_SECONDS if self._compresses else PATIENCE_SECONDS
        if begun - self._moved >= patience and self._waits_in_vain():
            self._fail("nothing came")

    def _take_proven(self) -> None:
        """The peer may have the slots of what was looked for."""
        for part in self._proving:
            part.is_proven = True
        self._num_steps -= len(self._proving)
        self._moved = time.monotonic()
        self._unproven = [part for part in self._unproven if not part.is_proven]
        taken = [part.word & (1 << PART_BITS) - 1 for part in self._proving]
        self._say(taken, ends=self._is_read and not self._unproven)

    def _max_level(self, part: _Part) -> int:
        return max_level(num_blocks(part.num_bytes)) if self._compresses else 0

    def _waits_in_vain(self) -> bool:
        """Whether nothing is under way but what the peer is to pack.  What this thread did else for
        long, or a look that took long, says nothing of the peer: what counts is that a look that
        was begun after all that has found nothing."""
        return not (self._packed or self._reading or self._unpacking or self._unproven)

    def _say(self, taken: list[int], *, ends: bool) -> None:
        self._said = time.monotonic()
        try:
            self._reader.tell(wire.GatherTaken(ticket=self._ticket, parts=taken, ends=ends))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer forgets in time
            self._fail(str(error))

    def _read_slots(self) -> None:
        """Read the slots that have been packed, as far as there are slots here."""
        while self._packed and not self._failure:
            if self._compresses and len(self._reading) >= MAX_READING:
                return
            own = self._reader.incoming.take()
            if own is None:
                return
            part = self._packed.popleft()
            part.own = own
            try:
                read = self._reader.make_read(part.theirs, own, part.wire_bytes)
                part.posting = Posting(self._reader.agent, [read])
            except Exception as error:  # noqa: BLE001 NIXL raises many types
                self._give_back(part)
                self._fail(str(error))
                return
            self._reading.append(part)
            self._move(part, _Phase.READING)

    def _unpack(self, part: _Part) -> None:
        """Unpack what was read; whether it was there is proven meanwhile."""
        if self._failure:
            self._give_back(part)
            return
        gathering, place = self._reader.gathering, self._reader.incoming.place
        try:
            batches = self._batches(part)
            if part.level:
                slot = gathering.slot(place, part.own)
                steps = decompress(gathering, slot, part.level, part.num_bytes, batches)
                part.posting = Stepwise(steps)
            else:
                part.posting = gathering.start(batches, place.slot(part.own))
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            self._give_back(part)
            self._fail(str(error))
            return
        self._unpacking.append(part)
        self._move(part, _Phase.UNPACKING)

    def _batches(self, part: _Part) -> Sequence[Batch]:
        """What unpacks it."""
        if not part.batches:
            pieces = part.pieces
            begins = self._begins[pieces] - self._begins[pieces.start]
            targets, lengths = self._reader.local.at(self._pairs.local[pieces])
            part.batches = copies_of(begins, targets, lengths)
            self._num_steps -= 1
        return part.batches

    def _fail(self, reason: str) -> None:
        """The rest is to be read in pieces, when nothing else is under way."""
        if self._failure:
            return
        self._failure = reason
        _log.warning(
            "gathered",
            f"a gathered read from {self._reader.peer.engine_id!r} goes on in pieces: {reason}",
        )
        self._say([], ends=True)
        if not any(part.theirs >= 0 for part in self._parts):
            self._reader.avoid()

    def _read_rest(self) -> None:
        missing = [
            np.arange(part.pieces.start, part.pieces.stop)
            for part in self._parts
            if not part.is_complete
        ]
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
