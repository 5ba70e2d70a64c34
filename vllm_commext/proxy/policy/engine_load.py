"""Engines' work as a proxy knows it. Pure: every time is an argument."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_commext.limits import Limits
from vllm_commext.proxy.policy.answer_lengths import Lengths
from vllm_commext.proxy.policy.engine_speed import EngineSpeed, Mean, SharedSpeed, area_of
from vllm_commext.proxy.policy.prompt_queue import Queue

RECENT_SECONDS, RECENT_ANSWERS = 3.0, 2.0
"""Length of an engine's recent time, idle time left out, at most: in seconds and in answers."""
MIN_CLEAN_TOKENS = 16
SAME_STEP_SECONDS = 0.004
"""Prompts that end within so short a time were computed together."""


@dataclass(eq=False, slots=True)
class Job:
    """A prompt that an engine computes, or is to compute until about *until*."""

    _load: "EngineLoad"
    new: int
    held: int
    asked: float
    is_seen: bool
    is_kept: bool = False
    seconds: float = field(init=False)
    until: float = field(init=False)

    def __post_init__(self) -> None:
        load = self._load
        self.seconds = load.speed.prefill_seconds(self.new, self.held)
        self.until = self.asked + load.backlog(self.asked) + self.seconds

    def end(self, now: float, is_done: bool = True) -> None:
        if self in self._load.prompts.jobs:
            self._load.end_job(self, now, is_done)

    def keep(self) -> None:
        """Note that its KV cache waits for a reader."""
        self.is_kept = True
        self._load.cache.unread += self.new + self.held

    def read(self) -> None:
        if self.is_kept:
            self.is_kept = False
            self._load.cache.unread -= self.new + self.held


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that an engine gives, or is to give at *first_at*. source: the prompt at another
    engine whose KV cache is read for it."""

    _load: "EngineLoad"
    context: int
    first_at: float
    _is_loading: bool
    tokens: int = 0
    has_begun: bool = False
    source: Job | None = None
    _last_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._last_at = self.first_at

    @property
    def per_token(self) -> float:
        return (self._last_at - self.first_at) / max(self.tokens - 1, 1)

    def begin(self, now: float) -> None:
        self._load.change(now)
        self._load.answers.begin(self)
        self.has_begun, self.tokens = True, 1
        self.first_at = self._last_at = now

    def go_on(self, tokens: int, now: float) -> None:
        load, since = self._load, self._last_at
        self._last_at = now
        self.tokens += tokens
        load.answers.context += tokens
        if self._is_loading:
            self._is_loading = False
            self._have_read()
            load.learn_second_token(now - since)
        else:
            load.gaps.note(tokens, since, now)

    def end(self, now: float, is_whole: bool = True) -> None:
        load = self._load
        if self in load.answers:
            self._have_read()
            load.change(now)
            load.answers.end(self)
            if self.has_begun and is_whole:
                load.shared.lengths.add(self.tokens)

    def _have_read(self) -> None:
        if self.source is not None:
            self.source.read()


@dataclass(eq=False, slots=True)
class Planned:
    """An answer whose prompt waits for its turn. It counts until *until*, then it was put off."""

    _load: "EngineLoad"
    tokens: int
    until: float

    def end(self) -> None:
        self._load.planned.pop(self, None)


class Prompts:
    """Prompts that an engine computes, in order. seconds: of all of them."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.jobs: dict[Job, None] = {}
        self.seconds = 0.0
        self._speed = speed
        self._last_done = 0.0
        self._together: list[float] = []

    def add(self, job: Job) -> None:
        self.jobs[job] = None
        self.seconds += job.seconds

    def end(self, job: Job, now: float, is_done: bool) -> None:
        is_first = next(iter(self.jobs)) is job
        del self.jobs[job]
        self.seconds = self.seconds - job.seconds if self.jobs else 0.0
        if is_done:
            if is_first:
                self._learn(job, now)
            self._last_done = now

    def _learn(self, job: Job, now: float) -> None:
        """Learn from the time since the prompt before it; of several that end together, as one."""
        seconds = now - max(job.asked, self._last_done)
        row = [job.new, area_of(job.new, job.held), seconds]
        if self._together and seconds > SAME_STEP_SECONDS:
            self._speed.note_prefill(*self._together)
            self._together = []
        self._together = [a + b for a, b in zip(self._together or [0.0] * 3, row, strict=True)]
        if not self._speed.is_known:
            self._speed.note_prefill(*self._together)

    def left(self, now: float) -> float:
        """Seconds until all are computed, as far as the first one's end is seen."""
        if not self.jobs:
            return 0.0
        first = next(iter(self.jobs))
        done = min(now - max(first.asked, self._last_done), first.seconds)
        return self.seconds - done if self.seconds > done else 0.0

    def unseen(self, now: float) -> Job | None:
        """The first prompt, if no one sees its end and its time is over, which is noted."""
        first = next(iter(self.jobs), None)
        if first is None or first.is_seen:
            return None
        until = max(first.asked, self._last_done) + first.seconds
        if now < until:
            return None
        self._last_done = until
        return first


class Answers(dict[Answer, None]):
    """Answers that an engine gives or is to give. context: tokens of those that have begun, prompts
    included; coming: of the others."""

    __slots__ = "coming", "context", "num_begun"

    def __init__(self) -> None:
        super().__init__()
        self.num_begun = self.context = self.coming = 0

    def add(self, answer: Answer) -> None:
        self[answer] = None
        self.coming += answer.context

    def begin(self, answer: Answer) -> None:
        self.num_begun += 1
        self.context += answer.context
        self.coming -= answer.context

    def end(self, answer: Answer) -> None:
        del self[answer]
        if answer.has_begun:
            self.num_begun -= 1
            self.context -= answer.context + answer.tokens - 1
        else:
            self.coming -= answer.context


class Gaps:
    """Times between tokens while no prompt is computed. since: from when on."""

    def __init__(self) -> None:
        self._since, self._tokens, self._seconds = 0.0, 0, 0.0

    def note(self, tokens: int, since: float, now: float) -> None:
        if since >= self._since:
            self._tokens += tokens
            self._seconds += now - since

    def take(self, since: float) -> tuple[int, float]:
        """Tokens and their seconds so far. Those count that come after others after *since*."""
        found = self._tokens, self._seconds
        self._since, self._tokens, self._seconds = since, 0, 0.0
        return found


class Recent:
    """share: part of an engine's recent time that went to prompts; seconds: all of theirs."""

    def __init__(self) -> None:
        self.share = self.seconds = self._until = self._known = 0.0

    def look(self, now: float, length: float, has_prompts: bool) -> None:
        """Bring the share of *length* seconds up to now, before something changes; 0: no work."""
        past, self._until = now - self._until, now if now > self._until else self._until
        if past > 0.0 and length:
            new = -math.expm1(-past / (length if length < RECENT_SECONDS else RECENT_SECONDS))
            self._known = known = self._known + new * (1.0 - self._known)
            new /= known
            self.share = self.share * (1.0 - new) + (new if has_prompts else 0.0)
            self.seconds += past if has_prompts else 0.0

    def pace(self, step: float) -> float:
        """Seconds a token with steps of *step* seconds and the recent share of prompts."""
        return step / (1.0 - self.share if self.share < 0.95 else 0.05)


class Cache:
    """An engine's KV cache in tokens, as its metrics page has it. size: 0 if unknown; unread: of
    prompts that wait for a reader; others: used beyond what is known here."""

    def __init__(self) -> None:
        self.unread = 0
        self.size = self.others = self._num_steps = 0.0

    def note(self, size: float, used: float, num_steps: float, surely: float, more: float) -> None:
        """Others' requests make the use more than is known here, shared beginnings less; which of
        those to come it counts is unknown. After the same number of steps the value is stale."""
        self.size = size
        if num_steps == self._num_steps:
            self.others = min(0.0, self.others)
            return
        self._num_steps = num_steps
        self.others = max(0.0, used - surely - more) + min(0.0, used - surely)

    def forget(self) -> None:
        self.size = 0.0


class Speeds(SharedSpeed):
    """What engines share: models, lengths of answers, and the limits."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits, self.lengths = limits or Limits(), Lengths()
        super().__init__(self.limits.tpot / 2.0)
        self.handover, self.second_token = Mean(), Mean()
        """Seconds that a hand-over delays the first token, and then the second one besides."""


class EngineLoad:
    """What one engine has to do. when_done: called when a prompt has ended."""

    def __init__(self, shared: Speeds | None = None) -> None:
        self.shared = shared = shared or Speeds()
        self.speed = EngineSpeed(shared)
        self.prompts, self.answers = Prompts(self.speed), Answers()
        self.queue = Queue(shared.limits.first)
        self.planned: dict[Planned, None] = {}
        self.gaps, self.recent, self.cache = Gaps(), Recent(), Cache()
        self.when_done: list[Callable[[], None]] = []

    def ask(self, new_tokens: int, held_tokens: int, now: float, is_seen: bool = True) -> Job:
        """Note a prompt. is_seen: the caller sees when it is computed."""
        self.change(now)
        job = Job(self, new_tokens, held_tokens, now, is_seen)
        self.prompts.add(job)
        self.gaps.take(math.inf)
        return job

    def end_job(self, job: Job, now: float, is_done: bool) -> None:
        self.look(now)
        self.prompts.end(job, now, is_done)
        if not self.prompts.jobs:
            self.gaps.take(now)
        for called in self.when_done:
            called()

    def to_come(self, now: float) -> tuple[float, float]:
        """Planned answers that are given at a time, and their tokens: short ones make room."""
        self.planned = {one: None for one in self.planned if one.until >= now}
        limits, tokens = self.shared.limits, self.shared.lengths.mean
        share = min(1.0, tokens * limits.tpot / (limits.first or math.inf) or 1.0)
        return share * len(self.planned), share * sum([one.tokens for one in self.planned])

    def expect(self, context_tokens: int, due: float, is_loading: bool = False) -> Answer:
        """Note an answer from about *due* on. is_loading: of another engine's prompt."""
        answer = Answer(self, context_tokens, due, is_loading)
        self.answers.add(answer)
        return answer

    def change(self, now: float) -> None:
        """Learn from the time until now, before what runs changes."""
        tokens, seconds = self.gaps.take(math.inf if self.prompts.jobs else now)
        if tokens >= MIN_CLEAN_TOKENS or (tokens and not self.speed.knows_steps):
            self.speed.note_steps(self.answers.num_begun, self.answers.context, seconds / tokens)
        self.look(now)

    def look(self, now: float) -> None:
        has_prompts, length, shared = bool(self.prompts.jobs), 0.0, self.shared
        if has_prompts or self.answers:
            length = RECENT_ANSWERS * shared.lengths.mean * shared.limits.tpot or RECENT_SECONDS
        self.recent.look(now, length, has_prompts)

    def learn_second_token(self, gap: float) -> None:
        """Learn from the gap between a first token of another engine's and the second."""
        if self.speed.knows_steps:
            step = self.speed.step_seconds(self.answers.num_begun, self.answers.context)
            self.shared.second_token.add(max(0.0, gap - step))

    def backlog(self, now: float) -> float:
        """Seconds until all its prompts are computed."""
        if not self.prompts.jobs:
            return 0.0
        while (job := self.prompts.unseen(now)) is not None:
            self.end_job(job, now, False)  # as far as anybody can tell
        return self.prompts.left(now)

    def wait_seconds(self, seconds: float, now: float) -> tuple[float, int]:
        """Seconds until a prompt of *seconds* begins, and how many that wait will be late by it."""
        wait = self.backlog(now)
        ahead, num_late = self.queue.ahead(seconds, now, now + wait)
        return wait + ahead, num_late

    def note_cache(self, size: float, used: float, num_steps: float) -> None:
        """Note its metrics page's size of the KV cache and use of it, in tokens."""
        coming = self.answers.coming + sum(job.new + job.held for job in self.prompts.jobs)
        surely = self.answers.context + self.cache.unread
        self.cache.note(size, used, num_steps, surely, coming)

    def room_seconds(self, tokens: float, pace: float) -> float:
        """Seconds until *tokens* more fit its KV cache: answers leave it when they end, at *pace*
        seconds a token, and prompts for other engines when they are read."""
        cache, answers, length = self.cache, self.answers, self.shared.lengths.mean
        if not (size := cache.size):
            return 0.0
        used = cache.others + answers.context + answers.coming + cache.unread
        lacking = used + tokens + len(answers) * length / 2.0 - size
        if lacking <= 0.0 or used <= 0.0:
            return 0.0
        unread = min(cache.unread, used)
        stays = (used - unread) * length * pace + unread * self.shared.second_token.value
        return lacking / min(used, size) * stays / used
