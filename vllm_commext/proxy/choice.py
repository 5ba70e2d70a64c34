"""Which engines take a request: what the policy of placement has to say of those usable now."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from vllm_commext.proxy.affinity import Prefix
from vllm_commext.proxy.body import LENGTHS
from vllm_commext.proxy.config import ADAPTIVE, AUTO, LOCAL, SHORTEST, ProxyConfig
from vllm_commext.proxy.engines import DECODE, PREFILL, Engine, EnginePool
from vllm_commext.proxy.placement import Candidate, Placement, Planner

HANDED_OVER = "handed_over"
LEAST_WORK = "least_work"
KINDS = (LOCAL, HANDED_OVER, LEAST_WORK)
"""Ways in which a request is placed: by the policy, wholly at one engine or one step at each of
two, or wholly at the engine with the least work."""
MOST_TOKENS = 1 << 15
MAX_REMEMBERED = 1 << 16
WINDOW = 10
"""Engines that are looked at for a request, others for each."""


@dataclass(slots=True)
class Plan:
    """Engines that are to take one request, and what is expected of it, if anything is. prefill:
    None where *decode* computes the prompt itself; decode: None for whichever has least work."""

    prefill: Engine | None = None
    decode: Engine | None = None
    expected: Placement | None = None
    first_token_at: float = 0.0

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.expected is None:
            return LEAST_WORK
        return HANDED_OVER if self.prefill is not None else LOCAL

    def engine(self, role: str) -> Engine | None:
        """The engine that is to take the step of a *role*."""
        return self.prefill if role == PREFILL else self.decode

    def as_header(self) -> str:
        """For clients: the kind, and what was expected in milliseconds."""
        expected = self.expected
        if expected is None:
            return self.kind
        first, each = expected.first_token * 1000, expected.per_token * 1000
        return f"{self.kind}; first-token={first:.0f}; per-token={each:.1f}"


def is_adaptive(mode: str, decode: EnginePool) -> bool:
    """Whether requests are placed by what engines work on, as far as *mode* decides that."""
    return mode == ADAPTIVE or (mode == AUTO and decode.has_both)


def orders_prompts(config: ProxyConfig, decode: EnginePool) -> bool:
    """Whether prompts wait at the proxy for their turn at an engine: as the option says, else where
    requests are placed by a limit to the first token."""
    if config.prompt_order != AUTO:
        return config.prompt_order == SHORTEST
    return bool(config.ttft_ms) and is_adaptive(config.placement, decode)


def reads_load(config: ProxyConfig, decode: EnginePool) -> bool:
    """Whether somebody asks what engines work on, and how fast; else nothing is learned of it."""
    return orders_prompts(config, decode) or is_adaptive(config.placement, decode)


class Chooser:
    """Makes plans for requests."""

    def __init__(self, mode: str, planner: Planner, pools: Mapping[str, EnginePool]) -> None:
        self._mode = mode
        self._planner = planner
        self._pools = pools
        self._turn = 0
        self._last: dict[bytes, Engine] = {}

    def plan(
        self,
        prefix: Prefix,
        tokens: int,
        body: Mapping[str, Any],
        failed: Collection[Engine],
        may_hand_over: bool,
    ) -> Plan | None:
        """Plan for a prompt of *tokens*, with none of *failed* where there are others; None where
        the engines' roles decide. may_hand_over: it can take its steps at two engines."""
        if self._mode == LOCAL:
            return Plan()
        if not is_adaptive(self._mode, self._pools[DECODE]):
            return None
        decode, prefill = self._pools[DECODE], self._pools[PREFILL]
        now, most, name = time.monotonic(), most_tokens(body), _name_of(prefix)
        others = len(decode.engines) - WINDOW
        self._turn += WINDOW if others > WINDOW else max(1, others)

        def candidates(engines: Sequence[Engine]) -> list[Candidate]:
            found: list[Candidate] = []
            for one in engines:
                if one.usable and not one.suspected and one not in failed:
                    one.candidate.held_tokens = one.memory.held_tokens(prefix)
                    found.append(one.candidate)
            return found

        def best(among: Callable[[EnginePool], Sequence[Engine]]) -> Placement | None:
            targets, sources = candidates(among(decode)), ()
            if may_hand_over:
                is_same = prefill.engines == decode.engines
                sources = targets if is_same else candidates(among(prefill))
            return self._planner.place(now, max(tokens, 1), most, sources, targets)

        placement = best(lambda pool: self._window(pool, name))
        if placement is not None and placement.is_late and len(decode.engines) > WINDOW:
            placement = best(_idlest)
        if placement is None:
            return Plan()
        source, engine = placement.prefill.key, placement.decode.key
        assert isinstance(source, Engine)  # as made above
        assert isinstance(engine, Engine)
        self._note(name, engine)
        source = None if placement.is_local else source
        return Plan(source, engine, placement, now + placement.first_token)

    def _window(self, pool: EnginePool, name: bytes) -> Sequence[Engine]:
        """Some of many engines, others each time, with the one that has had the prompt's beginning
        last."""
        engines = pool.engines
        start = self._turn % max(len(engines), 1)
        window = [*engines[start : start + WINDOW]]
        window += engines[: min(start, WINDOW - len(window))]
        last = self._last.get(name)
        if last in pool.members and last not in window:
            window.append(last)
        return window

    def _note(self, name: bytes, engine: Engine) -> None:
        if name:
            self._last.pop(name, None)
            self._last[name] = engine
            if len(self._last) > MAX_REMEMBERED:
                del self._last[next(iter(self._last))]


def _idlest(pool: EnginePool) -> Sequence[Engine]:
    """Of all engines as many as are looked at, those with the least to compute first."""
    usable = [one for one in pool.engines if one.usable]
    return nsmallest(WINDOW, usable, key=lambda one: one.load.queued)


def _name_of(prefix: Prefix) -> bytes:
    """What the requests of a conversation have in common, b"" for none."""
    return prefix.session or (prefix.blocks[0] if prefix.blocks else b"")


def most_tokens(body: Mapping[str, Any]) -> int:
    """Length that the request allows its answer."""
    for name in LENGTHS:
        value = body.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return MOST_TOKENS
