"""The engines of one role: what each can do, its state and its work."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from vllm_commext.proxy.engines.affinity import Memory, Prefix
from vllm_commext.proxy.policy.engine_load import EngineLoad
from vllm_commext.proxy.policy.prompt_queue import Repeats, Turns

logger = logging.getLogger("vllm.commext.proxy")

PREFILL = "prefill"
DECODE = "decode"
ROLES = (PREFILL, DECODE)
BOTH = "both"
"""Role of an engine that takes either step, or both of one request."""
ENGINE_ROLES = (*ROLES, BOTH)
# What a request weighs besides its tokens: answering it costs an engine something even so.
REQUEST_TOKENS = 64
SILENT_SECONDS = 60.0
"""Others are asked first for so long after an engine has let a request time out; then one request
at a time is sent there until it answers."""
SideChannelFields = Mapping[str, str | int]


@dataclass(frozen=True)
class SideChannel:
    """seal: its proof for other engines, "" without a secret."""

    host: str
    port: int
    seal: str


@dataclass(frozen=True)
class Rank:
    """streams: chunk by chunk, both ways. reuse: it offers blocks. releases: it knows keys."""

    number: str
    channel: SideChannel
    streams: bool = False
    reuse: bool = False
    releases: bool = False


@dataclass(frozen=True)
class Capabilities:
    """Read from an engine's metrics page, if is_known. caches: one rank keeps prefixes; forgets: no
    rank does."""

    ranks: tuple[Rank, ...] = ()
    is_known: bool = False
    caches: bool = False
    forgets: bool = False

    @cached_property
    def streams(self) -> bool:
        return bool(self.ranks) and all(rank.streams for rank in self.ranks)

    @cached_property
    def key_ranks(self) -> tuple[str, ...]:
        return tuple(rank.number for rank in self.ranks if rank.releases)

    @cached_property
    def offers(self) -> tuple[SideChannelFields, ...]:
        return tuple(asdict(rank.channel) for rank in self.ranks if rank.reuse)


UNKNOWN = Capabilities()


@dataclass(eq=False)
class State:
    """Unhealthy until a check has passed. leaving: it goes when nothing runs. suspected: a request
    lost its connection since the last check. doubted: it is to be checked now. silent_until: of the
    monotonic clock; 0 unless it has let a request time out and answered none since."""

    healthy: bool = False
    draining: bool = False
    drains_itself: bool = False
    leaving: bool = False
    suspected: bool = False
    detail: str = "not checked yet"
    num_failed: int = 0
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    silent_until: float = 0.0

    @property
    def is_silent(self) -> bool:
        return self.silent_until > 0.0 and time.monotonic() < self.silent_until

    @property
    def is_last(self) -> bool:
        return self.suspected or self.is_silent

    @contextmanager
    def awaited(self, seconds: float) -> Iterator[None]:
        """Wait for an answer, at most so long; meanwhile others do not after a silence."""
        if self.silent_until:
            self.silent_until = time.monotonic() + seconds
        try:
            yield
        except BaseException as error:
            if self.silent_until or type(error) is TimeoutError:  # none of a connection
                self.note_silence()
            raise

    def note_silence(self) -> None:
        self.silent_until = time.monotonic() + SILENT_SECONDS

    @property
    def drains(self) -> bool:
        return self.draining or self.drains_itself

    @property
    def is_emptied(self) -> bool:
        return self.drains_itself or (self.draining and not self.leaving)

    def want(self, is_wanted: bool, is_drained: bool) -> None:
        self.leaving, self.draining = not is_wanted, is_drained or not is_wanted

    def pass_check(self) -> None:
        if self.num_failed or not self.healthy:  # all of it stood still: it is back
            self.silent_until = 0.0
        self.num_failed, self.suspected, self.drains_itself = 0, False, False
        self.healthy, self.detail = True, "ok"

    def count_failure(self) -> int:
        self.num_failed += 1
        return self.num_failed

    def fall(self, detail: str) -> None:
        self.healthy, self.detail, self.silent_until = False, detail, 0.0

    def suspect(self) -> None:
        """Have the engine checked now, and others asked first."""
        self.suspected = True
        self.doubted.set()


@dataclass(eq=False)
class Work:
    """Requests at an engine. tokens: their weight. waiting: answers, for its prompts, up to
    `MAX_WAITING`: vLLM looks at each every step."""

    MAX_WAITING: ClassVar = 8
    in_flight: int = 0
    tokens: int = 0
    waiting: set[object] = field(default_factory=set[object])
    on_lost: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])
    on_drain: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])

    @property
    def is_busy(self) -> bool:
        return len(self.waiting) >= self.MAX_WAITING

    @contextmanager
    def counted(self, tokens: int) -> Iterator[None]:
        weight = REQUEST_TOKENS + tokens
        self.in_flight += 1
        self.tokens += weight
        try:
            yield
        finally:
            self.in_flight -= 1
            self.tokens -= weight


@dataclass(eq=False)
class Engine:
    role: str
    name: str
    url: str
    memory: Memory = field(default_factory=lambda: Memory(0))
    capabilities: Capabilities = UNKNOWN
    load: EngineLoad = field(default_factory=EngineLoad)
    state: State = field(default_factory=State)
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        load, self.repeats = self.load, Repeats()
        self.turns = Turns(load.queue, load.backlog, load.speed.prefill_seconds)
        load.when_done.append(self.turns.wake)

    @property
    def usable(self) -> bool:
        state = self.state
        return state.healthy and not state.draining and not state.drains_itself

    def fall(self, detail: str) -> None:
        """Be unhealthy, and hold nothing."""
        self.state.fall(detail)
        self.memory.clear()
        self.load.cache.forget()
        self.capabilities = UNKNOWN

    def refuse(self, detail: str) -> None:
        """Give no work to an engine that refuses connections, until a check passes."""
        self.fall(detail)
        self.state.suspect()

    def note_drain(self) -> None:
        if not self.state.drains_itself:
            self.state.drains_itself = True
            logger.info("%s (%s) drains", self.name, self.url)
            self.empty()

    def empty(self) -> None:
        for called in tuple(self.work.on_drain):
            called()

    def note_answer(self, prefix: Prefix) -> None:
        """It has computed a prompt that begins so."""
        self.state.silent_until = 0.0
        if not self.capabilities.forgets:
            self.memory.note(prefix)

    def learn(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    def learn_again(self) -> None:
        """Have the next check read the metrics page again."""
        self.capabilities = replace(self.capabilities, is_known=False)

    def lose(self) -> None:
        """Give up all its requests, and give it none until a check passes."""
        if self.state.healthy:
            self.fall("it has answered no check for too long")
            logger.warning("%s (%s) is now unhealthy: %s", self.name, self.url, self.state.detail)
        for called in tuple(self.work.on_lost):
            called()

    def as_json(self) -> dict[str, str | int | bool]:
        state, work = self.state, self.work
        told = {"name": self.name, "role": self.role, "url": self.url, "healthy": state.healthy}
        told |= {"draining": state.drains, "in_flight": work.in_flight, "tokens": work.tokens}
        return {**told, "detail": "a request timed out" if state.silent_until else state.detail}


class EnginePool:
    """All engines of one role, in the order in which they came."""

    def __init__(
        self, role: str, affinity_tokens: int = 0, load_of: Callable[[], EngineLoad] = EngineLoad
    ) -> None:
        self.role, self._affinity_tokens, self._load_of = role, affinity_tokens, load_of
        self.engines: tuple[Engine, ...] = ()
        self.members: frozenset[Engine] = frozenset()
        self.has_both = self.are_both = False
        self._next_idx = 0

    def add(self, url: str, role: str = "") -> Engine:
        role = role or self.role
        taken = {engine.name for engine in self.engines if engine.role == role}
        kind, num = "engine" if role == BOTH else role, len(taken)
        names = (f"{kind}{idx}" for idx in (num, *range(num)))
        name = next(one for one in names if one not in taken)
        memory = Memory(self._affinity_tokens)
        engine = Engine(role, name, url, memory=memory, load=self._load_of())
        self.join(engine)
        return engine

    def join(self, engine: Engine) -> None:
        """Add an engine of both roles, which is in the other pool already."""
        self._set((*self.engines, engine))

    def remove(self, engine: Engine) -> None:
        self._set(tuple(one for one in self.engines if one is not engine))

    def _set(self, engines: tuple[Engine, ...]) -> None:
        self.engines, self.members = engines, frozenset(engines)
        self.has_both = any(one.role == BOTH for one in engines)
        self.are_both = all(one.role == BOTH for one in engines)

    @property
    def num_usable(self) -> int:
        return sum(engine.usable for engine in self.engines)

    def has_other(self, engine: Engine, may_be_last: bool = True) -> bool:
        others = (one for one in self.engines if one.usable and one is not engine)
        return any(may_be_last or not one.state.is_last for one in others)

    @property
    def in_turn(self) -> tuple[Engine, ...]:
        return (*self.engines[self._next_idx :], *self.engines[: self._next_idx])

    def end_turn(self, engine: Engine) -> None:
        """Begin with the one behind *engine* next time."""
        self._next_idx = (self.engines.index(engine) + 1) % len(self.engines)
