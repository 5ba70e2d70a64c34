"""The servers of a run: a prefill and a decode engine, and the proxy in front."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.chaos.engine import Engine
from tests.chaos.network import Link
from tests.chaos.schedule import (
    DECODE,
    DECODE_STEP_SECONDS,
    HANDSHAKE_SECONDS,
    LEASE_SECONDS,
    PREFILL,
    PREFILL_STEP_SECONDS,
    TRANSFER_SECONDS,
    Scenario,
)
from tests.kit import CORRUPTING_MODULE, ROOT, cluster
from tests.kit.fleet import AdminPort
from tests.kit.metrics import Metrics, scrape
from tests.kit.parity import complete, post
from tests.kit.served import ADAPTER
from tests.kit.servers import LOOPBACK, ProxyServer, free_port
from vllm_commext.errors import CommextError
from vllm_commext.proxy.errors_phases import Resume

COMPILED_LATE = '"ngram"'
"""vLLM compiles this search for an engine's first draft, in 1.2 s of a core, not at its start: an
engine is back once it has."""
NUM_BLOCKS = 256
CHUNK_TOKENS = 64
"""Where prompts are streamed: the load's have one to five chunks."""
QUIET_SECONDS = LEASE_SECONDS + 12.0
ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
# The CPU kernels keep code for every new shape of a batch, for instance 130 MiB in half a minute of
# this load on a server without connector: it would hide what the connector holds.
NO_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
ADAPTERS_COME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# One heap for all threads, and large blocks go back to the kernel when they are freed: what is
# resident is then what is held, but for a few MiB.
FRUGAL_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
BLOCKS_IN_USE = "vllm:kv_cache_usage_perc"
FAILED_LOADS = "vllm:commext_nixl_failures_total"
REUSED = {
    "lookups": "vllm:commext_nixl_reuse_lookups_total",
    "blocks": "vllm:commext_nixl_reuse_blocks_total",
    "in vain": "vllm:commext_nixl_reuse_recomputed_blocks_total",
}
PROXY_ARGS = (
    "--prefill-timeout", f"{PREFILL_STEP_SECONDS:g}",
    "--decode-timeout", f"{DECODE_STEP_SECONDS:g}",
    "--health-interval", "0.25", "--health-timeout", "3",
)  # fmt: skip
# Where another engine can serve it, no request waits for one that has fallen silent.
SPARE_PROXY_ARGS = ("--engine-lost", "3")


@dataclass
class Testbed:
    """All servers of one run, ``engines`` those that faults work on; ``link`` leads to the prefill
    engine's namespace."""

    scenario: Scenario
    model: Path
    folder: Path
    link: Link | None = None
    engines: dict[str, Engine] = field(default_factory=dict[str, Engine])
    spares: dict[str, Engine] = field(default_factory=dict[str, Engine])
    proxy: ProxyServer | None = None
    admin: AdminPort = field(init=False)
    _reused: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def start(self) -> None:
        for role in (PREFILL, DECODE):
            self.engines[role] = self._begin(role, role)
            if self.scenario.spares:
                self.spares[role] = self._begin(role, f"{role}-spare")
        for engine in self._all():
            engine.wait_ready()
        args = [*PROXY_ARGS, *(SPARE_PROXY_ARGS if self.scenario.spares else ())]
        args += ["--stream-chunks", "auto" if self.scenario.streams else "never"]
        self.admin = AdminPort(self.folder)
        args += [*self.admin.args, *self.scenario.proxy_args]
        self.proxy = ProxyServer(
            "proxy", self.urls(PREFILL), self.urls(DECODE), self.folder, args=args
        )
        self.proxy.start()
        self.proxy.wait_ready()

    def stop(self) -> None:
        if self.proxy is not None:
            self.proxy.stop()
        for engine in self._all():
            engine.stop()

    def host(self, role: str) -> str:
        return self.link.far_address if self.link and role == PREFILL else LOOPBACK

    def urls(self, role: str) -> list[str]:
        return [self._url(engine) for engine in self._all() if engine.role == role]

    def url(self, role: str) -> str:
        return self._url(self.engines[role])

    @property
    def proxy_url(self) -> str:
        assert self.proxy is not None, "not started"
        return self.proxy.url

    def aim(self, rng: random.Random) -> None:
        in_flight = self.admin.in_flight()
        for role, spare in self.spares.items():
            both = [self.engines[role], spare]
            both.sort(key=lambda one: (in_flight[self._url(one)], rng.random()))
            self.spares[role], self.engines[role] = both

    def exchange(self, role: str) -> None:
        self.engines[role], self.spares[role] = self.spares[role], self.engines[role]

    def signal(self, role: str, number: signal.Signals) -> None:
        self.engines[role].server.signal_all(number)

    def restart(self, role: str, *, as_another: bool) -> None:
        """Kill an engine and start it anew, under its old or under another id and port."""
        engine = self.engines[role]
        engine.server.signal_all(signal.SIGKILL)
        engine.stop()
        if as_another:
            engine.engine_id = f"{role}-{engine.generation}"
            engine.side_channel_port = free_port()
        if role == DECODE and not self.scenario.spares:
            engine.policy = "fail" if engine.policy == "recompute" else "recompute"
        self._launch(engine)
        engine.wait_ready()
        if any(COMPILED_LATE in one for one in self.scenario.args):
            complete(self._url(engine), cluster.MODEL_NAME, [1, 2, 3, 1, 2, 3], max_tokens=2)

    def load_adapter(self, role: str, folder: str) -> None:
        """Let a role's engines serve the adapter of another folder beside the model under its
        name."""
        path = str(self.model.parent / folder)
        body = {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True}
        for url in self.urls(role):
            post(f"{url}/v1/load_lora_adapter", body)

    def metrics(self, role: str) -> Metrics:
        return scrape(self.url(role))

    def failed_loads(self) -> float:
        """Requests so far whose load failed and that their decode engine then computed."""
        readers = [one for one in self._all() if one.role == DECODE]
        readers = [one for one in readers if one.policy == "recompute"]
        return sum(scrape(self._url(engine)).total(FAILED_LOADS) for engine in readers)

    def streamed(self) -> float:
        """Requests so far that both engines were asked for at once, and D has answered."""
        return self.proxy_metrics().total("commext_proxy_streams_total", way="streamed")

    def count_reused(self) -> None:
        for engine in self._all():
            if engine.role == DECODE:
                page = scrape(self._url(engine))
                counts = {what: int(page.total(name)) for what, name in REUSED.items()}
                self._reused[engine.server.name] = counts

    def reused(self) -> dict[str, int]:
        self.count_reused()
        return {what: sum(one[what] for one in self._reused.values()) for what in REUSED}

    def streams_by(self, name: str) -> Counter[str]:
        """The streams that have lost or left their decode engine, by what became of them."""
        page = self.proxy_metrics()
        counts = {result: int(page.total(name, result=result)) for result in Resume}
        return Counter({str(result): count for result, count in counts.items() if count})

    def proxy_metrics(self) -> Metrics:
        return scrape(self.proxy_url)

    def deaths(self) -> list[str]:
        """Engines whose processes ended without being told to."""
        found: list[str] = []
        for engine in self._all():
            missing = engine.pids - set(engine.server.pids())
            if missing:
                tail = engine.server.log_tail(5)
                found.append(f"{engine.server.name}: processes ended: {tail}")
        return found

    def wait_quiet(self) -> list[str]:
        """Wait, without load, until no block is in use; what is in use after the longest lease."""
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            busy = [
                f"{role}: {usage:.1%} of the blocks are still in use"
                for role in ROLES
                if (usage := self._blocks_in_use(role))
            ]
            if not busy or time.monotonic() > deadline:
                return busy
            time.sleep(0.5)

    def take_baseline(self, role: str) -> None:
        self.engines[role].take_baseline()

    def sample_memory(self) -> None:
        """Remember how much memory each engine has now, after a fault."""
        for engine in self._all():
            engine.heap_bytes.append(engine.take_census().heap_bytes)

    def compare_with_baseline(self, role: str) -> list[str]:
        return self.engines[role].compare_with_baseline()

    def leaks_of_spares(self) -> list[str]:
        return [problem for engine in self.spares.values() for problem in engine.leaks()]

    def _blocks_in_use(self, role: str) -> float:
        # The gauge is set by steps only, so it takes a request to bring it up to date.
        try:
            complete(
                self.url(role), cluster.MODEL_NAME, (65,) * 8, max_tokens=1, timeout_seconds=20
            )
            return self.metrics(role).total(BLOCKS_IN_USE)
        except (CommextError, httpx.HTTPError, OSError):
            return float("nan")  # it does not answer: not quiet

    def _all(self) -> list[Engine]:
        return [*self.engines.values(), *self.spares.values()]

    def _url(self, engine: Engine) -> str:
        return f"http://{self.host(engine.role)}:{engine.http_port}"

    def _begin(self, role: str, name: str) -> Engine:
        engine = Engine(name, role, free_port(), f"{name}-0", free_port())
        self._launch(engine)
        return engine

    def _launch(self, engine: Engine) -> None:
        engine.generation += 1
        connector = self.scenario.connector if engine.role == DECODE else cluster.CONNECTOR
        does_damage = connector != cluster.CONNECTOR
        caches = self.scenario.reuse and engine.role == DECODE
        config = cluster.kv_transfer_config(
            ROLES[engine.role],
            connector=connector,
            module_path=CORRUPTING_MODULE if does_damage else None,
            policy=engine.policy,
            engine_id=engine.engine_id,
            extra={
                "side_channel_host": self.host(engine.role),
                "side_channel_port": engine.side_channel_port,
                "handshake_timeout": HANDSHAKE_SECONDS,
                "transfer_timeout": TRANSFER_SECONDS,
                "kv_lease_duration": LEASE_SECONDS,
                "stream_chunks": self.scenario.streams,
                **({"reuse_blocks": True} if caches else {}),
            },
        )
        args = ["--num-gpu-blocks-override", str(NUM_BLOCKS)]
        # Without a prefix cache every request has to be read.
        args += [
            "--enable-prefix-caching" if caches else "--no-enable-prefix-caching",
            *self.scenario.args,
        ]
        if self.scenario.streams:
            args += ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
        environ: dict[str, str | None] = {**NO_KERNEL_CACHES, **FRUGAL_HEAP, **ADAPTERS_COME}
        if does_damage:
            environ["PYTHONPATH"] = str(ROOT)
        if self.link is not None:
            args += ["--host", "0.0.0.0"]
            far = engine.role == PREFILL
            environ["UCX_NET_DEVICES"] = self.link.far if far else self.link.near
        server = cluster.engine_server(
            f"{engine.name}-{engine.generation}",
            self.model,
            self.folder,
            config,
            port=engine.http_port,
            args=args,
            environ=environ,
        )
        server.url = self._url(engine)
        if self.link is not None and engine.role == PREFILL:
            server.command[:0] = self.link.enter()
        engine.start(server)
