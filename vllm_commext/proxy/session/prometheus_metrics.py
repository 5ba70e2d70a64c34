"""The proxy's own Prometheus metrics. Every label comes from a fixed set of values."""

import time
from collections import Counter as Counts
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vllm_commext.proxy.engines.engine import ROLES, EnginePool
from vllm_commext.proxy.errors_phases import KINDS, AtOnce, LocalPrefill, Resume

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5, 30)
_TOKEN_SECONDS = (0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.05, 0.1, 0.25, 1)
_PAGE_SHARE = 4
_PREFIX = "commext_proxy_"


class _Registry(CollectorRegistry):
    def counter(self, name: str, text: str, *labels: str, values: Iterable[str] = ()) -> Counter:
        """A counter that begins with a 0 for each of *values*, which a rate needs."""
        made = Counter(_PREFIX + name, text, labels, registry=self)
        for value in values:
            made.labels(value)
        return made

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self)

    def seconds(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self)


class StepMetrics:
    """Counts of the steps that engines are asked for."""

    def __init__(self, of: _Registry) -> None:
        text = "Attempts on another engine after a failure, by role."
        self.retries = of.counter("retries", text, "role")
        text = "Prefills that nobody was to read: those whose engines were told, or could not be."
        self.releases = of.counter("releases", text, "outcome", values=("sent", "failed"))
        text = "Estimated prompt tokens already cached (held) or not (new) on the chosen engine."
        labels = of.counter("affinity_tokens", text, "role", "kind").labels
        self._affinity = {role: (labels(role, "held"), labels(role, "new")) for role in ROLES}
        text = "Time of a successful prefill step, other engines tried included."
        self.prefill_seconds = of.seconds("prefill_seconds", text)
        text = "Time until the decode engine's first token (without streaming: its answer)."
        self.decode_headers_seconds = of.seconds("decode_headers_seconds", text)

    def note_held(self, role: str, held: int, new: int) -> None:
        for counter, num_tokens in zip(self._affinity[role], (held, new), strict=True):
            counter.inc(num_tokens)


class WayMetrics:
    """Of the ways that requests take."""

    def __init__(self, of: _Registry) -> None:
        text = "Requests sent to a decode engine without a prefill engine's KV cache, by reason."
        self.local_prefills = of.counter("local_prefills", text, "reason", values=LocalPrefill)
        text = "Two-step requests, by concurrent dispatch (streamed) or the reason against it."
        self.streams = of.counter("streams", text, "way", values=AtOnce)
        text = (
            "Attempts whose engines were planned: wholly at one engine, handed over to another, or "
            "wholly at the engine with the least work, while no speed is known or by choice."
        )
        self.placements = of.counter("placements", text, "kind", values=KINDS)
        text = "Time to the first token of streams that were placed, as expected and as it came."
        self._first = of.seconds("placement_first_token_seconds", text, "kind")
        text = "Time to each token after it, as a mean over the answer, as expected and as it came."
        self._each = of.seconds("placement_per_token_seconds", text, "kind", buckets=_TOKEN_SECONDS)

    def note_times(self, kind: str, first_token: float, per_token: float) -> None:
        self._first.labels(kind).observe(first_token)
        self._each.labels(kind).observe(per_token)


class AnswerMetrics:
    """Counts of how answers went on and ended."""

    def __init__(self, of: _Registry) -> None:
        text = "Requests retried from the start because decode failed before the first token."
        self.restarts = of.counter("restarts", text, "outcome")
        text = "Streams whose decode engine was lost or gave them up, by what became of them."
        self.resumes = of.counter("resumes", text, "result", values=Resume)
        text = "Streams whose decode engine drains, by what became of them there."
        self.moves = of.counter("moves", text, "result", values=Resume)
        text = "Between two tokens of a stream that went on at another engine as its own drained."
        self.move_seconds = of.seconds("move_pause_seconds", text)
        text = "From a request's arrival to its first token, of streamed answers, by decode engine."
        self.first_token_seconds = of.seconds("first_token_seconds", text, "engine")
        text = "Between two pieces of a streamed answer, by decode engine."
        self.gaps = of.seconds("inter_token_seconds", text, "engine", buckets=_GAP_SECONDS)
        text = "From a request's arrival to the end of its answer, by decode engine."
        self.request_seconds = of.seconds("request_seconds", text, "engine")


class ProxyMetrics:
    def __init__(self, pools: Iterable[EnginePool]) -> None:
        self._pools = tuple(pools)
        self._page, self._page_until = b"", 0.0
        self._registry = of = _Registry()
        text = "Requests ended, by outcome and by the side that decided it."
        self.requests = of.counter("requests", text, "endpoint", "outcome", "side")
        healthy = of.gauge("engines_healthy", "Healthy engines that do not drain.", "role")
        text = "Requests of this proxy that an engine works on now."
        self._engines = healthy, of.gauge("engine_requests_in_flight", text, "role", "engine")
        self.in_flight = of.gauge("requests_in_flight", "Requests being served now.")
        self.steps, self.ways, self.answers = StepMetrics(of), WayMetrics(of), AnswerMetrics(of)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format. A page is served again for `_PAGE_SHARE` times as
        long as it took to make, unless a request ends: frequent scrapes cost little."""
        began = time.monotonic()
        if began >= self._page_until:
            healthy, in_flight = self._engines
            in_flight.clear()  # of engines that were removed
            for pool in self._pools:
                healthy.labels(pool.role).set(pool.num_usable)
                for engine in pool.engines:
                    in_flight.labels(engine.role, engine.name).set(engine.work.in_flight)
            self._page = generate_latest(self._registry)
            now = time.monotonic()
            self._page_until = now + _PAGE_SHARE * (now - began)
        return self._page

    def note_ended(self, endpoint: str, outcome: str, side: str) -> None:
        self.requests.labels(endpoint, outcome, side).inc()
        self._page_until = 0.0

    def streams_counted(self) -> Counts[str]:
        """Placements by kind, and streams that were resumed, moved, and lost for good."""
        resumes, moves = _values(self.answers.resumes), _values(self.answers.moves)
        counts = Counts(_values(self.ways.placements))
        counts["resumed"], counts["moved"] = resumes[Resume.RESUMED], moves[Resume.RESUMED]
        counts["lost"] = sum(resumes.values()) - resumes[Resume.RESUMED]
        return counts


def _values(metric: Counter) -> dict[str, int]:
    """A counter's values by its only label."""
    (family,) = metric.collect()
    samples = [one for one in family.samples if one.name.endswith("_total")]
    return {next(iter(one.labels.values())): int(one.value) for one in samples}
