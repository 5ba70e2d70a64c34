"""Engines' work as a proxy knows it, and their speed. Pure: every time is an argument."""

import math
from collections.abc import Callable

from vllm_commext.proxy.policy.queue import Queue
from vllm_commext.proxy.policy.speed import EngineSpeed, Speeds, area_of

RECENT_SECONDS = 3.0
"""Length of an engine's recent time, idle time left out."""
MIN_CLEAN_TOKENS = 16
SAME_STEP_SECONDS = 0.004
"""Prompts that end within so short a time were computed together."""


class Job:
    __slots__ = (
        *("asked", "held", "is_idle", "is_kept", "is_seen", "load", "new", "seconds"),
        "until",
    )

    def __init__(self, load: "EngineLoad", new: int, held: int, now: float, is_seen: bool) -> None:
        self.load, self.new, self.held, self.asked = load, new, held, now
        self.is_seen, self.is_kept = is_seen, False
        self.is_idle = not load.jobs
        self.seconds = load.speed.prefill_seconds(new, held, self.is_idle)
        self.until = now + load.backlog(now) + self.seconds

    def end(self, now: float, is_done: bool = True) -> None:
        if self in self.load.jobs:
            self.load.end_job(self, now, is_done)

    def keep(self) -> None:
        self.is_kept = True
        self.load.unread += self.new + self.held

    def read(self) -> None:
        if self.is_kept:
            self.is_kept = False
            self.load.unread -= self.new + self.held


class Answer:
    """An answer that an engine gives, or is to give at *first_at*."""

    __slots__ = (
        *("context", "first_at", "has_begun", "is_loading", "last_at", "load"),
        *("source", "tokens"),
    )

    def __init__(self, load: "EngineLoad", context: int, due: float, is_loading: bool) -> None:
        self.load, self.context = load, context
        self.is_loading = is_loading
        self.first_at = self.last_at = due
        self.tokens = 0
        self.has_begun = False
        self.source: Job | None = None
        """The prompt at another engine whose KV cache is read for it."""

    @property
    def per_token(self) -> float:
        return (self.last_at - self.first_at) / max(self.tokens - 1, 1)

    def begin(self, now: float) -> None:
        load = self.load
        load.learn_steps(now)
        load.look(now)
        self.has_begun, self.tokens = True, 1
        self.first_at = self.last_at = now
        load.num_begun += 1
        load.context += self.context
        load.coming -= self.context

    def go_on(self, tokens: int, now: float) -> None:
        load, since = self.load, self.last_at
        self.last_at = now
        if self.is_loading:
            self.is_loading = False
            self._have_read()
            load.learn_second_token(now - since)
            since = -math.inf
        self.tokens += tokens
        load.context += tokens
        if since >= load.clean_since:
            load.clean_tokens += tokens
            load.clean_seconds += now - since

    def end(self, now: float, is_whole: bool = True) -> None:
        load = self.load
        if self not in load.answers:
            return
        self._have_read()
        load.learn_steps(now)
        load.look(now)
        del load.answers[self]
        if not self.has_begun:
            load.coming -= self.context
        else:
            load.num_begun -= 1
            load.context -= self.context + self.tokens - 1
            if is_whole:
                load.shared.lengths.add(self.tokens)

    def _have_read(self) -> None:
        if self.source is not None:
            self.source.read()


class EngineLoad:
    def __init__(self, shared: Speeds) -> None:
        self.shared = shared
        self.speed = EngineSpeed(shared)
        self.jobs: dict[Job, None] = {}
        self.answers: dict[Answer, None] = {}
        self.queue = Queue(shared.limits.first)
        self.on_done: Callable[[], None] = lambda: None
        self.num_begun = 0
        self.context = 0
        """Tokens of the answers that have begun, prompts included."""
        self.coming = 0
        """Prompt tokens of those that have not."""
        self.unread = 0
        """Tokens of prompts whose KV cache waits for a reader."""
        self.cache_tokens = 0.0
        """Size of its KV cache in tokens, 0 if unknown."""
        self._num_steps = self._others = 0.0
        self.clean_since = 0.0
        self.clean_tokens = 0
        self.clean_seconds = 0.0
        self.queued = 0.0
        """Seconds of all its prompts."""
        self._last_done = 0.0
        self._together: list[float] = []
        self.share = 0.0
        """Share of its recent time spent on prompts."""
        self._looked_at = 0.0
        self._known = 0.0
        """Share of its recent time that was observed."""

    def ask(self, new_tokens: int, held_tokens: int, now: float, is_seen: bool = True) -> Job:
        """Note a prompt. is_seen: the caller sees when it is computed."""
        self.learn_steps(now)
        self.look(now)
        job = Job(self, new_tokens, held_tokens, now, is_seen)
        self.jobs[job] = None
        self.queued += job.seconds
        self.clean_since = math.inf
        return job

    def expect(self, context_tokens: int, due: float, is_loading: bool = False) -> Answer:
        """Note an answer from about *due* on. is_loading: of another engine's prompt."""
        answer = Answer(self, context_tokens, due, is_loading)
        self.answers[answer] = None
        self.coming += context_tokens
        return answer

    def end_job(self, job: Job, now: float, is_done: bool) -> None:
        self.look(now)
        is_first = next(iter(self.jobs)) is job
        del self.jobs[job]
        self.queued -= job.seconds
        if is_done and is_first:
            self._learn_prefill(job, now)
        if is_done:
            self._last_done = now
        if not self.jobs:
            self.queued, self.clean_since = 0.0, now
        self.on_done()

    def _learn_prefill(self, job: Job, now: float) -> None:
        """Learn from the time since the prompt before it; of several that end together, as one."""
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
        """Learn from the gap between a first token of another engine's and the second."""
        if self.speed.knows_steps:
            step = self.speed.step_seconds(self.num_begun, self.context)
            self.shared.second_token.add(max(0.0, gap - step))

    def learn_steps(self, now: float) -> None:
        """Learn from the gaps until now, before what runs changes."""
        tokens, seconds = self.clean_tokens, self.clean_seconds
        if tokens >= MIN_CLEAN_TOKENS or (tokens and not self.speed.knows_steps):
            self.speed.note_steps(self.num_begun, self.context, seconds / tokens)
        self.clean_tokens, self.clean_seconds = 0, 0.0
        if not self.jobs:
            self.clean_since = now

    def backlog(self, now: float) -> float:
        """Seconds until all its prompts are computed."""
        while self.jobs:
            first = next(iter(self.jobs))
            began = max(first.asked, self._last_done)
            under_way = now - began
            if first.is_seen or under_way < first.seconds:
                done = under_way if under_way < first.seconds else first.seconds
                return self.queued - done if self.queued > done else 0.0
            self.end_job(first, now, False)  # as far as anybody can tell
            self._last_done = began + first.seconds
        return 0.0

    def wait_seconds(self, seconds: float, now: float) -> tuple[float, int]:
        """Seconds until a prompt of *seconds* begins, and how many that wait will be late by it."""
        wait = self.backlog(now)
        ahead, num_late = self.queue.ahead(seconds, now, now + wait)
        return wait + ahead, num_late

    def note_cache(self, tokens: float, used: float, num_steps: float) -> None:
        """Others' requests make the use more than is known here, shared beginnings less; which
        coming ones it counts is unknown. After the same number of steps the value is stale."""
        self.cache_tokens = tokens
        if num_steps == self._num_steps:
            self._others = min(0.0, self._others)
            return
        self._num_steps = num_steps
        surely = self.context + self.unread
        perhaps = surely + self.coming + sum(job.new + job.held for job in self.jobs)
        self._others = max(0.0, used - perhaps) + min(0.0, used - surely)

    def room_seconds(self, tokens: float, pace: float) -> float:
        """Seconds until *tokens* more fit its KV cache: answers leave it when they end, at *pace*
        seconds a token, and prompts for other engines when they are read."""
        if not self.cache_tokens:
            return 0.0
        used = self._others + self.context + self.coming + self.unread
        if used <= 0.0:
            return 0.0
        length = self.shared.lengths.mean
        lacking = used + tokens + len(self.answers) * length / 2.0 - self.cache_tokens
        if lacking <= 0.0:
            return 0.0
        unread = min(self.unread, used)
        stays = (used - unread) * length * pace + unread * self.shared.second_token.value
        return lacking / min(used, self.cache_tokens) * stays / used

    def pace(self, step: float) -> float:
        """Seconds a token with steps of *step* seconds and the recent share of prompts."""
        left = 1.0 - self.share
        return step / (left if left > 0.05 else 0.05)

    def look(self, now: float) -> None:
        """Bring the recent means up to now, before something changes."""
        past = now - self._looked_at
        if past > 0.0:
            self._looked_at = now
            if self.jobs or self.answers:
                kept = math.exp(-past / RECENT_SECONDS)
                self._known = self._known * kept + 1.0 - kept
                new = (1.0 - kept) / self._known
                kept = 1.0 - new
                self.share = self.share * kept + (new if self.jobs else 0.0)
