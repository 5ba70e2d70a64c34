"""The proxy's own Prometheus metrics. Every label comes from a fixed set of values."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vllm_commext.proxy.engines import EnginePool
from vllm_commext.proxy.two_step import LOCAL_PREFILL_REASONS

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ProxyMetrics:
    """One registry a proxy, so that two proxies in one process do not share counts."""

    def __init__(self, pools: Iterable[EnginePool]) -> None:
        self._pools = tuple(pools)
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "commext_proxy_requests",
            "Requests ended, by outcome and by the side that decided it.",
            ("endpoint", "outcome", "side"),
            registry=registry,
        )
        self.local_prefills = Counter(
            "commext_proxy_local_prefills",
            "Requests sent to a decode engine without a prefill engine's KV cache, by reason.",
            ("reason",),
            registry=registry,
        )
        for reason in LOCAL_PREFILL_REASONS:
            self.local_prefills.labels(reason)  # a rate needs the 0 before the first one
        self.retries = Counter(
            "commext_proxy_retries",
            "Engines asked after the first one had failed.",
            ("role",),
            registry=registry,
        )
        self.in_flight = Gauge(
            "commext_proxy_requests_in_flight", "Requests being served now.", registry=registry
        )
        self._describe_engines(registry)
        self._describe_times(registry)

    def _describe_engines(self, registry: CollectorRegistry) -> None:
        self._healthy = Gauge(
            "commext_proxy_engines_healthy", "Healthy engines.", ("role",), registry=registry
        )
        self._engine_in_flight = Gauge(
            "commext_proxy_engine_requests_in_flight",
            "Requests of this proxy that an engine works on now.",
            ("role", "engine"),
            registry=registry,
        )

    def _describe_times(self, registry: CollectorRegistry) -> None:
        self.prefill_seconds = Histogram(
            "commext_proxy_prefill_seconds",
            "Time of a successful prefill step, other engines tried included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.decode_headers_seconds = Histogram(
            "commext_proxy_decode_headers_seconds",
            "Time until the decode engine's status line (streaming: before its first token).",
            buckets=_SECONDS,
            registry=registry,
        )

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        for pool in self._pools:
            self._healthy.labels(pool.role).set(pool.num_healthy)
            for engine in pool.engines:
                self._engine_in_flight.labels(pool.role, engine.name).set(engine.in_flight)
        return generate_latest(self._registry)
