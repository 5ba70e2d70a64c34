"""What the simulator compares: fixed ways to share out requests, and the proxy's own policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from goodputs.simulator import Hardware, Request, Turn
from vllm_commext.limits import Limits
from vllm_commext.proxy.engines.choice import WINDOW
from vllm_commext.proxy.engines.pool import LEAD_SECONDS, REQUEST_TOKENS
from vllm_commext.proxy.policy.load import Answer, Job, Waiting, next_of
from vllm_commext.proxy.policy.placement import Candidate, Placement, Planner
from vllm_commext.proxy.policy.speed import EngineSpeed, Lengths, area_of

MOST_TOKENS = 1024
"""What requests allow their answers, however long these turn out."""


class Silent:
    """Learns nothing."""

    def prefilled(self, request: Request, now: float) -> None:
        pass

    first = token = ended = prefilled

    def next(
        self, engine: int, waiting: Sequence[Request], now: float
    ) -> tuple[Request | None, float]:
        return waiting[0], 0.0

    def turned(self, turn: Turn) -> None:
        pass

    def read(self, engine: int, used_tokens: float) -> None:
        pass


class _Work:
    """Prompt tokens under way at each engine of one role, and those that it holds of prompts, as
    the proxy counts them."""

    def __init__(self, engines: Sequence[int]) -> None:
        self._engines = engines
        self._tokens = dict.fromkeys(engines, 0)
        self._held: dict[int, dict[int, int]] = {idx: {} for idx in engines}
        self._down: set[int] = set()
        self._turn = 0

    def give(self, request: Request) -> int:
        arrival, num = request.arrival, len(self._engines)
        in_turn = [self._engines[(self._turn + step) % num] for step in range(num)]
        up = [idx for idx in in_turn if idx not in self._down] or in_turn

        def until_through(idx: int) -> int:
            held = self._held[idx].get(arrival.group, 0)
            return self._tokens[idx] - min(held, arrival.shared_tokens)

        idx = min(up, key=until_through)
        if arrival.group >= 0:
            self._held[idx][arrival.group] = arrival.prompt_tokens
        self._turn = (self._engines.index(idx) + 1) % num
        self._tokens[idx] += REQUEST_TOKENS + request.arrival.prompt_tokens
        return idx

    def take(self, request: Request, idx: int) -> None:
        self._tokens[idx] -= REQUEST_TOKENS + request.arrival.prompt_tokens

    def turned(self, turn: Turn) -> None:
        (self._down.discard if turn.is_up else self._down.add)(turn.engine)
        self._held.get(turn.engine, {}).clear()


class Replicas(Silent):
    """Whole requests to the engine with the least work."""

    def __init__(self, hardware: Sequence[Hardware]) -> None:
        self._work = _Work(range(len(hardware)))
        self.turned = self._work.turned

    def place(self, request: Request, now: float) -> tuple[int, int]:
        idx = self._work.give(request)
        return idx, idx

    def ended(self, request: Request, now: float) -> None:
        self._work.take(request, request.decode)


class Fixed(Silent):
    """One half of the engines prefills and the other decodes."""

    def __init__(self, hardware: Sequence[Hardware]) -> None:
        half = len(hardware) // 2
        self._prefill = _Work(range(half))
        self._decode = _Work(range(half, len(hardware)))

    def place(self, request: Request, now: float) -> tuple[int, int]:
        request.note = False
        return self._prefill.give(request), self._decode.give(request)

    def prefilled(self, request: Request, now: float) -> None:
        request.note = True
        self._prefill.take(request, request.prefill)

    def ended(self, request: Request, now: float) -> None:
        if not request.note:
            self._prefill.take(request, request.prefill)
        self._decode.take(request, request.decode)

    def turned(self, turn: Turn) -> None:
        self._prefill.turned(turn)
        self._decode.turned(turn)


@dataclass
class _Placed:
    waiting: Waiting
    placement: Placement
    held: int
    due: float


@dataclass
class _Sent:
    job: Job
    answer: Answer
    prefilled_at: float = 0.0


class Adaptive:
    """The proxy's policy, which learns from what a proxy sees. reads_caches: from engines' metrics,
    too; is_ordered: prompts wait for their turn, as with ``--prompt-order shortest``."""

    def __init__(
        self,
        hardware: Sequence[Hardware],
        limits: Limits,
        reads_caches: bool = True,
        is_ordered: bool = False,
    ) -> None:
        self.reads_caches, self.is_ordered = reads_caches, is_ordered
        self._hardware = hardware
        self.planner = Planner(limits)
        self.candidates = [
            Candidate(self.planner.new_load(), 0, idx) for idx in range(len(hardware))
        ]
        self._held: list[dict[int, int]] = [{} for _ in hardware]
        self._down: set[int] = set()
        self.num_local = self.num_placed = self._turn = 0

    def most_tokens(self, request: Request) -> int:
        """Length that the request allows."""
        return MOST_TOKENS

    def place(self, request: Request, now: float) -> tuple[int, int]:
        arrival = request.arrival
        for candidate, held in zip(self.candidates, self._held, strict=True):
            candidate.held_tokens = min(held.get(arrival.group, 0), arrival.shared_tokens)
        tokens, window = arrival.prompt_tokens, self.window()
        up = [one for one in window if one.key not in self._down] or window
        placed = self.choose(now, tokens, up)
        if placed is None:  # as the proxy does, by the tokens under way
            least = min(up, key=lambda one: sum(job.new for job in one.load.jobs))
            placed = Placement(least, least)
        self.num_placed += 1
        self.num_local += placed.is_local
        held = min(placed.prefill.held_tokens, tokens - 1)
        load = placed.prefill.load
        seconds = load.speed.prefill_seconds(tokens - held, held, False)
        waiting = Waiting(now, seconds)
        load.wait(waiting)
        request.note = _Placed(waiting, placed, held, now + placed.first_token)
        return cast("tuple[int, int]", (placed.prefill.key, placed.decode.key))

    def window(self) -> list[Candidate]:
        """The engines that are looked at for a request."""
        self._turn += 1 if len(self.candidates) <= WINDOW else WINDOW
        start = self._turn % len(self.candidates)
        return (self.candidates[start:] + self.candidates[:start])[:WINDOW]

    def choose(self, now: float, tokens: int, up: Sequence[Candidate]) -> Placement | None:
        return self.planner.place(now, tokens, MOST_TOKENS, up, up)

    def next(
        self, engine: int, waiting: Sequence[Request], now: float
    ) -> tuple[Request | None, float]:
        """As the proxy does: without an order all are sent at once."""
        load = self.candidates[engine].load
        if self.is_ordered and load.speed.is_known:
            reach = load.speed.prefill_seconds(0, 0, True)
            left = load.backlog(now) - LEAD_SECONDS - reach
            if left > 0.0:
                return None, max(left, LEAD_SECONDS / 10)
            among = {one.note.waiting: one for one in waiting}
            request = among[next_of(list(among), now, load.shared.limits.first)]
        else:
            request = waiting[0]
        note: _Placed = request.note
        placed, tokens = note.placement, request.arrival.prompt_tokens
        load.leave(note.waiting)
        job = load.ask(tokens - note.held, note.held, now)
        due, most = job.until if placed.is_local else note.due, self.most_tokens(request)
        answer = placed.decode.load.expect(tokens, most, due, not placed.is_local)
        request.note = _Sent(job, answer)
        return request, 0.0

    def prefilled(self, request: Request, now: float) -> None:
        note: _Sent = request.note
        note.prefilled_at = now
        self._held[request.prefill][request.arrival.group] = request.arrival.prompt_tokens
        note.job.end(now)
        if request.prefill != request.decode:
            note.job.keep()
            note.answer.source = note.job

    def first(self, request: Request, now: float) -> None:
        note: _Sent = request.note
        if request.prefill != request.decode:
            self.planner.shared.handover.add(now - note.prefilled_at)
        note.answer.begin(now)

    def token(self, request: Request, now: float) -> None:
        request.note.answer.go_on(1, now)

    def ended(self, request: Request, now: float) -> None:
        note: _Placed | _Sent = request.note
        if isinstance(note, _Placed):  # its engine is lost
            note.placement.prefill.load.leave(note.waiting)
            return
        held = request.arrival.prompt_tokens + request.tokens
        self._held[request.decode][request.arrival.group] = held
        note.job.end(now, False)
        note.answer.end(now, request.tokens >= request.arrival.output_tokens)

    def turned(self, turn: Turn) -> None:
        (self._down.discard if turn.is_up else self._down.add)(turn.engine)
        self._held[turn.engine].clear()

    def read(self, engine: int, used_tokens: float) -> None:
        if self.reads_caches:
            load, size = self.candidates[engine].load, self._hardware[engine].cache_tokens
            load.note_cache(size, used_tokens, used_tokens)


def _tokens(one: Candidate) -> int:
    return one.load.coming + one.load.context - one.held_tokens


class Tuned(Adaptive):
    """Replicas, or fixed roles of which *num_prefill* engines prefill, with prompts in order."""

    def __init__(self, hardware: Sequence[Hardware], limits: Limits, num_prefill: int = 0) -> None:
        super().__init__(hardware, limits, is_ordered=True)
        self._num_prefill = num_prefill

    def window(self) -> list[Candidate]:
        return self.candidates

    def choose(self, now: float, tokens: int, up: Sequence[Candidate]) -> Placement | None:
        num = self._num_prefill
        sources = [one for one in up if cast("int", one.key) < num] or up
        targets = [one for one in up if cast("int", one.key) >= num] or up
        least = min(targets, key=_tokens)
        if not num:
            return Placement(least, least)

        def until_through(one: Candidate) -> float:
            held = one.load.speed.prefill_seconds(one.held_tokens, 0, False)
            return one.load.queued + one.load.waiting_seconds - held

        return Placement(min(sources, key=until_through), least)


class Knowing(Adaptive):
    """The same policy, told the engines' true times and the true length of each answer."""

    def __init__(self, hardware: Sequence[Hardware], limits: Limits) -> None:
        super().__init__(hardware, limits)
        self.planner.shared.lengths = TrueLengths()
        for candidate, one in zip(self.candidates, hardware, strict=True):
            candidate.load.speed = TrueSpeed(one)

    def most_tokens(self, request: Request) -> int:
        return request.arrival.output_tokens


class TrueLengths(Lengths):
    """Each answer is as long as its request allows."""

    def ended(self, needed: float, had: int, most: int) -> float:
        return float(needed > max(had, most))


class TrueSpeed(EngineSpeed):
    """An engine's times as the simulator has them."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    @property
    def is_known(self) -> bool:
        return True

    knows_steps = is_known

    def prefill_seconds(self, new_tokens: float, held_tokens: float, is_idle: bool) -> float:
        one = self._hardware
        seconds = one.prompt_token * new_tokens
        seconds += one.million_pairs * area_of(new_tokens, held_tokens)
        seconds += one.step * max(1.0, new_tokens / one.step_tokens)
        seconds = max(seconds, one.prompt_step)
        return seconds * one.slowness + one.overhead * is_idle

    def step_seconds(self, answers: float, context_tokens: float) -> float:
        one = self._hardware
        seconds = one.step + one.answer * answers + one.context_token * context_tokens
        return seconds * one.slowness

    def note_prefill(self, new: float, area: float, num_idle: float, seconds: float) -> None:
        pass

    def note_steps(self, answers: float, context_tokens: float, seconds: float) -> None:
        pass
