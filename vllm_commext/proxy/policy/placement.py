"""Where a request is prefilled and where its answer is decoded: one engine for both, or a pair.
Pure: every time is an argument.

An answer's time per output token is a mean over the answer. So a prefill of t seconds costs each
answer at the same engine, those to come included, t seconds of its slack: limit x tokens - elapsed
- expected remaining time, for as many tokens as recent answers had. A request goes where the fewest
are expected to miss a limit by it, itself included; among equals, where it takes the least time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from vllm_commext.limits import Limits
from vllm_commext.proxy.policy.answer_lengths import MOST_BINNED, Lengths, places
from vllm_commext.proxy.policy.engine_load import EngineLoad, Planned, Speeds

MAX_SEEN = 80
"""Answers looked at for a request; they stand for the others."""
DELAY_WEIGHT = 0.02
"""Missed limits that one second of delay is worth."""
GIVEN_UP = 1.1
"""Step time, in limits, above which one more answer costs nothing: other engines recover. A request
is lost above it with prompts, if steps alone take `LONG_STEP`: else prompts may become fewer."""
LONG_STEP = 0.8
MARGIN = 0.1
"""Share of a limit below it in which an answer is the less sure to be in time the nearer it is."""
OTHERS_DELAY = 0.1
"""Weight of other answers' delay beside the request's own."""
OTHERS_MISSED = 1.5
"""Weight of other answers' missed limits: the least of several estimates is mostly too low."""


@dataclass(slots=True)
class Candidate:
    """An engine that may take a step, and the tokens of the prompt it holds."""

    load: EngineLoad
    held_tokens: int = 0
    key: object = None


class Way(NamedTuple):
    """Where a request goes, with expected seconds. is_late: the first token is expected after its
    limit; is_lost: that, or tokens too slow. other: seconds to the first token and for each other
    by a hand-over in place of one engine, or by one in place of a hand-over. cost: in missed
    limits, its own and others'."""

    prefill: Candidate
    decode: Candidate
    first_token: float = 0.0
    per_token: float = 0.0
    is_late: bool = False
    is_lost: bool = False
    other: tuple[float, float] | None = None
    cost: float = 0.0

    @property
    def is_local(self) -> bool:
        return self.prefill.load is self.decode.load


BY_PROMPT, BY_ANSWER = 1, 2
BY_BOTH = BY_PROMPT | BY_ANSWER
"""Causes of delay for an engine's other answers."""


@dataclass(slots=True, eq=False)
class _Steps:
    """Expected seconds of an engine's step, of one with an answer more (slower), and of that with
    recent prompts (pace). planned: others to come."""

    step: float
    slower: float
    pace: float
    planned: float


class _Costs:
    """Expected seconds at one engine: backlog, prefill, and until there is room for the prompt.
    busy: until a new answer may begin. late: answers made late, by cause. prompt, answer: what each
    costs there, in missed limits."""

    __slots__ = (
        *("answer", "backlog", "busy", "candidate", "late", "prefill", "prompt", "prompt_room"),
        *("free", "steps"),
    )

    def __init__(self, candidate: Candidate, tokens: int, now: float) -> None:
        self.candidate = candidate
        load, held = candidate.load, candidate.held_tokens
        load.look(now)
        shared, speed, answers = load.shared, load.speed, load.answers
        length, tpot, crowd = shared.lengths.mean, shared.limits.tpot, 0.0
        held = held if held < tokens else tokens - 1
        seconds, jobs = speed.prefill_seconds(tokens - held, held), load.prompts.jobs
        num_answers, context = len(answers), answers.context + answers.coming
        planned, more = load.to_come(now) if load.planned else (0.0, 0.0)
        num, context = num_answers + planned, context + more
        step, slower = speed.steps_seconds(num, context, tokens)
        pace = load.recent.pace(slower)
        backlog, num_put_off = load.wait_seconds(seconds, now) if jobs or load.queue else (0.0, 0)
        room = load.room_seconds(tokens + length, pace)
        self.prompt_room = load.room_seconds(tokens, pace) if room else 0.0
        self.prefill, self.backlog, self.free = seconds, backlog, 1.0 - load.recent.share
        self.busy = backlog if backlog > room else room
        self.steps = _Steps(step, slower, pace, planned)
        self.prompt = num_put_off + 1.0 + DELAY_WEIGHT * OTHERS_DELAY * seconds * num_answers
        if slower >= tpot > 0.0:  # all are late for as long as there is one too many
            crowd = max(0.0, (GIVEN_UP - slower / tpot) / (GIVEN_UP - 1.0))
        # A second without room counts as a missed limit.
        self.answer = crowd + room + DELAY_WEIGHT * pace * length
        self.late: dict[int, float] = {}


_Option = tuple[float, _Costs, _Costs, float, float]
"""Total cost, engines of both steps, seconds to the first token, and the time that the second
one takes longer."""


class Planner:
    def __init__(self, limits: Limits) -> None:
        self.shared = Speeds(limits)

    def new_load(self) -> EngineLoad:
        return EngineLoad(self.shared)

    def place(
        self,
        now: float,
        tokens: int,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        are_all: bool = True,
    ) -> Way | None:
        """Best placement of a prompt of *tokens*; None while nothing is known of engines' speed.
        Engines for both steps are in both sequences, as the same candidates. are_all: there are no
        others."""
        if not decode or not decode[0].load.speed.is_known:
            return None
        sources = targets = [_Costs(one, tokens, now) for one in decode]
        if prefill is not decode:
            costs = {one.candidate.load: one for one in targets}
            sources = [costs.get(one.load) or _Costs(one, tokens, now) for one in prefill]
        both = targets if sources is targets else {*targets, *sources}
        seen = max(2, MAX_SEEN // len(both))
        options = self._options(sources if self.shared.limits.tpot else [], targets, are_all)
        options.sort(key=itemgetter(0))
        best, least = options[0], math.inf
        for option in options:
            cost, source, at, _, _ = option
            if cost > least:
                break  # even if it makes no other answer late
            # Less than for those before, so what stopped there is enough.
            most = (least - cost) / OTHERS_MISSED
            others = self._late(source, BY_BOTH if source is at else BY_PROMPT, now, seen, most)
            if source is not at and others <= most:
                others += self._late(at, BY_ANSWER, now, seen, most)
            cost += OTHERS_MISSED * others if others > 0.0 else 0.0
            if cost < least:
                best, least = option, cost
        _, source, at, first, late = best
        length, limits = max(self.shared.lengths.mean, 1.0), self.shared.limits
        is_late, is_local = 0.0 < limits.first < first, source is at
        per_token, tpot = at.steps.pace + late / length, limits.tpot
        lost = is_late or (0.0 < tpot * GIVEN_UP < per_token and at.steps.slower > tpot * LONG_STEP)
        other = None
        for _, turned, to, after, later in options:
            if (turned is to) != is_local:
                other = after, to.steps.pace + later / length
                break
        return Way(source.candidate, at.candidate, first, per_token, is_late, lost, other, least)

    def note(self, way: Way, tokens: int, now: float) -> Planned:
        """Note an answer where it is to be, unless it is lost: that comes when it comes."""
        wait = 0.0 if way.is_lost else max(way.first_token, self.shared.limits.first)
        planned = Planned(way.decode.load, tokens, now + wait)
        way.decode.load.planned[planned] = None
        return planned

    def _options(
        self, sources: Sequence[_Costs], targets: Sequence[_Costs], are_all: bool = True
    ) -> list[_Option]:
        """All ways, without their effect on others. Late ones cost time that is free of prompts, or
        go where most wait, if prompts keep all engines from answers in time, which end within the
        first token's limit: one gets free. If others give too many, the slowest takes all."""
        shared, tpot, options = self.shared, self.shared.limits.tpot, list[_Option]()
        if sources and min([one.steps.pace for one in targets]) >= tpot:
            if (step := max([one.steps.slower for one in targets])) >= tpot * GIVEN_UP:
                slowest = max(targets, key=lambda one: one.steps.pace)
                slowest.answer = slowest.prompt_room
            elif are_all and step < tpot and shared.lengths.mean * step < shared.limits.first:
                loads = [one.candidate.load for one in sources]
                work = [load.prompts.seconds + load.queue.seconds for load in loads]
                for one, seconds in zip(sources, work, strict=True):
                    one.free = 1.0 - seconds / (max(work) or 1.0)
        self._keep_free(sources, targets)
        handover, second = shared.handover.value, shared.second_token.value
        limit = shared.limits.first or math.inf
        handed = list[tuple[_Costs, float, float, float]]()
        for at in targets:
            first, in_time = at.busy + at.prefill, self._share_in_time(at, 0.0)
            cost = at.prompt + at.answer + DELAY_WEIGHT * first
            cost += at.free if first > limit or not in_time else -in_time
            options.append((cost, at, at, first, 0.0))
            in_time = self._share_in_time(at, second) if in_time and sources else 0.0
            handed.append((at, at.busy, at.answer + DELAY_WEIGHT * second, in_time))
        for one in sources:
            backlog, room, free = one.backlog, one.prompt_room, one.free
            first = (backlog if backlog > room else room) + one.prefill + handover
            base = one.prompt + room + DELAY_WEIGHT * first
            for at, busy, cost, in_time in handed:
                if at is one:
                    continue
                late = second
                if busy > first:
                    late += busy - first
                    cost = at.answer + DELAY_WEIGHT * late
                    in_time = self._share_in_time(at, late)
                cost += base + free if first > limit or not in_time else base - in_time
                options.append((cost, one, at, first, late))
        return options

    def _keep_free(self, sources: Sequence[_Costs], targets: Sequence[_Costs]) -> None:
        """Make answers dearer at engines without which all would fit: they get free for prompts.
        The price grows with the time that prompts wait, and with their share of time."""
        limits, waits = self.shared.limits, [one.backlog for one in sources if one.backlog > 0.0]
        wait, num = sum(waits) / len(waits) if waits else 0.0, len(targets)
        price = min(1.0, wait / limits.first) ** 2 if limits.first else 0.0
        if price > DELAY_WEIGHT:
            price *= 1.0 - sum([one.free for one in targets]) / num
        if price <= DELAY_WEIGHT or not self.shared.steps.is_known:  # less than a second is worth
            return
        full, used = (1.0 - MARGIN) * limits.tpot, list[float]()
        for one in targets:
            alone = one.candidate.load.speed.step_seconds(0.0, 0.0)
            used.append((one.steps.step - alone) / max(full - alone, 1e-12))
        busiest = sorted(range(num), key=used.__getitem__, reverse=True)
        for idx in busiest[math.ceil(sum(used)) or 1 :]:
            targets[idx].answer += price

    def _share_in_time(self, at: _Costs, late: float) -> float:
        """Share of answers in time of those whose second token comes *late* seconds later."""
        limit = self.shared.limits.tpot or 1e9
        if (room := limit - at.steps.pace) <= 0.0:
            return 0.0
        sure = 1.0 if room >= MARGIN * limit else room / (MARGIN * limit)
        return sure * (1.0 - self.shared.lengths.ended(1.0 + late / room, 1)) if late else sure

    def _late(
        self, at: _Costs, by: int, now: float, max_seen: int, most: float = math.inf
    ) -> float:
        """Answers *at* an engine that are late because of *by*, from *max_seen* of them; stops
        above *most*."""
        if by in at.late:
            return at.late[by]
        lengths, limit, backlog = self.shared.lengths, self.shared.limits.tpot, at.backlog
        answers, longer, place_of = at.candidate.load.answers, lengths.longer, places
        step, slower, planned = at.steps.step, at.steps.slower, at.steps.planned
        more = at.prefill if by & BY_PROMPT else 0.0
        left = limit - step or 1e-12
        new_left = limit - slower or 1e-12 if by & BY_ANSWER else left
        stride = -(-len(answers) // max_seen) if len(answers) > max_seen else 1
        found, most, base = 0.0, most / stride, now + backlog + limit
        in_time = -more if new_left >= 0.0 else -math.inf  # even so
        hopeless = 0.0 if left < 0.0 else math.inf  # late in any case
        for answer in islice(answers, 0, None, stride) if stride > 1 else answers:
            if had := answer.tokens:
                behind = base - answer.first_at - limit * had
                if behind <= in_time or behind > hopeless:
                    continue
                new_behind = behind + more
            else:
                had, until = 1, max(0.0, answer.first_at - now)
                behind, new_behind = max(0.0, backlog - until), max(0.0, backlog + more - until)
            if new_left < 0.0:
                needed = had + new_behind / new_left
                found += 1.0 if needed <= had else 1.0 - lengths.ended(needed, had)
                if left < 0.0 or behind > 0.0:
                    found -= _share_late(lengths, behind, left, had)
            elif had < MOST_BINNED:
                before = among = longer[place_of[had]]
                if behind > 0.0:
                    needed = had + behind / left
                    before = longer[place_of[int(needed)]] if needed < MOST_BINNED else 0.0
                new = had + new_behind / new_left
                late = longer[place_of[int(new)]] if new < MOST_BINNED else 0.0
                if late < before:
                    found += (before - late) / among
            if found > most:
                break
        found *= stride
        if planned and by & BY_PROMPT:
            late = _share_late(lengths, backlog + more, new_left, 1)
            found += planned * (late - _share_late(lengths, backlog, left, 1))
        at.late[by] = found
        return found


def _share_late(lengths: Lengths, behind: float, left: float, had: int) -> float:
    """Share late of answers that are *behind* by so much and have *left* of each token's limit."""
    ended = lengths.ended(had + behind / left, had)
    return ended if left > 0.0 else 1.0 - ended
