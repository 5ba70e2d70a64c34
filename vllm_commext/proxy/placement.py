"""Where a request is prefilled and where its answer is decoded: one engine for both, or a pair.
Pure: every time is an argument.

An answer's time per output token is a mean over the answer. So a prefill of t seconds costs each
answer that runs at the same engine t seconds of its slack: limit x tokens - elapsed - expected
remaining time, for as many tokens as recent answers had. A request goes where the fewest are
expected to miss a limit by it, itself included; among equals, where it takes the least time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from vllm_commext.limits import Limits
from vllm_commext.proxy.engine_load import EngineLoad
from vllm_commext.proxy.engine_speed import Speeds

MAX_SEEN = 20
"""Answers that are looked at for a request; they stand for the others of their engines."""
NOW_SHARE = 0.1
"""What an engine's present answers count for beside its recent ones, where its next steps are
foreseen: a peak is over before the answers of it are."""
MAX_CANDIDATES = 2
"""Engines looked at for each of both steps."""
DELAY_WEIGHT = 0.02
"""Missed limits that one second of delay is worth."""
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
    is_late: the first token is expected after its limit."""

    prefill: Candidate
    decode: Candidate
    first_token: float = 0.0
    per_token: float = 0.0
    misses: float = 0.0
    is_late: bool = False

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode


BY_PROMPT, BY_ANSWER = 1, 2
BY_BOTH = BY_PROMPT | BY_ANSWER
"""What makes other answers of an engine late: that it computes a prompt, answers it, or both."""


class _Costs:
    """Of one engine: how many answers it gives, times until it is free, for the prompt, for a step,
    one with one answer more, and one beside the prompts that it computes of late; until its KV
    cache has room for the prompt, and for its answer, too; how many of the prompts that wait are
    put off for it; and how many of its answers come late by what, as far as that has been
    counted."""

    __slots__ = (
        *("backlog", "candidate", "late", "num_answers", "num_put_off", "pace", "prefill"),
        *("prompt_room", "room", "slower", "step"),
    )

    def __init__(self, candidate: Candidate, tokens: int, now: float) -> None:
        load = candidate.load
        if now >= load.outlook_until:
            load.look_ahead(now)
        speed, length, held = load.speed, load.shared.lengths.mean, candidate.held_tokens
        if held >= tokens:
            held = tokens - 1
        self.candidate = candidate
        self.prefill = seconds = speed.prefill_seconds(tokens - held, held, not load.jobs)
        self.num_answers = num = len(load.answers)
        # Those that run now are some time at the engine, and then as many as of late.
        most = NOW_SHARE * num + (1.0 - NOW_SHARE) * load.mean_answers
        context = NOW_SHARE * load.context + (1.0 - NOW_SHARE) * load.mean_context
        self.step = speed.step_seconds(most, context)
        self.slower = slower = speed.step_seconds(most + 1.0, context + tokens)
        self.pace = pace = load.pace(slower)
        self.backlog, self.num_put_off = load.wait_seconds(seconds, now)
        self.room = room = load.room_seconds(tokens + length, pace)
        self.prompt_room = load.room_seconds(tokens, pace) if room else 0.0
        self.late: dict[int, float] = {}


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
        costs = {one: _Costs(one, tokens, now) for one in dict.fromkeys(local)}
        both = list(costs.values())
        for one in sources:
            if one not in costs:
                costs[one] = _Costs(one, tokens, now)
        seen = max(2, MAX_SEEN // len(costs))
        options = self._options(
            both, [costs[one] for one in sources], [costs[one] for one in targets], max_tokens
        )
        options.sort()
        best, least, misses = options[0], math.inf, 0.0
        for option in options:
            cost, idx, source, at, _, _, _ = option
            if cost > least:
                break  # even if it makes no other answer late
            if source is at:
                others = self._late(at, BY_BOTH, now, seen, least - cost)
            else:
                others = self._late(source, BY_PROMPT, now, seen)
                others += self._late(at, BY_ANSWER, now, seen)
            others = others if others > 0.0 else 0.0
            cost += others
            if cost < least or (cost == least and idx < best[1]):
                best, least, misses = option, cost, others
        _, _, source, at, own, first, seconds = best
        per_token = seconds / max(self.shared.lengths.mean, 1.0)
        is_late = 0.0 < self.shared.limits.first < first
        return Placement(source.candidate, at.candidate, first, per_token, own + misses, is_late)

    def _shortlisted(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], now: float
    ) -> tuple[Sequence[Candidate], Sequence[Candidate], Sequence[Candidate]]:
        """Engines that might take both steps, the first and the second: those with least to do."""
        limits = self.shared.limits
        if len(decode) <= MAX_CANDIDATES >= len(prefill):
            return decode, prefill if limits.tpot else (), decode if limits.tpot else ()
        patience = 4.0 / limits.first if limits.first else 1.0
        soonest, idlest, steadiest = _outlooks(decode, now, patience)
        if not limits.tpot:
            return [soonest], (), ()
        local, sources = [soonest, *steadiest], ()
        if prefill:
            if prefill is not decode:
                soonest, idlest, _ = _outlooks(prefill, now, patience)
            sources = [soonest] if soonest is idlest else [soonest, idlest]
            local += sources if prefill is decode else [one for one in sources if one in decode]
        return local, sources, steadiest

    def _options(
        self,
        local: Sequence[_Costs],
        sources: Sequence[_Costs],
        targets: Sequence[_Costs],
        max_tokens: int,
    ) -> list[_Option]:
        """What each way costs to compute the prompt and to answer, at one engine or at two; other
        answers that come late by it left out."""
        shared = self.shared
        ways: list[tuple[_Costs, _Costs, float, float, float]] = []
        for one in local:
            first = (one.backlog if one.backlog > one.room else one.room) + one.prefill
            ways.append((one, one, first, 0.0, one.room))
        for one in sources:
            room = one.prompt_room
            first = (one.backlog if one.backlog > room else room) + one.prefill
            first += shared.handover.value
            for at in targets:
                if at is not one:
                    late = (at.backlog if at.backlog > at.room else at.room) - first
                    late = (late if late > 0.0 else 0.0) + shared.second_token.value
                    ways.append((one, at, first, late, at.room + room))
        tpot, length = shared.limits.tpot, shared.lengths.mean
        limit = shared.limits.first or math.inf
        options: list[_Option] = []
        for source, at, first, late, wait in ways:
            in_time = 1.0 if first <= limit else 0.0
            if tpot:
                room = tpot - at.pace
                if room <= 0.0:
                    in_time = 0.0
                elif late:
                    in_time *= 1.0 - shared.lengths.ended((late + room) / room, 1, max_tokens)
            misses = 1.0 - in_time + source.num_put_off
            if tpot and at.slower >= tpot:
                misses += 1.0  # all are late there, for as long as there is one too many
            seconds = at.pace * length + late
            delay = first + seconds + OTHERS_DELAY * source.prefill * source.num_answers
            cost = misses + ROOM_WEIGHT * wait + DELAY_WEIGHT * delay
            options.append((cost, len(options), source, at, misses, first, seconds))
        return options

    def _late(
        self, at: _Costs, by: int, now: float, max_seen: int, most: float = math.inf
    ) -> float:
        """How many answers *at* an engine will be late *by* what is new there, by *max_seen* of
        them about; some more than *most* if these are more."""
        if by in at.late:
            return at.late[by]
        load, limit, ended = at.candidate.load, self.shared.limits.tpot, self.shared.lengths.ended
        step, new_step = at.step, at.slower if by & BY_ANSWER else at.step
        backlog, new_backlog = at.backlog, at.backlog + (at.prefill if by & BY_PROMPT else 0.0)
        left, new_left = limit - step, limit - new_step
        found, stride = 0.0, -(-at.num_answers // max_seen) or 1
        for answer in islice(load.answers, 0, None, stride):
            wait, had, spent = answer.first_at - now, answer.tokens or 1, limit
            before, after = backlog, new_backlog
            if wait > 0.0:
                before = before - wait if before > wait else 0.0
                after = after - wait if after > wait else 0.0
            elif answer.has_begun:
                spent -= wait
            if new_left > 0.0 and spent - had * new_step + after <= had * new_left:
                continue  # in time even so
            most_tokens = answer.max_tokens
            already = _share_late(ended, spent - had * step + before, left, had, most_tokens)
            if already < 1.0:
                used = spent - had * new_step + after
                found += _share_late(ended, used, new_left, had, most_tokens) - already
            if found * stride > most:
                break
        at.late[by] = found = found * stride
        return found


def _outlooks(
    engines: Sequence[Candidate], now: float, patience: float
) -> tuple[Candidate, Candidate, list[Candidate]]:
    """Of engines, the first of equals: that with the fewest seconds of work, less what it need not
    compute; that with the fewest where answers count, too, and a second for *patience* of them; and
    the two whose answers take the least time for each token."""
    soonest = idlest = engines[0]
    steadiest: list[Candidate] = []
    least = fewest = fast = slow = math.inf
    for one in engines:
        load, held = one.load, one.held_tokens
        if now >= load.outlook_until:
            load.look_ahead(now)
        seconds, pace = load.outlook
        if load.waiting:
            queued = load.queued + load.waiting_seconds
            seconds = queued if queued > seconds else seconds
        if held:
            seconds -= load.speed.prefill_seconds(held, 0, False)
        if seconds < least:
            least, soonest = seconds, one
        alone = len(load.answers) + patience * seconds
        if alone < fewest:
            fewest, idlest = alone, one
        if pace < fast:
            slow, fast, steadiest = fast, pace, [one, *steadiest[:1]]
        elif pace < slow:
            slow, steadiest = pace, [steadiest[0], one]
    return soonest, idlest, steadiest


def _share_late(
    ended: Callable[[float, int, int], float], used: float, left: float, had: int, most: int
) -> float:
    """Share of answers of *had* tokens so far that end late: *used* seconds are to be made up for,
    and each token makes up for *left*, or adds to them."""
    if left > 0.0:
        return ended(used / left, had, most)
    if used >= 0.0:
        return float(used > 0.0 or left < 0.0)
    return 1.0 - ended(used / left, had, most) if left else 0.0
