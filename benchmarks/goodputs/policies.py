"""What the simulator compares: fixed ways to share out requests, and the proxy's own policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from goodputs.simulator import Hardware, Request, Turn
from vllm_commext.limits import Limits
from vllm_commext.proxy.engines.choice import FOLLOWING, WINDOW, stride
from vllm_commext.proxy.engines.engine import REQUEST_TOKENS
from vllm_commext.proxy.policy.engine_load import Answer, EngineLoad, Job, Planned
from vllm_commext.proxy.policy.placement import Candidate, Planner, Way
from vllm_commext.proxy.policy.prompt_queue import LEAD_SECONDS, Waiting


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
    placement: Way
    held: int
    due: float
    planned: Planned


@dataclass
class _Sent:
    job: Job
    answer: Answer
    prefilled_at: float = 0.0


class Adaptive:
    """The proxy's policy, which learns from what a proxy sees. is_ordered: prompts wait for their
    turn, as with ``--prompt-order shortest``."""

    def __init__(
        self,
        hardware: Sequence[Hardware],
        limits: Limits,
        is_ordered: bool = True,
    ) -> None:
        self.is_ordered = is_ordered
        self._hardware = hardware
        self.planner = Planner(limits)
        self.loads = [EngineLoad(self.planner.shared) for _ in hardware]
        self._held: list[dict[int, int]] = [{} for _ in hardware]
        self._down: set[int] = set()
        self._last: dict[int, int] = {}
        self._turn = 0

    def place(self, request: Request, now: float) -> tuple[int, int]:
        arrival, placed = request.arrival, None
        tokens, is_all = arrival.prompt_tokens, len(self.loads) <= WINDOW
        for _ in (1, 2):
            window = self._window(arrival.group)
            up = [
                Candidate(self.loads[idx], min(held, arrival.shared_tokens), idx)
                for idx in [idx for idx in window if idx not in self._down] or window
                for held in [self._held[idx].get(arrival.group, 0)]
            ]
            way = self.choose(now, tokens, up)
            if placed is None or (way is not None and way.cost < placed.cost):
                placed = way
            if way is None or not way.is_late or is_all:
                break
        if placed is not None and arrival.group >= 0:
            self._last[arrival.group] = cast("int", placed.decode.key)
        if placed is None:  # as the proxy does, by the tokens under way
            least = min(up, key=lambda one: sum(job.new for job in one.load.prompts.jobs))
            placed = Way(least, least)
        held, load = min(placed.prefill.held_tokens, tokens - 1), placed.prefill.load
        seconds = load.speed.prefill_seconds(tokens - held, held)
        waiting = Waiting(now, seconds, placed.is_lost)
        load.queue.add(waiting)
        planned = self.planner.note(placed, tokens, now)
        request.note = _Placed(waiting, placed, held, now + placed.first_token, planned)
        return cast("tuple[int, int]", (placed.prefill.key, placed.decode.key))

    def _window(self, group: int) -> list[int]:
        """As `Chooser._window`."""
        num, last = len(self.loads), self._last.get(group)
        turned = [(self._turn + idx) % num for idx in range(min(WINDOW + FOLLOWING, num))]
        self._turn += stride(num)
        window = turned[:WINDOW]
        following = [idx for idx in turned[WINDOW:] if idx not in self._down]
        if following:
            window[-1] = min(following, key=lambda idx: len(self.loads[idx].answers))
        if last is not None and last not in window:
            window[-2] = last
        return window

    def choose(self, now: float, tokens: int, up: Sequence[Candidate]) -> Way | None:
        return self.planner.place(now, tokens, up, up, len(up) == len(self.loads))

    def next(
        self, engine: int, waiting: Sequence[Request], now: float
    ) -> tuple[Request | None, float]:
        """As the proxy does: without an order all are sent at once."""
        load, request = self.loads[engine], waiting[0]
        if self.is_ordered and load.speed.is_known:
            left = load.backlog(now) - LEAD_SECONDS - load.speed.prefill_seconds(0, 0)
            if left > 0.0:
                return None, max(left, LEAD_SECONDS / 10)
            among = {one.note.waiting: one for one in waiting}
            request = among[load.queue.next(list(among), now)]
        note: _Placed = request.note
        placed, tokens = note.placement, request.arrival.prompt_tokens
        load.queue.remove(note.waiting)
        note.planned.end()
        job = load.ask(tokens - note.held, note.held, now)
        due = job.until if placed.is_local else note.due
        answer = placed.decode.load.expect(tokens, due, not placed.is_local)
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
            note.placement.prefill.load.queue.remove(note.waiting)
            note.planned.end()
            return
        held = request.arrival.prompt_tokens + request.tokens
        self._held[request.decode][request.arrival.group] = held
        note.job.end(now, False)
        note.answer.end(now, request.tokens >= request.arrival.output_tokens)

    def turned(self, turn: Turn) -> None:
        (self._down.discard if turn.is_up else self._down.add)(turn.engine)
        self._held[turn.engine].clear()

    def read(self, engine: int, used_tokens: float) -> None:
        size = self._hardware[engine].cache_tokens
        self.loads[engine].note_cache(size, used_tokens, used_tokens)


def _tokens(one: Candidate) -> int:
    return one.load.answers.coming + one.load.answers.context - one.held_tokens


class Tuned(Adaptive):
    """Replicas, or fixed roles of which *num_prefill* engines prefill, with prompts in order."""

    def __init__(self, hardware: Sequence[Hardware], limits: Limits, num_prefill: int = 0) -> None:
        super().__init__(hardware, limits)
        self._num_prefill = num_prefill

    def _window(self, group: int) -> list[int]:
        return list(range(len(self.loads)))

    def choose(self, now: float, tokens: int, up: Sequence[Candidate]) -> Way | None:
        num = self._num_prefill
        sources = [one for one in up if cast("int", one.key) < num] or up
        targets = [one for one in up if cast("int", one.key) >= num] or up
        least = min(targets, key=_tokens)
        if not num:
            return Way(least, least)

        def until_through(one: Candidate) -> float:
            speed, work = one.load.speed, one.load.prompts.seconds + one.load.queue.seconds
            return work - speed.prefill_seconds(one.held_tokens, 0) + speed.prefill_seconds(0, 0)

        return Way(min(sources, key=until_through), least)


class Simple(Adaptive):
    """By means alone: a way costs a miss if its first token or its step is late, and for each
    answer beside the prompt as much as that takes of a mean answer's slack."""

    def choose(self, now: float, tokens: int, up: Sequence[Candidate]) -> Way | None:
        shared = self.planner.shared
        if not up[0].load.speed.is_known:
            return None
        tpot, limit, length = shared.limits.tpot, shared.limits.first, shared.lengths.mean

        def step(one: Candidate) -> float:
            answers = one.load.answers
            return one.load.speed.step_seconds(len(answers) + 1, answers.context + tokens)

        def cost(way: tuple[Candidate, Candidate]) -> tuple[float, float]:
            source, at = way
            load, held = source.load, min(source.held_tokens, tokens - 1)
            prefill = load.speed.prefill_seconds(tokens - held, held)
            first = load.backlog(now) + load.queue.seconds + prefill
            slack = max(tpot - step(source), 0.1 * tpot) * length
            others = len(load.answers) * min(1.0, prefill / slack)
            pace = at.load.recent.pace(step(at))
            misses = others + (first > limit) + (pace > tpot)
            return misses, first + shared.handover.value * (source is not at) + pace * length

        return Way(*min(((source, at) for source in up for at in up), key=cost))
