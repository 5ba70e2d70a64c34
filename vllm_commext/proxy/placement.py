"""Where a request is prefilled and where its answer is decoded: one engine for both, or a pair.
Pure: every time is an argument.

An answer's time per output token is a mean over the answer. So a prefill of t seconds costs each
answer that runs at the same engine t seconds of what it has left: the limit times the tokens that
it has, and those that it will have by what recent answers had, less the time that it took and will
take. A request goes where the fewest are expected to miss a limit by it, itself included; among
equals, where it takes the least time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from vllm_commext.limits import Limits
from vllm_commext.proxy.engine_load import EngineLoad
from vllm_commext.proxy.engine_speed import MOST_BINNED, Speeds, bins

MAX_SEEN = 20
"""Answers that are looked at for a request; they stand for the others of their engines."""
NOW_SHARE = 0.1
"""What an engine's present answers count for beside its recent ones, where its next steps are
foreseen: a peak is over before the answers of it are."""
MAX_CANDIDATES = 2
"""Engines looked at for each of both steps."""
DELAY_WEIGHT = 0.02
"""Missed limits that one second of delay is worth."""
RISKY, MISSED = 0.85, 1.1
"""Shares of a limit: expected to be needed from which on it may be missed, and is missed."""
ROOM_WEIGHT = 1.0
"""Missed limits that a second of waiting for room in a KV cache is worth: those that come later
wait there, too."""
OTHERS_DELAY = 0.1
"""What a second of other answers' delay counts for, beside one of the request's own."""


@dataclass(slots=True, eq=False)
class Candidate:
    """An engine that may take a step, with what it holds of a prompt. key: the caller's own."""

    load: EngineLoad
    held_tokens: int = 0
    key: object = None


@dataclass(slots=True)
class Placement:
    """Where one request goes, with what is expected of it, in seconds. prefill is decode where one
    engine does both. misses: requests more than without it that are expected to miss a limit.
    late: by how much the first token had to wait less to come in time for sure, of what it waits
    for prompts before its own."""

    prefill: Candidate
    decode: Candidate
    first_token: float = 0.0
    per_token: float = 0.0
    misses: float = 0.0
    late: float = 0.0

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode


@dataclass(slots=True)
class _Costs:
    """Of one engine: how many answers it gives, times until it is free, for the prompt, for a step,
    one with one answer more, and one beside the prompts that it computes of late; until its KV
    cache has room for the prompt, and for its answer, too; how many of the prompts that wait are
    put off for it; and how many of its answers come late by the prompt, one answer more or both,
    as far as that has been counted."""

    candidate: Candidate
    num_answers: int
    backlog: float
    prefill: float
    step: float
    slower: float
    pace: float
    prompt_room: float
    room: float
    num_put_off: int
    late: dict[tuple[bool, bool], float]


_Option = tuple[float, int, _Costs, _Costs, float, float, float]
"""A way that a request may take: what it costs in all, its idx, the engines of both steps, limits
missed, seconds to the first token, and of those after it."""


class Planner:
    """Places requests. shared: what engines have in common, for their loads too."""

    def __init__(self, limits: Limits) -> None:
        self.shared = Speeds(limits)

    def new_load(self) -> EngineLoad:
        """Load of an engine that has just come."""
        return EngineLoad(self.shared)

    def place(
        self,
        now: float,
        tokens: int,
        max_tokens: int,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
    ) -> Placement | None:
        """Best placement of a prompt of *tokens*; None without a decode engine, or before anything
        has been learned of engines' speed. Engines that may do both are in both sequences, as the
        same candidates."""
        if not decode or not decode[0].load.speed.is_known:
            return None
        local, sources, targets = self._shortlisted(prefill, decode, now)
        looked = dict.fromkeys((*local, *sources, *targets))
        seen = max(2, MAX_SEEN // len(looked))
        costs = {one: self._costs(one, tokens, now) for one in looked}
        options = self._options(
            [costs[one] for one in local],
            [costs[one] for one in sources],
            [costs[one] for one in targets],
            max_tokens,
        )
        options.sort()
        best = math.inf, 0, 0.0, options[0]
        for option in options:
            cost, idx, source, at, _, _, _ = option
            if cost > best[0]:
                break  # even if it makes no other answer late
            others = self._others_late(source, at, now, seen)
            best = min(best, (cost + others, idx, others, option))
        _, _, others, (_, _, source, at, misses, first, seconds) = best
        late, limit = 0.0, self.shared.limits.first
        if limit and first > RISKY * limit:
            wait = max(source.backlog, source.room if source is at else source.prompt_room)
            late = max(0.0, min(first - RISKY * limit, wait))
        per_token = seconds / max(self.shared.lengths.mean, 1.0)
        return Placement(source.candidate, at.candidate, first, per_token, misses + others, late)

    def _shortlisted(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], now: float
    ) -> tuple[Sequence[Candidate], Sequence[Candidate], Sequence[Candidate]]:
        """Engines that might take both steps, the first and the second: those with least to do."""
        limits = self.shared.limits
        if len(decode) <= MAX_CANDIDATES >= len(prefill):
            return decode, prefill if limits.tpot else (), decode if limits.tpot else ()
        patience = 4.0 / limits.first if limits.first else 1.0
        work, paces, alone = _outlooks(decode, now, patience)
        soonest = decode[work.index(min(work))]
        if not limits.tpot:
            return [soonest], (), ()
        idxs = sorted(range(len(decode)), key=paces.__getitem__)
        steadiest = [decode[idx] for idx in idxs[:MAX_CANDIDATES]]
        sources, local = list[Candidate](), [soonest, *steadiest]
        if prefill:
            if prefill is not decode:
                work, _, alone = _outlooks(prefill, now, patience)
            least, fewest = work.index(min(work)), alone.index(min(alone))
            sources = [prefill[idx] for idx in ((least,) if least == fewest else (least, fewest))]
            local += sources if prefill is decode else [one for one in sources if one in decode]
        return list(dict.fromkeys(local)), sources, steadiest

    def _options(
        self,
        local: Sequence[_Costs],
        sources: Sequence[_Costs],
        targets: Sequence[_Costs],
        max_tokens: int,
    ) -> list[_Option]:
        """What each way costs to compute the prompt and to answer, at one engine or at two; other
        answers that come late by it left out."""
        shared, ways = self.shared, list[tuple[_Costs, _Costs, float, float, float]]()
        for one in local:
            first = (one.backlog if one.backlog > one.room else one.room) + one.prefill
            ways.append((one, one, first, 0.0, one.room))
        for one in sources:
            room = one.prompt_room
            first = (one.backlog if one.backlog > room else room) + one.prefill
            first += shared.handover.value
            for at in targets:
                if at is not one:
                    late = max(0.0, at.backlog - first, at.room - first)
                    late += shared.second_token.value
                    ways.append((one, at, first, late, at.room + room))
        tpot, length, options = shared.limits.tpot, shared.lengths.mean, list[_Option]()
        limit = shared.limits.first or math.inf
        for source, at, first, late, wait in ways:
            in_time = 1.0 - _ramp(first / limit) if first > RISKY * limit else 1.0
            if tpot:
                room = tpot - at.pace
                if late or room <= 0.0:
                    needed = (late + room) / room if room > 0.0 else math.inf
                    in_time *= 1.0 - _late_share(needed, 1, max_tokens, shared.lengths.longer)
            misses = 1.0 - in_time + source.num_put_off
            seconds = at.pace * length + late
            delay = first + seconds + OTHERS_DELAY * source.prefill * source.num_answers
            cost = misses + ROOM_WEIGHT * wait + DELAY_WEIGHT * delay
            options.append((cost, len(options), source, at, misses, first, seconds))
        return options

    def _others_late(self, source: _Costs, at: _Costs, now: float, max_seen: int) -> float:
        """How many other answers come late where the prompt is computed at *source* and answered
        *at* an engine."""
        if source is at:
            return max(0.0, self._late(at, (True, True), now, max_seen))
        by_prefill = self._late(source, (True, False), now, max_seen)
        return max(0.0, by_prefill + self._late(at, (False, True), now, max_seen))

    def _costs(self, candidate: Candidate, tokens: int, now: float) -> _Costs:
        load, speed = candidate.load, candidate.load.speed
        held = min(candidate.held_tokens, tokens - 1)
        seconds = speed.prefill_seconds(tokens - held, held, not load.jobs)
        if now >= load.outlook_until:
            load.look_ahead(now)
        num, length = len(load.answers), self.shared.lengths.mean
        # Those that run now are some time at the engine, and then as many as of late.
        most = NOW_SHARE * num + (1.0 - NOW_SHARE) * load.mean_answers
        context = NOW_SHARE * load.context + (1.0 - NOW_SHARE) * load.mean_context
        step = speed.step_seconds(most, context)
        slower = speed.step_seconds(most + 1.0, context + tokens)
        pace = slower / max(1.0 - load.share, 0.05)
        wait, put_off = load.wait_seconds(seconds, now)
        room = load.room_seconds(tokens + length, pace)
        first = load.room_seconds(tokens, pace) if room else 0.0
        return _Costs(candidate, num, wait, seconds, step, slower, pace, first, room, put_off, {})

    def _late(self, at: _Costs, by: tuple[bool, bool], now: float, max_seen: int) -> float:
        """How many answers *at* an engine will be late *by* a prefill, one more answer or both, by
        *max_seen* of them about."""
        if by in at.late:
            return at.late[by]
        limit, lengths = self.shared.limits.tpot, self.shared.lengths
        step, slower = at.step, at.slower
        found, stride = 0.0, -(-at.num_answers // max_seen)
        backlog, both = at.backlog, at.backlog + at.prefill
        per_second = 1.0 / (limit - step) if step < limit else math.inf
        slower_per_second = 1.0 / (limit - slower) if slower < limit else math.inf
        is_counted = at.num_answers and step < limit
        answers = at.candidate.load.answers if is_counted else ()
        for answer in islice(answers, 0, None, stride or 1):
            wait = answer.first_at - now
            had, spent = answer.tokens or 1, limit
            before, after = backlog, both
            if wait > 0.0:
                before, after = max(0.0, before - wait), max(0.0, after - wait)
            elif answer.has_begun:
                spent -= wait
            slower_used = spent - had * slower
            needed = (slower_used + after) * slower_per_second
            if needed <= had:
                continue  # in time even so
            longer, most, used = lengths.longer, answer.max_tokens, spent - had * step
            already = _late_share((used + before) * per_second, had, most, longer)
            worst = _late_share(needed, had, most, longer)
            if worst == 0.0 or already == 1.0:
                continue
            if by == (True, False):
                worst = _late_share((used + after) * per_second, had, most, longer)
            elif by == (False, True):
                worst = _late_share((slower_used + before) * slower_per_second, had, most, longer)
            found += worst - already
        at.late[by] = found = found * stride
        return found


def _outlooks(
    engines: Sequence[Candidate], now: float, patience: float
) -> tuple[list[float], list[float], list[float]]:
    """Of each engine: seconds of its work, less what it need not compute; seconds to each token of
    its answers; and *patience* times the former with its answers."""
    work, paces, alone = list[float](), list[float](), list[float]()
    for one in engines:
        load, held = one.load, one.held_tokens
        if now >= load.outlook_until:
            load.look_ahead(now)
        seconds, pace = load.outlook
        if load.waiting:
            seconds = max(seconds, load.queued + load.waiting_seconds)
        if held:
            seconds -= load.speed.prefill_seconds(held, 0, False)
        work.append(seconds)
        paces.append(pace)
        alone.append(len(load.answers) + patience * seconds)
    return work, paces, alone


def _late_share(needed: float, had: int, most: int, longer: Mapping[int, float]) -> float:
    """Share of answers of *had* tokens so far, and *most* at most, that end before they have those
    *needed* to keep the limit. longer: share of all answers that are, by bins."""
    if needed <= had:
        return 0.0
    if needed > most or needed >= MOST_BINNED:
        return 1.0
    among = longer[bins[had]] if had < MOST_BINNED else 0.0
    return 1.0 - longer[bins[int(needed)]] / among if among > 0.0 else 0.0


def _ramp(share: float) -> float:
    """How likely a limit is missed of which *share* is expected to be needed."""
    return min(1.0, max(0.0, (share - RISKY) / (MISSED - RISKY)))
