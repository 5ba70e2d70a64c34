"""The engines of one role: which of them are healthy, and which takes the next request."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PREFILL = "prefill"
DECODE = "decode"


@dataclass(eq=False)
class Engine:
    """One vLLM server. Unhealthy until a check has passed.

    in_flight: requests of this proxy that the engine works on now. detail: the last reason why
    it is unhealthy, for people.
    """

    role: str
    idx: int
    url: str
    healthy: bool = False
    in_flight: int = 0
    detail: str = "not checked yet"
    num_passed: int = 0
    num_failed: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}{self.idx}"

    def passed_check(self, rise: int) -> None:
        """Note a passed check; *rise* of them in a row make the engine healthy."""
        self.num_failed = 0
        self.num_passed = min(self.num_passed + 1, rise)
        if self.num_passed >= rise:
            self.healthy, self.detail = True, "ok"

    def failed_check(self, fall: int, detail: str) -> None:
        """Note a failed check; *fall* of them in a row make the engine unhealthy."""
        self.num_passed = 0
        self.num_failed = min(self.num_failed + 1, fall)
        if self.num_failed >= fall:
            self.healthy = False
        if not self.healthy:
            self.detail = detail

    def suspect(self, detail: str) -> None:
        """A request could not reach the engine: send it none until a check passes again."""
        self.healthy, self.detail, self.num_passed = False, detail, 0

    def as_json(self) -> dict[str, str | int | bool]:
        return {
            "name": self.name,
            "url": self.url,
            "healthy": self.healthy,
            "in_flight": self.in_flight,
            "detail": self.detail,
        }


class EnginePool:
    """All engines of one role, in the order given."""

    def __init__(self, role: str, urls: Sequence[str]) -> None:
        self.role = role
        self.engines = tuple(Engine(role, idx, url) for idx, url in enumerate(urls))
        self._next_idx = 0

    @property
    def num_healthy(self) -> int:
        return sum(engine.healthy for engine in self.engines)

    def pick(self, exclude: Collection[Engine] = ()) -> Engine | None:
        """The healthy engine with the fewest requests in flight; round robin among equals."""
        count = len(self.engines)
        in_turn = [self.engines[(self._next_idx + step) % count] for step in range(count)]
        usable = [engine for engine in in_turn if engine.healthy and engine not in exclude]
        if not usable:
            return None
        chosen = min(usable, key=lambda engine: engine.in_flight)  # the first of equals
        self._next_idx = (chosen.idx + 1) % count
        return chosen
