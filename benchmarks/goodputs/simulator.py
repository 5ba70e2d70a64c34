"""Engines under open load, simulated step by step, behind a policy that places requests.

An engine's step has a budget of tokens: each running answer takes one, and the prompt that is
begun as much as there is of it. What is left of it goes to answers whose prompts have been read,
lets in those whose prompts are to be read, and begins other prompts in the order in which they
came. So an answer that is handed over waits where a prompt takes whole steps. Everything follows
from the arguments.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_commext.bench.workload import Arrival
from vllm_commext.limits import Limits
from vllm_commext.proxy.policy.engine_speed import area_of


@dataclass(frozen=True)
class Hardware:
    """An engine's times, in seconds: of a step by itself, for each running answer, each token
    before it (prompt_context: in a step with prompts), each token of the longest besides, of a
    prompt, and a million pairs of those in its attention; prompt_step: of one with prompts at
    least. The default is an H100 with 8 G parameters in bfloat16, fitted to measurements.

    overhead: from a request's arrival to its first step. handover: from another engine's last step
    of a prompt until it is read; what has been read is seen at the end of a step. second_token:
    from then until the answer may go on with a next step.
    slowness: factor of all. cache_tokens: of its KV cache. noise: standard deviation of a step's
    time, as a share of it.
    """

    step: float = 0.0063
    answer: float = 48e-6
    context_token: float = 4.55e-8
    prompt_context: float = 6.5e-8
    longest: float = 0.0
    prompt_token: float = 1.95e-5
    million_pairs: float = 1.1e-3
    prompt_step: float = 0.0225
    step_tokens: int = 2048
    overhead: float = 0.016
    handover: float = 0.006
    second_token: float = 0.012
    slowness: float = 1.0
    cache_tokens: float = math.inf
    noise: float = 0.0


@dataclass(frozen=True)
class Turn:
    """At a time an engine goes, or comes back empty."""

    at: float
    engine: int
    is_up: bool


@dataclass(eq=False)
class Request:
    """One arrival's way. left, done: of its prompt; held, most_held: of it by the engine that
    computes it, and by the one that holds most; note: the policy's own. is_in: the engine that
    computes its prompt keeps it in its KV cache; is_handed_over: another one may read it;
    has_place: and has room for it; num_preempted: how often it was thrown out."""

    arrival: Arrival
    left: int = 0
    done: int = 0
    held: int = 0
    most_held: int = 0
    prefill: int = -1
    decode: int = -1
    first: float = math.inf
    end: float = math.inf
    tokens: int = 0
    num_losses: int = 0
    is_in: bool = False
    is_handed_over: bool = False
    has_place: bool = False
    num_preempted: int = 0
    note: Any = None

    @property
    def size(self) -> int:
        """Tokens before the next one."""
        return self.arrival.prompt_tokens + max(self.tokens - 1, 0)

    def needs(self, idx: int) -> bool:
        """True for a request that an engine takes with it when it is lost."""
        return idx == self.decode or (idx == self.prefill and self.tokens == 0)

    def is_kept_by(self, idx: int) -> bool:
        """True while an engine's KV cache has its prompt, and no answer has begun."""
        if self.num_preempted or self.prefill == self.decode:
            return idx == self.decode and self.is_in
        return self.has_place if idx == self.decode else self.is_in and self.tokens == 0

    @property
    def first_token(self) -> float:
        return self.first - self.arrival.at

    @property
    def per_token(self) -> float:
        return (self.end - self.first) / max(self.arrival.output_tokens - 1, 1)

    def is_good(self, limits: Limits) -> bool:
        is_whole = self.end < math.inf
        return is_whole and limits.allow(self.per_token, self.first_token)


class Policy(Protocol):
    """Places requests on two engines, which may be one, and sees what a proxy sees. next: which of
    those *waiting* an engine is sent now, or after how many seconds to ask again."""

    def place(self, request: Request, now: float) -> tuple[int, int]: ...
    def next(
        self, engine: int, waiting: Sequence[Request], now: float
    ) -> tuple[Request | None, float]: ...
    def prefilled(self, request: Request, now: float) -> None: ...
    def first(self, request: Request, now: float) -> None: ...
    def token(self, request: Request, now: float) -> None: ...
    def ended(self, request: Request, now: float) -> None: ...
    def turned(self, turn: Turn) -> None: ...
    def read(self, engine: int, used_tokens: float) -> None: ...


@dataclass
class Engine:
    """context: tokens before all running answers; reserved: of prompts in its KV cache besides;
    loading: requests without a place there for another engine's prompt; reading: those with one,
    until that is read; joining: those whose answers go on with a next step; ending: prompts whose
    last chunk is in the step that runs; asks_at: when the policy is to be asked for the next one;
    held: by group, tokens of the longest prompt or answer there."""

    hardware: Hardware
    dice: random.Random
    waiting: list[Request] = field(default_factory=list[Request])
    queue: deque[Request] = field(default_factory=deque[Request])
    running: list[Request] = field(default_factory=list[Request])
    context: int = 0
    reserved: int = 0
    loading: deque[Request] = field(default_factory=deque[Request])
    reading: list[Request] = field(default_factory=list[Request])
    joining: deque[Request] = field(default_factory=deque[Request])
    step: int = 0
    asks_at: float = math.inf
    is_busy: bool = False
    is_up: bool = True
    is_lost: bool = False
    ending: list[Request] = field(default_factory=list[Request])
    held: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def used(self) -> int:
        return self.context + self.reserved

    def has_room(self, tokens: int) -> bool:
        return self.used + tokens <= self.hardware.cache_tokens or self.used == 0

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        first = self.queue[0] if self.queue else None
        if self.running or self.joining:
            return True
        return bool(first and (first.is_in or self.has_room(first.size)))

    @property
    def budget(self) -> int:
        """Tokens of a step for others than the answers that run and the prompt that is begun."""
        left = self.queue[0].left if self.queue and self.queue[0].is_in else 0
        return max(0, self.hardware.step_tokens - len(self.running) - left)

    def free(self, request: Request) -> None:
        """Its prompt is kept no more, or with its answer."""
        self.reserved = max(0, self.reserved - request.size)

    def join(self, request: Request) -> None:
        """An answer goes on with the next step."""
        self.free(request)
        self.running.append(request)
        self.context += request.size

    def preempt(self) -> None:
        """Throw out the latest answers that do not fit any more, to be computed anew."""
        while self.used > self.hardware.cache_tokens and len(self.running) > 1:
            request = self.running.pop()
            self.context -= request.size
            request.done, request.left = 0, request.size
            request.is_in = request.has_place = False
            request.num_preempted += 1
            self.queue.appendleft(request)

    def take_step(self) -> float:
        """Take a step's prompts from the queue; how long it lasts."""
        hardware = self.hardware
        for _ in range(min(self.budget, len(self.joining))):
            self.join(self.joining.popleft())
        budget = hardware.step_tokens - len(self.running)
        seconds = hardware.step + hardware.answer * len(self.running)
        self.ending = []
        any_prompt = False
        while self.queue and budget > 0:
            request = self.queue[0]
            if not request.is_in:
                if not self.has_room(request.size):
                    break
                request.is_in = True
                self.reserved += request.size
            any_prompt = True
            chunk = min(budget, request.left)
            seconds += hardware.prompt_token * chunk
            seconds += hardware.million_pairs * area_of(chunk, request.done)
            request.done += chunk
            request.left -= chunk
            budget -= chunk
            if request.left == 0:
                self.ending.append(self.queue.popleft())
        each = hardware.prompt_context if any_prompt else hardware.context_token
        seconds += each * self.context
        if hardware.longest and self.running:
            seconds += hardware.longest * max(one.size for one in self.running)
        if any_prompt:
            seconds = max(seconds, hardware.prompt_step)
        if hardware.noise:
            seconds *= max(0.0, self.dice.gauss(1.0, hardware.noise))
        return seconds * hardware.slowness

    def withdraw(self, request: Request, is_reserved: bool) -> None:
        """Forget a request. is_reserved: its prompt has a place in the KV cache."""
        if request in self.running:
            self.context -= request.size
        elif is_reserved:
            self.free(request)
        places = (self.waiting, self.queue, self.running, self.loading, self.reading)
        for place in (*places, self.joining, self.ending):
            if request in place:
                place.remove(request)

    def empty(self) -> None:
        """Forget all that it holds."""
        self.held, self.context, self.reserved = {}, 0, 0


class Simulation:
    """One run of *arrivals* over engines of *hardware*."""

    def __init__(
        self,
        hardware: Sequence[Hardware],
        arrivals: Iterable[Arrival],
        policy: Policy,
        turns: Iterable[Turn] = (),
        notice_seconds: float = 0.0,
    ) -> None:
        self.engines = [Engine(one, random.Random(idx)) for idx, one in enumerate(hardware)]
        self.requests = [Request(one) for one in arrivals]
        self._policy = policy
        self._notice_seconds = notice_seconds
        self._under_way: dict[Request, None] = {}
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = itertools.count()
        self.now = 0.0
        for request in self.requests:
            self._at(request.arrival.at, self._arrive, request)
        for turn in turns:
            self._at(turn.at, self._turn, turn)
        if any(one.cache_tokens < math.inf for one in hardware):
            for at in range(math.ceil(self.requests[-1].arrival.at if self.requests else 0.0)):
                self._at(at, self._read, None)

    def _at(self, when: float, call: Callable[..., None], what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._count), call, what))

    def _later(self, seconds: float, call: Callable[[Request], None], request: Request) -> None:
        self._at(self.now + seconds, self._go_on, (call, request, request.num_losses))

    def _go_on(self, what: tuple[Callable[[Request], None], Request, int]) -> None:
        call, request, num_losses = what
        if request.num_losses == num_losses:
            call(request)

    def run(self) -> list[Request]:
        """All requests, ended or lost."""
        while self._events:
            self.now, _, call, what = heapq.heappop(self._events)
            call(what)
        return self.requests

    def _read(self, _: None) -> None:
        for idx, engine in enumerate(self.engines):
            self._policy.read(idx, engine.used)

    def _turn(self, turn: Turn) -> None:
        engine = self.engines[turn.engine]
        engine.is_up = turn.is_up
        engine.step, engine.is_busy = engine.step + 1, False
        self._at(self.now + (0.0 if turn.is_up else self._notice_seconds), self._notice, turn)

    def _notice(self, turn: Turn) -> None:
        self.engines[turn.engine].is_lost = not turn.is_up
        self._policy.turned(turn)
        if not turn.is_up:
            for request in [one for one in self._under_way if one.needs(turn.engine)]:
                self._lose(request)
            self.engines[turn.engine].empty()

    def _lose(self, request: Request) -> None:
        """As the proxy does: once more from the start, unless the client has seen a token."""
        self._policy.ended(request, self.now)
        del self._under_way[request]
        for idx in {request.prefill, request.decode}:
            self.engines[idx].withdraw(request, request.is_kept_by(idx))
        request.num_losses += 1
        if request.tokens == 0 and request.num_losses == 1:
            self._at(self.now, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        request.prefill, request.decode = self._policy.place(request, self.now)
        request.is_in = request.is_handed_over = request.has_place = False
        self._under_way[request] = None
        engine, arrival = self.engines[request.prefill], request.arrival
        held = [min(one.held.get(arrival.group, 0), arrival.shared_tokens) for one in self.engines]
        request.held, request.most_held = held[request.prefill], max(held)
        request.done = request.held
        request.left = max(1, arrival.prompt_tokens - request.done)
        engine.waiting.append(request)
        self._send(request.prefill)

    def _send(self, idx: int) -> None:
        """Send an engine what the policy says."""
        engine = self.engines[idx]
        while engine.waiting:
            request, seconds = self._policy.next(idx, engine.waiting, self.now)
            if request is None:
                if self.now + seconds < engine.asks_at:
                    engine.asks_at = self.now + seconds
                    self._at(engine.asks_at, self._ask, idx)
                return
            engine.waiting.remove(request)
            self._later(engine.hardware.overhead, self._queue, request)

    def _ask(self, idx: int) -> None:
        """Ask the policy again."""
        self.engines[idx].asks_at = math.inf
        self._send(idx)

    def _queue(self, request: Request) -> None:
        if any(self.engines[idx].is_lost for idx in (request.prefill, request.decode)):
            self._lose(request)
            return
        self.engines[request.prefill].queue.append(request)
        if request.prefill != request.decode:
            self.engines[request.decode].loading.append(request)
            self._start(request.decode)
        self._start(request.prefill)

    def _give_places(self, engine: Engine) -> None:
        """Let those in whose prompts are to be read, in the order in which they came."""
        while engine.loading and engine.budget and engine.has_room(engine.loading[0].size):
            request = engine.loading.popleft()
            engine.reserved += request.size
            request.has_place = True
            engine.reading.append(request)

    def _take_read(self, engine: Engine) -> None:
        """First tokens of those whose prompts have been read."""
        for request in [one for one in engine.reading if one.is_handed_over]:
            engine.reading.remove(request)
            self._first(request)

    def _start(self, idx: int) -> None:
        """Begin a step, unless one runs or there is nothing to do."""
        engine = self.engines[idx]
        if engine.is_busy or not engine.is_up:
            return
        self._give_places(engine)
        if engine.has_work:
            engine.is_busy = True
            self._at(self.now + engine.take_step(), self._end_step, (idx, engine.step))

    def _end_step(self, what: tuple[int, int]) -> None:
        idx, step = what
        engine = self.engines[idx]
        if step != engine.step:
            return  # the engine has gone meanwhile
        engine.step += 1
        engine.is_busy = False
        engine.context += len(engine.running)
        ended: list[Request] = []
        for request in engine.running:
            request.tokens += 1
            self._policy.token(request, self.now)
            if request.tokens >= request.arrival.output_tokens:
                ended.append(request)
        for request in ended:
            engine.running.remove(request)
            engine.context -= request.size
            self._end(request)
        prefilled, engine.ending = engine.ending, []
        for request in prefilled:
            if request.tokens:  # thrown out before
                self._join(request)
            else:
                self._prefilled(request)
        engine.preempt()
        self._take_read(engine)
        self._start(idx)

    def _prefilled(self, request: Request) -> None:
        engine = self.engines[request.prefill]
        if request.arrival.group >= 0:
            engine.held[request.arrival.group] = request.arrival.prompt_tokens
        self._policy.prefilled(request, self.now)
        self._send(request.prefill)
        if request.prefill == request.decode:
            self._first(request)
        else:
            self._later(engine.hardware.handover, self._handed_over, request)

    def _handed_over(self, request: Request) -> None:
        request.is_handed_over = True
        engine = self.engines[request.decode]
        if not engine.is_busy:
            self._take_read(engine)

    def _first(self, request: Request) -> None:
        request.first, request.tokens = self.now, 1
        self._policy.first(request, self.now)
        if request.prefill == request.decode:
            self._join(request)
        else:
            self.engines[request.prefill].free(request)
            self._start(request.prefill)
            seconds = self.engines[request.decode].hardware.second_token
            self._later(seconds, self._join, request)

    def _join(self, request: Request) -> None:
        engine = self.engines[request.decode]
        if request.tokens >= request.arrival.output_tokens:
            engine.free(request)
            self._end(request)
        elif request.is_handed_over and not request.num_preempted:
            engine.joining.append(request)
            self._start(request.decode)
        else:
            engine.join(request)
            self._start(request.decode)

    def _end(self, request: Request) -> None:
        request.end = self.now
        del self._under_way[request]
        arrival = request.arrival
        if arrival.group >= 0:
            held = self.engines[request.decode].held
            held[arrival.group] = arrival.prompt_tokens + request.tokens
        self._policy.ended(request, self.now)
