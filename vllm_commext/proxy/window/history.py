"""Requests of the last minutes, in buckets of some seconds, and the parts of each one's time.
Pure: every time is an argument."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_commext.limits import Limits
from vllm_commext.proxy.outcome import (
    DECODE_ANSWERS,
    DECODE_ASKED,
    PREFILL_ASKED,
    PREFILLED,
    Mark,
    Outcome,
    Phase,
)

SECONDS, NUM_BUCKETS = 5, 120
MINUTE = 60 // SECONDS
COUNTED = ("local", "handed_over", "least_work", "resumed", "moved", "lost")
"""Placements by kind; streams resumed, moved, and lost as no other engine went on with them."""
COLUMNS = (
    *("rate", "refused", "failed", "first_p50", "first_p99", "each_p50", "each_p99", "in_time"),
    *COUNTED,
)
_GROWTH = math.log(1.05)


class Times:
    """Seconds, to 2.5 %."""

    def __init__(self, parts: Iterable["Times"] = ()) -> None:
        self._bins = Counter[int]()
        for one in parts:
            self._bins.update(one._bins)

    def add(self, seconds: float) -> None:
        self._bins[round(math.log(max(seconds, 1e-6)) / _GROWTH)] += 1

    def quantiles(self, *shares: float) -> list[float | None]:
        """Seconds that each of *shares*, in ascending order, was within; None where there are
        none."""
        total, passed, found = self._bins.total(), 0, list[float | None]()
        for number in sorted(self._bins):
            passed += self._bins[number]
            while len(found) < len(shares) and passed >= shares[len(found)] * total:
                found.append(math.exp(number * _GROWTH))
        return found or [None] * len(shares)


@dataclass
class Bucket:
    """counts: of `COUNTED`, and of requests: ended; refused by 503; failed by anything else that no
    client caused; timed streams, and those of them in_time. first, each: seconds to the first
    token, and for each other."""

    number: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    first: Times = field(default_factory=Times)
    each: Times = field(default_factory=Times)

    def row(self, seconds: float, has_limits: bool) -> list[float | None]:
        """Values of `COLUMNS`."""
        counts = self.counts
        has_share = has_limits and counts["timed"]
        return [
            *(counts["ended"] / seconds, counts["refused"], counts["failed"]),
            *(*self.first.quantiles(0.5, 0.99), *self.each.quantiles(0.5, 0.99)),
            counts["in_time"] / counts["timed"] if has_share else None,
            *(counts[name] for name in COUNTED),
        ]


class History:
    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._has_limits = bool(limits.tpot or limits.first)
        self._buckets = deque([Bucket(int(now // SECONDS))], maxlen=NUM_BUCKETS)
        self._rows = deque[list[float | None]](maxlen=NUM_BUCKETS - 1)
        self._began = now

    def advance(self, now: float) -> None:
        """Begin the buckets that are due."""
        number = int(now // SECONDS)
        while (last := self._buckets[-1]).number < number:
            self._rows.append(last.row(self._covered(last, now), self._has_limits))
            skipped = max(last.number + 1, number - NUM_BUCKETS + 1)
            self._buckets.append(Bucket(skipped))

    def note(self, outcome: Outcome) -> bool:
        """Count a request that has ended; False where it failed or came late."""
        bucket, has_failure = self._buckets[-1], outcome.has_failed
        counts, first = bucket.counts, outcome.first_token_seconds
        counts["ended"] += 1
        if outcome.status == 503 or has_failure:
            counts["refused" if outcome.status == 503 else "failed"] += 1
        if not outcome.tokens or first is None:
            return not has_failure
        bucket.first.add(first)
        if outcome.tokens > 1:
            bucket.each.add(outcome.per_token)
        is_in_time = self.limits.allow(outcome.per_token, first)
        counts["timed"] += 1
        counts["in_time"] += is_in_time
        return is_in_time and not has_failure

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to `COUNTED`."""
        self._buckets[-1].counts.update(counts)

    def rows(self, now: float) -> list[list[float | None]]:
        """Values of `COLUMNS` in each bucket, the latest one last."""
        last = self._buckets[-1]
        return [*self._rows, last.row(self._covered(last, now), self._has_limits)]

    def minute(self, now: float) -> list[float | None]:
        """Values of `COLUMNS` in the last minute."""
        parts = list(self._buckets)[-MINUTE:]
        counts = sum((one.counts for one in parts), Counter[str]())
        first, each = Times(one.first for one in parts), Times(one.each for one in parts)
        since = max(parts[0].number * SECONDS, self._began)
        return Bucket(0, counts, first, each).row(max(now - since, 1.0), self._has_limits)

    def _covered(self, bucket: Bucket, now: float) -> float:
        """Seconds of a bucket that have passed, at least one."""
        begin = max(bucket.number * SECONDS, self._began)
        return max(min(now, (bucket.number + 1) * SECONDS) - begin, 1.0)


QUEUE, PREFILL, ASK, FIRST_TOKEN, DECODE, MOVE = PARTS = (
    *("queue", "prefill", "ask", "first token", "decode", "move"),
)


class Part(NamedTuple):
    """One step of a request, from *began* until *ended*, seconds of ``time.monotonic``; engine: its
    name or ""."""

    name: str
    engine: str
    began: float
    ended: float


_ENDS: dict[str, tuple[str, ...]] = {
    PREFILL_ASKED: (QUEUE,),
    PREFILLED: (PREFILL,),
    DECODE_ASKED: (QUEUE, ASK, FIRST_TOKEN),
    DECODE_ANSWERS: (ASK,),
    Phase.OPENED: (QUEUE, ASK, FIRST_TOKEN),
    Phase.RELAYING: (ASK, FIRST_TOKEN, MOVE),
    Phase.MOVING: (DECODE,),
    Phase.ASKED: PARTS,
    Phase.DONE: PARTS,
}
_BEGINS = {
    PREFILL_ASKED: PREFILL,
    DECODE_ASKED: ASK,
    DECODE_ANSWERS: FIRST_TOKEN,
    Phase.RELAYING: DECODE,
    Phase.MOVING: MOVE,
    Phase.ASKED: QUEUE,
}


def parts_of(began: float, marks: Iterable[Mark]) -> list[Part]:
    """All parts, as they ended.  A part that has not ended is left out."""
    running, found, answers = {QUEUE: (began, "")}, list[Part](), ""
    for at, what, engine in marks:
        for name in _ENDS.get(what, ()):
            if name in running:
                since, asked = running.pop(name)
                found.append(Part(name, asked, since, at))
        if what == DECODE_ASKED:
            answers = engine
        if (name := _BEGINS.get(what)) is not None:
            running[name] = at, engine or (answers if name == DECODE else "")
    return found
