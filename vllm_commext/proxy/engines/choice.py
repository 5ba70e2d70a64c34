"""Which engine a request goes to: by the policy of placement, by the least work, or since it keeps
the answer that the request goes on from."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from vllm_commext.limits import Limits
from vllm_commext.proxy.config import ADAPTIVE, AUTO, SHORTEST, ProxyConfig
from vllm_commext.proxy.engines.affinity import NO_PREFIX, Prefix
from vllm_commext.proxy.engines.engine import DECODE, PREFILL, ROLES, Engine, EnginePool
from vllm_commext.proxy.errors_phases import HANDED_OVER, LEAST_WORK, LOCAL, no_answer
from vllm_commext.proxy.policy.placement import Candidate, Planner, Way

MAX_LATEST = 1 << 16
"""Of answers that engines keep, and of beginnings of prompts, whose engine is remembered."""
K = TypeVar("K")
WINDOW = 5
"""Most engines compared at once, others each time: the best of more would get too many."""
FOLLOWING = 8
"""Engines after those, of which the one with the fewest answers is compared, too."""


@dataclass(slots=True)
class Plan:
    """prefill: None where *decode* computes the prompt; decode: None for the least busy engine."""

    prefill: Engine | None = None
    decode: Engine | None = None
    expected: Way | None = None
    first_token_at: float = 0.0
    note_sent: Callable[[], None] = lambda: None  # no more planned, but expected

    @property
    def kind(self) -> str:
        if self.expected is None:
            return LEAST_WORK
        return HANDED_OVER if self.prefill is not None else LOCAL

    @property
    def is_lost(self) -> bool:
        return self.expected is not None and self.expected.is_lost

    @property
    def ways(self) -> tuple[tuple[str, float, float], ...]:
        """As `Route.ways`."""
        if (way := self.expected) is None:
            return ()
        other = LOCAL if self.prefill is not None else HANDED_OVER
        others = ((other, *way.other),) if way.other is not None else ()
        return (self.kind, way.first_token, way.per_token), *others

    def engine(self, role: str) -> Engine | None:
        return self.prefill if role == PREFILL else self.decode

    def as_header(self) -> str:
        """For clients: the kind, and the expected times in milliseconds."""
        expected = self.expected
        if expected is None:
            return self.kind
        first, each = expected.first_token * 1000, expected.per_token * 1000
        return f"{self.kind}; first-token={first:.0f}; per-token={each:.1f}"


def stride(num_engines: int) -> int:
    """From one window to the next: each engine begins one before any does again."""
    step = WINDOW if num_engines > WINDOW else 1
    while math.gcd(step, num_engines) > 1:
        step += 1
    return step


def is_adaptive(mode: str, decode: EnginePool) -> bool:
    return mode == ADAPTIVE or (mode == AUTO and decode.has_both)


def orders_prompts(config: ProxyConfig, decode: EnginePool) -> bool:
    """True where prompts wait here for their turn."""
    if config.prompt_order != AUTO:
        return config.prompt_order == SHORTEST
    return bool(config.ttft_ms) and is_adaptive(config.placement, decode)


def reads_load(config: ProxyConfig, decode: EnginePool) -> bool:
    """True where anything depends on engines' work and speed, or shows them."""
    return (
        config.admin_port is not None
        or orders_prompts(config, decode)
        or is_adaptive(config.placement, decode)
    )


class Latest(OrderedDict[K, Engine]):
    """The `MAX_LATEST` keys noted last, with the engine of each."""

    def note(self, key: K, engine: Engine) -> None:
        self[key] = engine
        self.move_to_end(key)
        if len(self) > MAX_LATEST:
            self.popitem(last=False)


class Chooser:
    def __init__(self, mode: str, planner: Planner, pools: Mapping[str, EnginePool]) -> None:
        self._mode, self._planner, self.pools = mode, planner, pools
        self._turns: dict[str, int] = dict.fromkeys(ROLES, 0)
        self.keepers, self._last = Latest[str](), {role: Latest[bytes]() for role in ROLES}

    @classmethod
    def of(cls, config: ProxyConfig, limits: Limits) -> Self:
        planner = Planner(limits)
        tokens, load_of = config.affinity_tokens, planner.new_load
        pools = {role: EnginePool(role, tokens, load_of) for role in ROLES}
        return cls(config.placement, planner, pools)

    @property
    def is_adaptive(self) -> bool:
        return is_adaptive(self._mode, self.pools[DECODE])

    def plan(
        self, prefix: Prefix, tokens: int, failed: Collection[Engine], may_hand_over: bool
    ) -> Plan | None:
        """Plan for a prompt of *tokens*, avoiding *failed*; None where engines' roles decide."""
        if self._mode == LOCAL:
            return Plan()
        if not self.is_adaptive:
            return None
        decode, prefill = self.pools[DECODE], self.pools[PREFILL]
        now, name = time.monotonic(), prefix.session or (prefix.blocks[0] if prefix.blocks else b"")
        is_same, tokens, placement = decode.are_both and prefill.are_both, max(tokens, 1), None
        are_all = max(len(decode.engines), len(prefill.engines) if may_hand_over else 0) <= WINDOW
        for _ in range(1 if are_all else 2):  # others, too, if all of the first ones are late
            targets = sources = _usable(self._window(name, decode), prefix, failed)
            if not (is_same and may_hand_over):
                among = self._window(name, prefill) if may_hand_over else ()
                sources = _usable(among, prefix, failed)
            way = self._planner.place(now, tokens, sources, targets, are_all)
            if placement is None or (way is not None and way.cost < placement.cost):
                placement = way
            if way is None or not way.is_late:
                break
        if placement is None:
            return Plan()
        source, engine = placement.prefill.key, placement.decode.key
        assert isinstance(source, Engine)  # as made above
        assert isinstance(engine, Engine)
        if name:
            self._last[PREFILL].note(name, source)
            self._last[DECODE].note(name, engine)
        source = None if placement.is_local else source
        answer = self._planner.note(placement, tokens, now)
        return Plan(source, engine, placement, now + placement.first_token, answer.end)

    def keeper(self, name: Any) -> Engine | None:
        """Engine that keeps the answer *name*, for a request; None: any. Raises `ProxyError`."""
        pool = self.pools[DECODE]
        engine = self.keepers.get(name) if isinstance(name, str) else None
        if engine is None and len(pool.engines) == 1:
            return None
        if engine is None:
            raise no_answer(name, "this proxy knows no engine that has given it")
        if not engine.usable or engine not in pool.members:
            raise no_answer(name, f"{engine.name}, which has given it, is gone or drains")
        return engine

    def _window(self, name: bytes, pool: EnginePool) -> Sequence[Engine]:
        """The next in turn, the engine of the prompt's beginning, and one with few answers."""
        engines, num = pool.engines, min(len(pool.engines), WINDOW + FOLLOWING)
        start, last = self._turns[pool.role] % max(len(engines), 1), self._last[pool.role].get(name)
        self._turns[pool.role] = start + stride(len(engines))
        turned = engines[start : start + num] + engines[: max(0, start + num - len(engines))]
        window, least = [*turned[:WINDOW]], math.inf
        for one in turned[WINDOW:]:
            if (answers := len(one.load.answers)) < least and one.usable:
                least, window[-1] = answers, one
        if last in pool.members and last not in window:
            window[-2] = last
        return window


def _usable(engines: Sequence[Engine], of: Prefix, failed: Collection[Engine]) -> list[Candidate]:
    return [
        Candidate(one.load, one.memory.held_tokens(of), one)
        for one in engines
        if one.usable and not one.state.is_last and one not in failed
    ]


def least_work(
    pool: EnginePool, exclude: Collection[Engine] = (), prefix: Prefix = NO_PREFIX
) -> tuple[Engine, int] | None:
    """Choose by tokens under way less those it holds of the prompt, round robin among equals,
    suspects and silent ones last. Also returns the tokens it holds."""
    candidates = [one for one in pool.in_turn if one.usable and one not in exclude]
    if not candidates:
        return None
    held = ((engine, engine.memory.held_tokens(prefix)) for engine in candidates)
    chosen = min(held, key=lambda one: (one[0].state.is_last, one[0].work.tokens - one[1]))
    pool.end_turn(chosen[0])
    return chosen
