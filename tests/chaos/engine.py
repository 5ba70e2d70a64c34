"""One engine's place: its HTTP port stays, its processes come and go, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.chaos.census import Census, growth, leak, settled, take_census
from tests.kit.servers import VllmServer


@dataclass
class Engine:
    """An engine of a run: how often it was started, its processes once it was ready, the census
    after its first requests, and its private memory after each fault since its start."""

    name: str
    role: str
    http_port: int
    engine_id: str
    side_channel_port: int
    policy: str = "recompute"
    generation: int = 0
    running: VllmServer | None = None
    pids: frozenset[int] = frozenset()
    baseline: Census | None = None
    heap_bytes: list[int] = field(default_factory=list[int])

    @property
    def server(self) -> VllmServer:
        assert self.running is not None, "not started"
        return self.running

    def start(self, server: VllmServer) -> None:
        self.running, self.baseline, self.heap_bytes = server, None, []
        server.start()

    def wait_ready(self) -> None:
        self.server.wait_ready()
        self.pids = frozenset(self.server.pids())

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()

    def take_census(self) -> Census:
        return take_census(self.server.pids())

    def take_baseline(self) -> None:
        if self.baseline is None:
            self.baseline = self.take_census()

    def compare_with_baseline(self) -> list[str]:
        """Growth since its baseline, if it has one, and leaks."""
        before = self.baseline
        if before is None:
            return []
        found = growth(before, settled(self.take_census, before))
        return [*(f"{self.server.name}: {line}" for line in found), *self.leaks()]

    def leaks(self) -> list[str]:
        return [f"{self.server.name}: {line}" for line in leak(self.heap_bytes)]
