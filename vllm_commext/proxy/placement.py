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

from vllm_commext.proxy.engine_speed import EngineSpeed, Speeds, area_of

MAX_SEEN = 16
"""Answers of one engine that are looked at for a request; they stand for the others."""
MAX_CANDIDATES = 4
"""Engines looked at for each of both steps."""
WINDOW = 32
"""Engines among which those are found, others for each request."""
SHARE_SECONDS = 6.0
"""An engine's share of time for prefills is that of about so long."""
DELAY_WEIGHT = 0.02
"""Missed limits that one second of delay is worth."""
OTHERS_DELAY = 0.1
"""What a second of other answers' delay counts for, beside one of the request's own."""
MIN_CLEAN_TOKENS = 16
SAME_STEP_SECONDS = 0.004
"""Prompts that end within so short a time were computed together."""


@dataclass(frozen=True)
class Limits:
    """Operator's limits in seconds, 0 for none: to the first token, and for each token after it as
    a mean over the answer."""

    first_token: float = 0.0
    per_token: float = 0.0


class Job:
    """A prompt that an engine computes."""

    __slots__ = ("asked", "held", "is_idle", "is_seen", "load", "new", "seconds", "until")

    def __init__(self, load: "EngineLoad", new: int, held: int, now: float, is_seen: bool) -> None:
        self.load, self.new, self.held, self.asked = load, new, held, now
        self.is_seen = is_seen
        self.is_idle = not load.jobs
        self.seconds = load.speed.prefill_seconds(new, held, self.is_idle)
        self.until = now + load.backlog(now) + self.seconds

    def end(self, now: float, is_done: bool = True) -> None:
        """The prompt is computed, or nobody waits for it any more."""
        if self in self.load.jobs:
            self.load.end_job(self, now, is_done)


class Answer:
    """An answer that an engine gives, or is to give at *first_at*."""

    __slots__ = (
        *("context", "first_at", "has_begun", "is_loading", "last_at", "load"),
        *("max_tokens", "tokens"),
    )

    def __init__(
        self, load: "EngineLoad", context: int, max_tokens: int, due: float, is_loading: bool
    ) -> None:
        self.load, self.context, self.max_tokens = load, context, max_tokens
        self.is_loading = is_loading
        self.first_at = self.last_at = due
        self.tokens = 0
        self.has_begun = False

    def begin(self, now: float) -> None:
        """Its first token is there."""
        load = self.load
        load.learn_steps(now)
        self.has_begun, self.tokens = True, 1
        self.first_at = self.last_at = now
        load.num_begun += 1
        load.context += self.context

    def go_on(self, tokens: int, now: float) -> None:
        """There are *tokens* more of it."""
        load, since = self.load, self.last_at
        self.last_at = now
        if self.is_loading:
            self.is_loading = False
            load.learn_second_token(now - since)
            since = -math.inf
        self.tokens += tokens
        load.context += tokens
        if since >= load.clean_since:
            load.clean_tokens += tokens
            load.clean_seconds += now - since

    def end(self, now: float, is_whole: bool = True) -> None:
        """It has ended, or nobody waits for it any more."""
        load = self.load
        if self not in load.answers:
            return
        load.learn_steps(now)
        del load.answers[self]
        if self.has_begun:
            load.num_begun -= 1
            load.context -= self.context + self.tokens - 1
            if is_whole:
                load.shared.lengths.add(self.tokens)


class EngineLoad:
    """One engine's work as the proxy knows it, and its speed."""

    def __init__(self, shared: Speeds) -> None:
        self.shared = shared
        self.speed = EngineSpeed(shared)
        self.jobs: dict[Job, None] = {}
        self.answers: dict[Answer, None] = {}
        self.num_begun = 0
        self.context = 0
        self.clean_since = 0.0
        self.clean_tokens = 0
        self.clean_seconds = 0.0
        self._queued = 0.0
        self._last_done = 0.0
        self._together: list[float] = []
        self._share = 0.0
        self._share_at = 0.0

    def ask(self, new_tokens: int, held_tokens: int, now: float, is_seen: bool = True) -> Job:
        """The engine is asked to compute *new_tokens* of a prompt behind *held_tokens*. is_seen:
        whoever asks sees when it has."""
        self.learn_steps(now)
        self.prefill_share(now)
        job = Job(self, new_tokens, held_tokens, now, is_seen)
        self.jobs[job] = None
        self._queued += job.seconds
        self.clean_since = math.inf
        return job

    def expect(
        self, context_tokens: int, max_tokens: int, due: float, is_loading: bool = False
    ) -> Answer:
        """The engine is to answer from about *due* on. is_loading: another one's prompt."""
        answer = Answer(self, context_tokens, max_tokens, due, is_loading)
        self.answers[answer] = None
        return answer

    def end_job(self, job: Job, now: float, is_done: bool) -> None:
        """See `Job.end`."""
        self.prefill_share(now)
        is_first = next(iter(self.jobs)) is job
        del self.jobs[job]
        self._queued -= job.seconds
        if is_done and is_first:
            self._learn_prefill(job, now)
        if is_done:
            self._last_done = now
        if not self.jobs:
            self._queued, self.clean_since = 0.0, now

    def _learn_prefill(self, job: Job, now: float) -> None:
        """The time since the one before it was done is its own; of several that end together, it is
        that of all."""
        seconds = now - max(job.asked, self._last_done)
        row = [job.new, area_of(job.new, job.held), float(job.is_idle), seconds]
        if self._together and seconds > SAME_STEP_SECONDS:
            new, area, num_idle, took = self._together
            self.speed.note_prefill(new, area, num_idle, took)
            self._together = []
        self._together = [a + b for a, b in zip(self._together or [0.0] * 4, row, strict=True)]
        if not self.speed.is_known:
            self.speed.note_prefill(*self._together)

    def learn_second_token(self, gap: float) -> None:
        """The second token came *gap* seconds after the first, which another engine computed."""
        if self.speed.is_known:
            step = self.speed.step_seconds(self.num_begun, self.context)
            self.shared.second_token.add(max(0.0, gap - step))

    def learn_steps(self, now: float) -> None:
        """What is running changes: learn from the gaps until now."""
        tokens, seconds = self.clean_tokens, self.clean_seconds
        if tokens >= MIN_CLEAN_TOKENS or (tokens and not self.speed.is_known):
            self.speed.note_steps(self.num_begun, self.context, seconds / tokens)
        self.clean_tokens, self.clean_seconds = 0, 0.0
        if not self.jobs:
            self.clean_since = now

    def backlog(self, now: float) -> float:
        """Seconds until the prompts that it has been asked for are computed."""
        while True:
            first = next(iter(self.jobs), None)
            if first is None:
                return 0.0
            began = max(first.asked, self._last_done)
            under_way = now - began
            if first.is_seen or under_way < first.seconds:
                break
            self.end_job(first, now, False)  # as far as anybody can tell
            self._last_done = began + first.seconds
        return max(0.0, self._queued - min(first.seconds, under_way))

    def prefill_share(self, now: float) -> float:
        """Share of its recent time in which it has computed prompts."""
        past = now - self._share_at
        if past > 0.0:
            kept = math.exp(-past / SHARE_SECONDS)
            self._share = self._share * kept + (1.0 - kept) * bool(self.jobs)
            self._share_at = now
        return self._share


@dataclass(frozen=True)
class Candidate:
    """An engine that may take a step, with what it holds of the prompt. key: the caller's own."""

    load: EngineLoad
    held_tokens: int = 0
    key: object = None


@dataclass(frozen=True)
class Placement:
    """Where one request goes, with what is expected of it, in seconds. prefill is decode where one
    engine does both. misses: requests more than without it that are expected to miss a limit."""

    prefill: Candidate
    decode: Candidate
    first_token: float = 0.0
    per_token: float = 0.0
    misses: float = 0.0

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode


@dataclass
class _Costs:
    """Of one engine: time until it is free, time for the prompt, time of a step with one answer
    more, and how many of its answers come late with: the prefill, the answer, both."""

    candidate: Candidate
    backlog: float
    prefill: float
    step: float
    share: float
    by_prefill: float
    by_answer: float
    by_both: float


class Planner:
    """Places requests. shared: what engines have in common, for their loads too."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.shared = Speeds()

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
        costs: dict[int, _Costs] = {}

        def of(candidate: Candidate) -> _Costs:
            found = costs.get(id(candidate))
            if found is None:
                found = costs[id(candidate)] = self._costs(candidate, tokens, now)
            return found

        best, least = None, math.inf
        for one in decode:
            cost, placement = self._local(of(one), max_tokens)
            if cost < least:
                best, least = placement, cost
        if self.limits.per_token:
            for source in prefill:
                for one in decode:
                    if one.load is source.load:
                        continue
                    cost, placement = self._handed_over(of(source), of(one), max_tokens)
                    if cost < least:
                        best, least = placement, cost
        return best

    def _local(self, at: _Costs, max_tokens: int) -> tuple[float, Placement]:
        first = at.backlog + at.prefill
        misses, per_token = self._own_misses(first, 0.0, at, max_tokens)
        misses += at.by_both
        delay = first + OTHERS_DELAY * at.prefill * len(at.candidate.load.answers)
        cost = misses + DELAY_WEIGHT * (delay + self._decode_seconds(at))
        return cost, Placement(at.candidate, at.candidate, first, per_token, misses)

    def _handed_over(self, source: _Costs, at: _Costs, max_tokens: int) -> tuple[float, Placement]:
        first = source.backlog + source.prefill + self.shared.handover.value
        late = max(0.0, at.backlog - first) + self.shared.second_token.value
        misses, per_token = self._own_misses(first, late, at, max_tokens)
        misses += source.by_prefill + at.by_answer
        delay = first + late
        delay += OTHERS_DELAY * source.prefill * len(source.candidate.load.answers)
        cost = misses + DELAY_WEIGHT * (delay + self._decode_seconds(at))
        return cost, Placement(source.candidate, at.candidate, first, per_token, misses)

    def _decode_seconds(self, at: _Costs) -> float:
        return self.shared.lengths.mean * at.step / max(1.0 - at.share, 0.05)

    def _own_misses(
        self, first: float, late: float, at: _Costs, max_tokens: int
    ) -> tuple[float, float]:
        """How likely the request itself misses a limit, and its time per token."""
        limits = self.limits
        step = at.step / max(1.0 - at.share, 0.05)
        mean = max(min(self.shared.lengths.mean, max_tokens) - 1.0, 1.0)
        per_token = step + late / mean
        in_time = 1.0
        if limits.first_token:
            in_time = 1.0 - _ramp(first / limits.first_token)
        if limits.per_token:
            in_time *= 1.0 - self._late_share(late, 1, max_tokens, step)
        return 1.0 - in_time, per_token

    def _late_share(self, spent: float, tokens: int, max_tokens: int, step: float) -> float:
        """Share of answers with *tokens* so far, for which *spent* seconds more were or will be
        waited than steps take, that end above the limit."""
        limit = self.limits.per_token
        room = limit - step
        lengths = self.shared.lengths
        needed = spent + limit - tokens * step
        if room <= 0.0:
            if needed >= 0.0 or room == 0.0:
                return 1.0
            return lengths.share_longer(needed / room, tokens)
        needed /= room
        if needed <= tokens:
            return 0.0
        return 1.0 if needed > max_tokens else 1.0 - lengths.share_longer(needed, tokens)

    def _costs(self, candidate: Candidate, tokens: int, now: float) -> _Costs:
        load = candidate.load
        held = min(candidate.held_tokens, tokens - 1)
        backlog = load.backlog(now)
        seconds = load.speed.prefill_seconds(tokens - held, held, not load.jobs)
        num, context = len(load.answers), load.context
        step = load.speed.step_seconds(num, context)
        slower = load.speed.step_seconds(num + 1, context + tokens)
        found = _Costs(candidate, backlog, seconds, slower, load.prefill_share(now), 0, 0, 0)
        if not self.limits.per_token or not load.answers:
            return found
        stride = -(-num // MAX_SEEN)
        late = self._late_share
        seen = list(load.answers)[::stride]
        for answer in seen:
            wait = max(0.0, answer.first_at - now)
            spent = max(0.0, now - answer.first_at) if answer.has_begun else 0.0
            had, most = max(answer.tokens, 1), answer.max_tokens
            before, after = max(0.0, backlog - wait), max(0.0, backlog + seconds - wait)
            already = late(spent + before, had, most, step)
            found.by_prefill += late(spent + after, had, most, step) - already
            found.by_answer += late(spent + before, had, most, slower) - already
            found.by_both += late(spent + after, had, most, slower) - already
        scale = num / len(seen)
        found.by_prefill *= scale
        found.by_answer *= scale
        found.by_both *= scale
        return found


def _ramp(share: float) -> float:
    """How likely a limit is missed of which *share* is expected to be needed."""
    return min(1.0, max(0.0, (share - 0.85) / 0.25))
