"""Where a request is prefilled and where its answer is decoded: one engine for both, or a pair.
Pure: every time is an argument.

An answer's time per output token is a mean over the answer. So a prefill of t seconds costs each
answer that runs at the same engine t seconds of its slack: limit x tokens - elapsed - expected
remaining time, for as many tokens as recent answers had. A request goes where the fewest are
expected to miss a limit by it, itself included; among equals, where it takes the least time.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from vllm_commext.limits import Limits
from vllm_commext.proxy.policy.load import Answer, EngineLoad, Planned
from vllm_commext.proxy.policy.speed import Speeds

MAX_SEEN = 80
"""Answers looked at for a request; they stand for the others."""
DELAY_WEIGHT = 0.02
"""Missed limits that one second of delay is worth."""
GIVEN_UP = 1.1
"""Step time, in limits, above which one more answer costs nothing: other engines recover. A request
is lost above it with prompts, if steps alone take `LONG_STEP`: else prompts may become fewer."""
LONG_STEP = 0.8
OTHERS_DELAY = 0.1
"""Weight of other answers' delay beside the request's own."""


class Candidate(NamedTuple):
    """An engine that may take a step, and the tokens of the prompt it holds."""

    load: EngineLoad
    held_tokens: int = 0
    key: object = None


class Way(NamedTuple):
    """Where a request goes, with expected seconds. misses: expected additional missed limits.
    is_late: the first token is expected after its limit; is_lost: that, or tokens too slow.
    other: seconds to the first token and for each other by a hand-over in place of one engine, or
    by one in place of a hand-over."""

    prefill: Candidate
    decode: Candidate
    first_token: float = 0.0
    per_token: float = 0.0
    misses: float = 0.0
    is_late: bool = False
    is_lost: bool = False
    other: tuple[float, float] | None = None

    @property
    def is_local(self) -> bool:
        return self.prefill.load is self.decode.load


BY_PROMPT, BY_ANSWER = 1, 2
BY_BOTH = BY_PROMPT | BY_ANSWER
"""Causes of delay for an engine's other answers."""


class _Costs:
    """Expected seconds at one engine: backlog, prefill, step, a step with one answer more (slower),
    the same with recent prompts (pace), for a whole answer (seconds), and until there is room for
    the prompt and for the answer. busy: until a new answer may begin. handed: share in time of
    answers that are handed over. late: answers made late, by cause; already: share late even so."""

    __slots__ = (
        *("already", "backlog", "busy", "candidate", "handed", "late", "num_answers"),
        *("num_put_off", "pace", "prefill", "prompt_room", "room", "seconds", "slower", "step"),
    )

    def __init__(self, candidate: Candidate, tokens: int, now: float) -> None:
        load = candidate.load
        load.look(now)
        speed, length, held = load.speed, load.shared.lengths.mean, candidate.held_tokens
        if held >= tokens:
            held = tokens - 1
        self.candidate = candidate
        self.prefill = seconds = speed.prefill_seconds(tokens - held, held, not load.prompts.jobs)
        self.num_answers, context = len(load.answers), load.answers.context + load.answers.coming
        num_planned, more = load.to_come(now) if load.planned else (0, 0)
        num, context = self.num_answers + num_planned, context + more
        self.step = speed.step_seconds(num, context)
        self.slower = slower = speed.step_seconds(num + 1.0, context + tokens)
        self.pace = pace = load.recent.pace(slower)
        self.backlog, self.num_put_off = load.wait_seconds(seconds, now)
        self.room = room = load.room_seconds(tokens + length, pace)
        self.prompt_room = load.room_seconds(tokens, pace) if room else 0.0
        self.busy = self.backlog if self.backlog > room else room
        self.seconds, self.handed = pace * length, 1.0
        self.late: dict[int, float] = {}
        self.already: dict[Answer, float] = {}


_Option = tuple[float, int, _Costs, _Costs, float, float, float]
"""Total cost, idx, engines of both steps, misses, seconds to the first token, seconds after it."""


class Planner:
    def __init__(self, limits: Limits) -> None:
        self.shared = Speeds(limits)

    def place(
        self,
        now: float,
        tokens: int,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
    ) -> Way | None:
        """Best placement of a prompt of *tokens*; None while nothing is known of engines' speed.
        Engines for both steps are in both sequences, as the same candidates."""
        if not decode or not decode[0].load.speed.is_known:
            return None
        costs = {one.load: _Costs(one, tokens, now) for one in decode}
        costs |= {one.load: _Costs(one, tokens, now) for one in prefill if one.load not in costs}
        targets = [costs[one.load] for one in decode]
        hands_over = self.shared.limits.tpot > 0.0
        sources = [costs[one.load] for one in prefill] if hands_over else ()
        seen = max(2, MAX_SEEN // len(costs))
        options = self._options(sources, targets)
        options.sort()
        best, least, misses = options[0], math.inf, 0.0
        for option in options:
            cost, idx, source, at, _, _, _ = option
            if cost > least:
                break  # even if it makes no other answer late
            most = least - cost  # less than for those before, so what stopped there is enough
            if source is at:
                others = self._late(at, BY_BOTH, now, seen, most)
            else:
                if (others := self._late(source, BY_PROMPT, now, seen, most)) <= most:
                    others += self._late(at, BY_ANSWER, now, seen, most)
            others = others if others > 0.0 else 0.0
            cost += others
            if cost < least or (cost == least and idx < best[1]):
                best, least, misses = option, cost, others
        _, _, source, at, own, first, seconds = best
        length, limits = max(self.shared.lengths.mean, 1.0), self.shared.limits
        is_late, is_local = 0.0 < limits.first < first, source is at
        per_token, tpot = seconds / length, limits.tpot
        is_slow = 0.0 < tpot * GIVEN_UP < per_token and at.slower > tpot * LONG_STEP
        turned = ((one[5], one[6] / length) for one in options if (one[2] is one[3]) != is_local)
        return Way(
            *(source.candidate, at.candidate, first, per_token, own + misses),
            *(is_late, is_late or is_slow, next(turned, None)),
        )

    def note(self, way: Way, tokens: int, now: float) -> Planned:
        """Note an answer where it is to be, unless it is lost: that comes when it comes."""
        wait = 0.0 if way.is_lost else max(way.first_token, self.shared.limits.first)
        planned = Planned(way.decode.load, tokens, now + wait)
        way.decode.load.planned[planned] = None
        return planned

    def _options(self, sources: Sequence[_Costs], targets: Sequence[_Costs]) -> list[_Option]:
        """All ways, without their effect on other answers."""
        tpot, handover = self.shared.limits.tpot, self.shared.handover.value
        options: list[_Option] = []

        def add(source: _Costs, at: _Costs, first: float, late: float, wait: float) -> None:
            in_time = (
                (at.handed if late == second else self._share_in_time(at, late)) if tpot else 1.0
            )
            misses = source.num_put_off + 1.0 - (in_time if first <= limit else 0.0)
            if tpot and at.slower >= tpot:  # all are late for as long as there is one too many
                misses += max(0.0, (GIVEN_UP - at.slower / tpot) / (GIVEN_UP - 1.0))
            seconds = at.seconds + late
            delay = first + seconds + OTHERS_DELAY * source.prefill * source.num_answers
            cost = misses + wait + DELAY_WEIGHT * delay  # a second without room: a missed limit
            options.append((cost, len(options), source, at, misses, first, seconds))

        second, limit = self.shared.second_token.value, self.shared.limits.first or math.inf
        for at in targets:
            at.handed = self._share_in_time(at, second) if tpot else 1.0
            add(at, at, at.busy + at.prefill, 0.0, at.room)
        for one in sources:
            room = one.prompt_room
            first = (one.backlog if one.backlog > room else room) + one.prefill + handover
            for at in targets:
                if at is not one:
                    late = second + at.busy - first if at.busy > first else second
                    add(one, at, first, late, at.room + room)
        return options

    def _share_in_time(self, at: _Costs, late: float) -> float:
        """Share of answers in time of those whose second token comes *late* seconds later."""
        room = self.shared.limits.tpot - at.pace
        if room <= 0.0:
            return 0.0
        return 1.0 - self.shared.lengths.ended((late + room) / room, 1) if late else 1.0

    def _late(
        self, at: _Costs, by: int, now: float, max_seen: int, most: float = math.inf
    ) -> float:
        """Answers *at* an engine that are late because of *by*, from *max_seen* of them; stops
        above *most*."""
        if by in at.late:
            return at.late[by]
        load, limit, ended = at.candidate.load, self.shared.limits.tpot, self.shared.lengths.ended
        step, new_step = at.step, at.slower if by & BY_ANSWER else at.step
        backlog, new_backlog = at.backlog, at.backlog + (at.prefill if by & BY_PROMPT else 0.0)
        left, new_left = limit - step, limit - new_step
        found, stride, known = 0.0, -(-at.num_answers // max_seen) or 1, at.already
        for answer in islice(load.answers, 0, None, stride):
            wait, had, spent = answer.first_at - now, answer.tokens or 1, limit
            before, after = backlog, new_backlog
            if wait > 0.0:
                before = before - wait if before > wait else 0.0
                after = after - wait if after > wait else 0.0
            elif answer.has_begun:
                spent -= wait
            if new_left > 0.0 and spent + after <= had * limit:
                continue  # in time even so
            if (already := known.get(answer)) is None:
                already = _share_late(ended, spent - had * step + before, left, had)
                known[answer] = already
            if already < 1.0:
                used = spent - had * new_step + after
                found += _share_late(ended, used, new_left, had) - already
            if found * stride > most:
                break
        at.late[by] = found = found * stride
        return found


def _share_late(ended: Callable[[float, int], float], used: float, left: float, had: int) -> float:
    """Share of answers that end late, with *used* seconds to make up at *left* a token."""
    if left > 0.0:
        return ended(used / left, had)
    if used >= 0.0:
        return float(used > 0.0 or left < 0.0)
    return 1.0 - ended(used / left, had) if left else 0.0
