"""What engines work on as a proxy knows it, and what that tells of their speed. Pure: every time is
an argument.
"""

import math
from collections.abc import Callable, Sequence
from heapq import heappush, heappushpop

from vllm_commext.proxy.engine_speed import EngineSpeed, Speeds, area_of

RECENT_SECONDS = 10.0
"""An engine's recent time is about so long, of that in which it has had something to do: load that
comes back after a pause is foreseen from its first request on."""
OUTLOOK_SECONDS = 0.05
"""What is foreseen of an engine by its recent time is at most so old."""
PATIENCE = 4.0
"""A prompt that waits is overtaken by shorter ones for so many times as long as it takes itself,
and by those that can be in time for as many times the limit."""
IN_TIME = 0.95
"""Share of a limit that a prompt is planned to be computed in."""
MIN_CLEAN_TOKENS = 16
SAME_STEP_SECONDS = 0.004
"""Prompts that end within so short a time were computed together."""


class Job:
    """A prompt that an engine computes."""

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
        """The prompt is computed, or nobody waits for it any more."""
        if self in self.load.jobs:
            self.load.end_job(self, now, is_done)

    def keep(self) -> None:
        """It is computed, and its KV cache waits for a reader."""
        self.is_kept = True
        self.load.unread += self.new + self.held

    def read(self) -> None:
        """Nobody will read its KV cache from now on."""
        if self.is_kept:
            self.is_kept = False
            self.load.unread -= self.new + self.held


class Answer:
    """An answer that an engine gives, or is to give at *first_at*."""

    __slots__ = (
        *("context", "first_at", "has_begun", "is_loading", "last_at", "load"),
        *("max_tokens", "source", "tokens"),
    )

    def __init__(
        self, load: "EngineLoad", context: int, max_tokens: int, due: float, is_loading: bool
    ) -> None:
        self.load, self.context, self.max_tokens = load, context, max_tokens
        self.is_loading = is_loading
        self.first_at = self.last_at = due
        self.tokens = 0
        self.has_begun = False
        self.source: Job | None = None
        """The prompt at another engine whose KV cache is read for it."""

    @property
    def per_token(self) -> float:
        """Seconds to each token after the first so far, as a mean."""
        return (self.last_at - self.first_at) / max(self.tokens - 1, 1)

    def begin(self, now: float) -> None:
        """Its first token is there."""
        load = self.load
        load.learn_steps(now)
        load.look(now)
        self.has_begun, self.tokens = True, 1
        self.first_at = self.last_at = now
        load.num_begun += 1
        load.context += self.context
        load.coming -= self.context

    def go_on(self, tokens: int, now: float) -> None:
        """There are *tokens* more of it."""
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
        """It has ended, or nobody waits for it any more."""
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


class Waiting:
    """A prompt that waits to be sent since a time, and will take some seconds."""

    __slots__ = ("due", "seconds", "since")

    def __init__(self, since: float, seconds: float) -> None:
        self.since, self.seconds = since, seconds
        self.due = since + PATIENCE * seconds


def next_of(waiting: Sequence[Waiting], now: float, limit: float) -> Waiting:
    """Which is sent to an engine that is free, for the most to begin within *limit*, 0 for none."""
    if not limit:
        return min(waiting, key=lambda one: one.due)
    for one in waiting:
        if now > one.since + PATIENCE * limit:
            return one
    kept, _ = in_time(waiting, now, limit)
    for one, seconds in zip(waiting, kept, strict=True):
        if one.seconds == seconds:
            return one
    return min(waiting, key=lambda one: one.seconds)


def in_time(waiting: Sequence[Waiting], now: float, limit: float) -> tuple[list[float], int]:
    """The most that can be computed within *limit*, in order, by an engine that is free at a
    time: seconds of each, 0 for the longest, which are put off. And the idx of that which is put
    off for the last one, -1 for none."""
    kept = [one.seconds for one in waiting]
    longest: list[tuple[float, int]] = []
    end, margin, put_off = now, IN_TIME * limit, -1
    for idx, seconds in enumerate(kept):
        end += seconds
        if end > waiting[idx].since + margin:
            less, put_off = heappushpop(longest, (-seconds, idx))
            kept[put_off] = 0.0
            end += less
        else:
            heappush(longest, (-seconds, idx))
            put_off = -1
    return kept, put_off


class EngineLoad:
    """One engine's work as the proxy knows it, and its speed."""

    def __init__(self, shared: Speeds) -> None:
        self.shared = shared
        self.speed = EngineSpeed(shared)
        self.jobs: dict[Job, None] = {}
        self.answers: dict[Answer, None] = {}
        self.waiting: dict[Waiting, None] = {}
        """Changed by `wait` and `leave`."""
        self._waiting_seconds: float | None = 0.0
        self.on_done: Callable[[], None] = lambda: None
        """Called when the engine has one prompt less."""
        self.num_begun = 0
        self.context = 0
        """Tokens before the answers that have begun, and of these."""
        self.coming = 0
        """Tokens before those that have not."""
        self.unread = 0
        """Tokens of prompts whose KV cache waits for a reader."""
        self.cache_tokens = 0.0
        """Tokens that its KV cache has room for, 0 where that is not known."""
        self._num_steps = self._others = 0.0
        self.clean_since = 0.0
        self.clean_tokens = 0
        self.clean_seconds = 0.0
        self.queued = 0.0
        """Seconds that its prompts take, that which it computes included."""
        self._last_done = 0.0
        self._together: list[float] = []
        self.share = 0.0
        """Of its recent time, in which it has computed prompts."""
        self.mean_answers = 0.0
        self.mean_context = 0.0
        self._looked_at = 0.0
        self._known = 0.0
        """Share of its recent time that it has been seen for: means are over that alone."""
        self.outlook = 0.0, 0.0
        """Seconds of its work, and to each token of its answers by its recent time, both with those
        until its KV cache has room at all. It holds before a time; then `look_ahead` makes it."""
        self.outlook_until = 0.0

    def ask(self, new_tokens: int, held_tokens: int, now: float, is_seen: bool = True) -> Job:
        """The engine is asked to compute *new_tokens* of a prompt behind *held_tokens*. is_seen:
        whoever asks sees when it has."""
        self.learn_steps(now)
        self.look(now)
        job = Job(self, new_tokens, held_tokens, now, is_seen)
        self.jobs[job] = None
        self.queued += job.seconds
        self.clean_since = math.inf
        return job

    def wait(self, prompt: Waiting) -> None:
        """A prompt waits to be sent to the engine."""
        self.waiting[prompt], self._waiting_seconds = None, None

    def leave(self, prompt: Waiting) -> None:
        """It does not any more."""
        del self.waiting[prompt]
        self._waiting_seconds = None

    @property
    def waiting_seconds(self) -> float:
        """Seconds that all take which wait."""
        if self._waiting_seconds is None:
            self._waiting_seconds = sum([one.seconds for one in self.waiting])
        return self._waiting_seconds

    def expect(
        self, context_tokens: int, max_tokens: int, due: float, is_loading: bool = False
    ) -> Answer:
        """The engine is to answer from about *due* on. is_loading: another one's prompt."""
        answer = Answer(self, context_tokens, max_tokens, due, is_loading)
        self.answers[answer] = None
        self.coming += context_tokens
        return answer

    def end_job(self, job: Job, now: float, is_done: bool) -> None:
        """See `Job.end`."""
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
        if self.speed.knows_steps:
            step = self.speed.step_seconds(self.num_begun, self.context)
            self.shared.second_token.add(max(0.0, gap - step))

    def learn_steps(self, now: float) -> None:
        """What is running changes: learn from the gaps until now."""
        tokens, seconds = self.clean_tokens, self.clean_seconds
        if tokens >= MIN_CLEAN_TOKENS or (tokens and not self.speed.knows_steps):
            self.speed.note_steps(self.num_begun, self.context, seconds / tokens)
        self.clean_tokens, self.clean_seconds = 0, 0.0
        if not self.jobs:
            self.clean_since = now

    def backlog(self, now: float) -> float:
        """Seconds until the prompts that it has been asked for are computed."""
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
        """Seconds until a prompt that takes so long is begun, and how many that wait will be late
        by it."""
        wait = self.backlog(now)
        if not self.waiting:
            return wait, 0
        limit = self.shared.limits.first
        if not limit:
            due = now + PATIENCE * seconds
            return wait + sum([one.seconds for one in self.waiting if one.due <= due]), 0
        kept, put_off = in_time([*self.waiting, Waiting(now, seconds)], now + wait, limit)
        if put_off == len(self.waiting):
            return wait + self.waiting_seconds, 0
        return wait + sum(kept) - seconds, int(put_off >= 0)

    def note_cache(self, tokens: float, used: float, num_steps: float) -> None:
        """Of its KV cache, which has room for *tokens*, it says that so many are in use: more than
        is known here by others' requests, less where prompts share their beginnings. Whether those
        that are coming are among them cannot be told. An engine says it anew by each step, so that
        one that has taken no more of them answers nobody: what it said may be long past."""
        self.cache_tokens = tokens
        if num_steps == self._num_steps:
            self._others = min(0.0, self._others)
            return
        self._num_steps = num_steps
        surely = self.context + self.unread
        perhaps = surely + self.coming + sum(job.new + job.held for job in self.jobs)
        self._others = max(0.0, used - perhaps) + min(0.0, used - surely)

    def room_seconds(self, tokens: float, pace: float) -> float:
        """Seconds until *tokens* more fit its KV cache, where each token of an answer takes *pace*
        seconds: answers leave it when they end, prompts of others' answers when they are read."""
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
        """Seconds to each token of an answer, where a step takes *step* seconds, and prompts as
        much of the time as of late."""
        left = 1.0 - self.share
        return step / (left if left > 0.05 else 0.05)

    def look_ahead(self, now: float) -> None:
        """Make the outlook: it holds until a prompt or an answer has come or gone, and no longer
        than `OUTLOOK_SECONDS`."""
        self.look(now)
        step = self.speed.step_seconds(self.mean_answers, self.mean_context)
        pace = self.pace(step)
        room = self.room_seconds(0.0, pace)
        self.outlook = self.queued if self.queued > room else room, pace + room
        self.outlook_until = now + OUTLOOK_SECONDS

    def look(self, now: float) -> None:
        """Bring what is known of its recent time up to now, before something changes."""
        self.outlook_until = 0.0
        past = now - self._looked_at
        if past > 0.0:
            self._looked_at = now
            if self.jobs or self.answers:
                kept = math.exp(-past / RECENT_SECONDS)
                self._known = self._known * kept + 1.0 - kept
                new = (1.0 - kept) / self._known
                kept = 1.0 - new
                self.share = self.share * kept + (new if self.jobs else 0.0)
                self.mean_answers = self.mean_answers * kept + new * len(self.answers)
                self.mean_context = self.mean_context * kept + new * self.context
