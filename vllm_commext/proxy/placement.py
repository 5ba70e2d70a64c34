"""Where a request is prefilled and where its answer is decoded: one engine for both, or a pair.
Pure: every time is an argument.

An answer's time per output token is a mean over the answer. So a prefill of t seconds costs each
answer that runs at the same engine t seconds of what it has left: the limit times the tokens that
it has, and those that it will have by what recent answers had, less the time that it took and will
take. A request goes where the fewest are expected to miss a limit by it, itself included; among
equals, where it takes the least time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """An engine that may take a step, with what it holds of the prompt. key: the caller's own."""

    load: EngineLoad
    held_tokens: int = 0
    key: object = None


@dataclass(frozen=True)
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
    put off for it; and how many of its answers come late by the prompt, the answer, both."""

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
    by_prefill: float = 0.0
    by_answer: float = 0.0
    by_both: float = 0.0
    is_counted: bool = False


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
        looked = {id(one): one for one in (*local, *sources, *targets)}
        seen = max(2, MAX_SEEN // len(looked))
        costs = {key: self._costs(one, tokens, now) for key, one in looked.items()}
        pairs = [(costs[id(one)], costs[id(one)]) for one in local]
        pairs += [(costs[id(p)], costs[id(d)]) for p in sources for d in targets if p is not d]
        options = [self._option(source, at, max_tokens) for source, at in pairs]
        best = math.inf, 0, 0.0
        for idx in sorted(range(len(pairs)), key=options.__getitem__):
            if options[idx][0] > best[0]:
                break  # even if it makes no other answer late
            others = self._others_late(*pairs[idx], now, seen)
            best = min(best, (options[idx][0] + others, idx, others))
        _, idx, others = best
        (source, at), (_, misses, first, per_token) = pairs[idx], options[idx]
        misses += others
        late, limit = 0.0, self.shared.limits.first
        if limit:
            wait = max(source.backlog, source.room if source is at else source.prompt_room)
            late = max(0.0, min(first - RISKY * limit, wait))
        return Placement(source.candidate, at.candidate, first, per_token, misses, late)

    def _shortlisted(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], now: float
    ) -> tuple[Sequence[Candidate], Sequence[Candidate], Sequence[Candidate]]:
        """Engines that might take both steps, the first and the second: those with least to do."""
        limits = self.shared.limits
        if len(decode) <= MAX_CANDIDATES >= len(prefill):
            return decode, prefill if limits.tpot else (), decode if limits.tpot else ()
        work = [_work(one, now) for one in decode]
        soonest = decode[work.index(min(work))]
        if not limits.tpot:
            return [soonest], (), ()
        patience = 4.0 / limits.first if limits.first else 1.0
        steadiest = sorted(decode, key=lambda one: one.load.outlook(now)[1])[:MAX_CANDIDATES]
        sources = list[Candidate]()
        if prefill:
            if prefill is not decode:
                work = [_work(one, now) for one in prefill]
            alone = [
                len(one.load.answers) + patience * seconds
                for one, seconds in zip(prefill, work, strict=True)
            ]
            least = work.index(min(work)), alone.index(min(alone))
            sources += dict.fromkeys([prefill[idx] for idx in least])
        local = dict.fromkeys((soonest, *steadiest, *(one for one in sources if one in decode)))
        return list(local), sources, steadiest

    def _option(
        self, source: "_Costs", at: "_Costs", max_tokens: int
    ) -> tuple[float, float, float, float]:
        """What it costs to compute the prompt at *source* and to answer *at* an engine: in all, in
        limits missed, and how long the first token and each after it take; other answers that come
        late by it left out."""
        limits, shared = self.shared.limits, self.shared
        late, wait, length = 0.0, at.room, shared.lengths.mean
        if source is at:
            first = max(at.backlog, at.room) + at.prefill
        else:
            wait += source.prompt_room
            first = max(source.backlog, source.prompt_room) + source.prefill
            first += shared.handover.value
            late = max(0.0, at.backlog - first, at.room - first) + shared.second_token.value
        in_time = 1.0
        if limits.first and first > RISKY * limits.first:
            in_time = 1.0 - _ramp(first / limits.first)
        if limits.tpot:
            room = limits.tpot - at.pace
            if late or room <= 0.0:
                needed = (late + room) / room if room > 0.0 else math.inf
                in_time *= 1.0 - _late_share(needed, 1, max_tokens, shared.lengths.longer)
        misses = 1.0 - in_time + source.num_put_off
        seconds = at.pace * length + late
        delay = first + seconds + OTHERS_DELAY * source.prefill * source.num_answers
        per_token = seconds / max(length, 1.0)
        cost = misses + ROOM_WEIGHT * wait + DELAY_WEIGHT * delay
        return cost, misses, first, per_token

    def _others_late(self, source: _Costs, at: _Costs, now: float, max_seen: int) -> float:
        """How many other answers come late where the prompt is computed at *source* and answered
        *at* an engine."""
        for one in (source, at):
            if not one.is_counted:
                one.is_counted = True
                self._count_late(one, now, -(-one.num_answers // max_seen))
        return max(0.0, at.by_both if source is at else source.by_prefill + at.by_answer)

    def _costs(self, candidate: Candidate, tokens: int, now: float) -> _Costs:
        load, speed = candidate.load, candidate.load.speed
        held = min(candidate.held_tokens, tokens - 1)
        seconds = speed.prefill_seconds(tokens - held, held, not load.jobs)
        load.outlook(now)
        num = len(load.answers)
        # Those that run now are some time at the engine, and then as many as of late.
        most = NOW_SHARE * num + (1.0 - NOW_SHARE) * load.mean_answers
        context = NOW_SHARE * load.context + (1.0 - NOW_SHARE) * load.mean_context
        step = speed.step_seconds(most, context)
        slower = speed.step_seconds(most + 1.0, context + tokens)
        pace = slower / max(1.0 - load.share, 0.05)
        length = self.shared.lengths.mean
        wait, num_put_off = load.wait_seconds(seconds, now)
        rooms = load.room_seconds(tokens, pace), load.room_seconds(tokens + length, pace)
        return _Costs(candidate, num, wait, seconds, step, slower, pace, *rooms, num_put_off)

    def _count_late(self, found: _Costs, now: float, stride: int) -> None:
        """Count the answers at an engine that a prefill, one more answer or both will make late,
        by every one of *stride* answers. The time of this loop is most of a placement's."""
        limit, step = self.shared.limits.tpot, found.step
        if limit <= step or not found.num_answers:
            return
        longer, slower = self.shared.lengths.longer, found.slower
        backlog, both = found.backlog, found.backlog + found.prefill
        per_second = 1.0 / (limit - step)
        slower_per_second = 1.0 / (limit - slower) if slower < limit else math.inf
        by_prefill = by_answer = by_both = 0.0
        for answer in list(found.candidate.load.answers)[::stride]:
            wait = answer.first_at - now
            had, spent = answer.tokens or 1, limit
            before, after = backlog, both
            if wait > 0.0:
                before, after = max(0.0, before - wait), max(0.0, after - wait)
            elif answer.has_begun:
                spent -= wait
            late_at = had, answer.max_tokens, longer
            used, slower_used = spent - had * step, spent - had * slower
            worst = _late_share((slower_used + after) * slower_per_second, *late_at)
            if worst == 0.0:
                continue
            already = _late_share((used + before) * per_second, *late_at)
            if already == 1.0:
                continue
            by_both += worst - already
            by_prefill += _late_share((used + after) * per_second, *late_at) - already
            by_answer += _late_share((slower_used + before) * slower_per_second, *late_at) - already
        found.by_prefill = by_prefill * stride
        found.by_answer, found.by_both = by_answer * stride, by_both * stride


def _work(one: Candidate, now: float) -> float:
    """Seconds of an engine's work, less what it need not compute."""
    load, held = one.load, one.held_tokens
    seconds = load.outlook(now)[0]
    if load.waiting:
        seconds = max(seconds, load.queued + sum(one.seconds for one in load.waiting))
    return seconds - load.speed.prefill_seconds(held, 0, False) if held else seconds


def _late_share(needed: float, had: int, most: int, longer: Sequence[float]) -> float:
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
