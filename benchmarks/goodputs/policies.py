"""What the simulator compares: fixed ways to share out requests, and the proxy's own policy."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from goodputs.simulator import Hardware, Request, Turn
from vllm_commext.limits import Limits
from vllm_commext.proxy.choice import WINDOW
from vllm_commext.proxy.engine_load import Answer, Job
from vllm_commext.proxy.engine_speed import EngineSpeed, Lengths, area_of, bins
from vllm_commext.proxy.engines import REQUEST_TOKENS
from vllm_commext.proxy.placement import Candidate, Placement, Planner

MOST_TOKENS = 1024
"""What requests allow their answers, however long these turn out."""
OVERFLOW_SECONDS = 0.15


class Silent:
    """Learns nothing."""

    def prefilled(self, request: Request, now: float) -> None:
        pass

    first = token = ended = prefilled

    def turned(self, turn: Turn) -> None:
        pass

    def read(self, engine: int, used_tokens: float) -> None:
        pass


class InTurn(Silent):
    """Whole requests to each engine in turn."""

    def __init__(self, hardware: Sequence[Hardware]) -> None:
        self._next = itertools.cycle(range(len(hardware)))

    def place(self, request: Request, now: float) -> tuple[int, int]:
        idx = next(self._next)
        return idx, idx


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


class Overflow(Silent):
    """Of two engines the first prefills, unless prompts wait there and none at the other one."""

    def __init__(self, hardware: Sequence[Hardware]) -> None:
        self._speed = TrueSpeed(hardware[0])
        self._waiting: tuple[dict[Request, float], dict[Request, float]] = {}, {}

    def place(self, request: Request, now: float) -> tuple[int, int]:
        first, second = self._waiting
        here = int(sum(first.values()) > OVERFLOW_SECONDS and not second)
        seconds = self._speed.prefill_seconds(request.arrival.prompt_tokens, 0, False)
        self._waiting[here][request] = seconds
        return here, 1

    def prefilled(self, request: Request, now: float) -> None:
        del self._waiting[request.prefill][request]


@dataclass
class _Note:
    job: Job
    answer: Answer
    prefilled_at: float = 0.0


class Adaptive:
    """The proxy's policy, which learns from what a proxy sees. refuses: what would come late;
    reads_caches: engines' metrics, that is."""

    def __init__(
        self,
        hardware: Sequence[Hardware],
        limits: Limits,
        refuses: bool = False,
        reads_caches: bool = True,
    ) -> None:
        self.refuses, self.reads_caches = refuses, reads_caches
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

    def place(self, request: Request, now: float) -> tuple[int, int] | None:
        arrival = request.arrival
        for candidate, held in zip(self.candidates, self._held, strict=True):
            candidate.held_tokens = min(held.get(arrival.group, 0), arrival.shared_tokens)
        self._turn += 1 if len(self.candidates) <= WINDOW else WINDOW
        start = self._turn % len(self.candidates)
        window = (self.candidates[start:] + self.candidates[:start])[:WINDOW]
        up = [one for one in window if one.key not in self._down] or window
        tokens, most = arrival.prompt_tokens, self.most_tokens(request)
        placed = self.planner.place(now, tokens, most, up, up)
        if placed is None:  # as the proxy does, by the tokens under way
            least = min(up, key=lambda one: sum(job.new for job in one.load.jobs))
            placed = Placement(least, least)
        if self.refuses and placed.late > 0.0:
            return None
        self.num_placed += 1
        self.num_local += placed.is_local
        held = min(placed.prefill.held_tokens, tokens - 1)
        job = placed.prefill.load.ask(tokens - held, held, now)
        due = now + placed.first_token
        answer = placed.decode.load.expect(tokens, most, due, not placed.is_local)
        request.note = _Note(job, answer)
        return cast("tuple[int, int]", (placed.prefill.key, placed.decode.key))

    def prefilled(self, request: Request, now: float) -> None:
        note: _Note = request.note
        note.prefilled_at = now
        self._held[request.prefill][request.arrival.group] = request.arrival.prompt_tokens
        note.job.end(now)
        if request.prefill != request.decode:
            note.job.keep()
            note.answer.source = note.job

    def first(self, request: Request, now: float) -> None:
        note: _Note = request.note
        if request.prefill != request.decode:
            self.planner.shared.handover.add(now - note.prefilled_at)
        note.answer.begin(now)

    def token(self, request: Request, now: float) -> None:
        request.note.answer.go_on(1, now)

    def ended(self, request: Request, now: float) -> None:
        note: _Note = request.note
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

    @cached_property
    def longer(self) -> list[float]:
        return [1.0] * len(bins)


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
        return seconds * one.slowness + one.overhead * is_idle

    def step_seconds(self, answers: float, context_tokens: float) -> float:
        one = self._hardware
        seconds = one.step + one.answer * answers + one.context_token * context_tokens
        return seconds * one.slowness

    def note_prefill(self, new: float, area: float, num_idle: float, seconds: float) -> None:
        pass

    def note_steps(self, answers: float, context_tokens: float, seconds: float) -> None:
        pass
