"""Spans of requests by OpenTelemetry, where its standard variables name an endpoint."""

import random
import re
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Thread
from typing import Any, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from vllm_commext.proxy.errors_phases import Outcome, parts_of

LOOK_SECONDS, CLOSE_SECONDS = 0.25, 3.0
MOST_KEPT = 4096
"""Requests that have ended and whose spans are not made; of more, the latest."""
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SCOPE = InstrumentationScope("vllm_commext.proxy")
_KINDS = {"prefill": SpanKind.CLIENT, "ask": SpanKind.CLIENT}
_FAILED = Status(StatusCode.ERROR)
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


class Traced(NamedTuple):
    """A request's own span, and its client's."""

    own: SpanContext
    parent: SpanContext | None


class Trace:
    """Makes spans of requests that have ended, from their marks: nothing is done for a token, and
    for a request only what engines have to know. A thread does the rest."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self._sampler, self._resource = provider.sampler, provider.resource
        self._processor = processor
        self._begun: dict[Outcome, Traced] = {}
        self._ended = deque[tuple[Outcome, Traced, str, float]](maxlen=MOST_KEPT)
        self._closes = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, outcome: Outcome, headers: dict[str, str]) -> None:
        """Take the client's ``traceparent``, or make one, and put the request's own in *headers*,
        so that engines' spans hang below it."""
        parent = _parent_of(headers.get("traceparent", ""))
        if parent is not None:
            trace_id, flags = parent.trace_id, parent.trace_flags
        else:
            headers.pop("tracestate", None)  # it belongs to a traceparent that is none
            trace_id = random.getrandbits(128) or 1
            decision = self._sampler.should_sample(None, trace_id, "request").decision
            flags = _SAMPLED if decision.is_sampled() else _NOT_SAMPLED
        own = SpanContext(trace_id, random.getrandbits(64) or 1, False, flags)
        self._begun[outcome] = Traced(own, parent)
        headers["traceparent"] = f"00-{trace_id:032x}-{own.span_id:016x}-{flags:02x}"

    def end(self, outcome: Outcome, path: str) -> None:
        """Note a request that has ended."""
        traced = self._begun.pop(outcome, None)
        if traced is not None and traced.own.trace_flags.sampled:
            self._ended.append((outcome, traced, path, time.monotonic()))

    def _run(self) -> None:
        while not self._closes.wait(LOOK_SECONDS):
            self._make_all()
        self._make_all()
        self._processor.shutdown()

    def _make_all(self) -> None:
        with suppress(IndexError):
            while True:
                self._make(*self._ended.popleft())

    def _make(self, outcome: Outcome, traced: Traced, path: str, now: float) -> None:
        zero = time.time_ns() - time.monotonic_ns()

        def hand_on(
            name: str, began: float, ended: float, told: Mapping[str, str | int], **others: Any
        ) -> None:
            span = ReadableSpan(
                name,
                resource=self._resource,
                attributes=told,
                start_time=zero + int(began * 1e9),
                end_time=zero + int(ended * 1e9),
                instrumentation_scope=_SCOPE,
                **others,
            )
            self._processor.on_end(span)

        for name, engine, began, ended in parts_of(outcome.began, outcome.route.marks):
            context = SpanContext(
                traced.own.trace_id, random.getrandbits(64) or 1, False, traced.own.trace_flags
            )
            hand_on(
                *(name, began, ended, {"engine": engine} if engine else {}),
                context=context,
                parent=traced.own,
                kind=_KINDS.get(name, SpanKind.INTERNAL),
            )
        told = {
            **{"http.route": path, "request.id": outcome.request_id, "outcome": outcome.kind},
            **{"path": outcome.route.path, "placement": outcome.route.placement},
            **{"prompt.tokens": outcome.prompt_tokens, "answer.tokens": outcome.tokens},
        }
        hand_on(
            *("request", outcome.began, now, told),
            context=traced.own,
            parent=traced.parent,
            kind=SpanKind.SERVER,
            status=_FAILED if outcome.has_failed else Status(),
        )

    def close(self) -> None:
        """Hand on what is left, for at most `CLOSE_SECONDS`."""
        self._closes.set()
        self._thread.join(CLOSE_SECONDS)


def _parent_of(header: str) -> SpanContext | None:
    found = _PARENT.fullmatch(header)
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    flags = _SAMPLED if int(found[3], 16) & TraceFlags.SAMPLED else _NOT_SAMPLED
    return SpanContext(int(found[1], 16), int(found[2], 16), True, flags)


def open_trace(environ: Mapping[str, str]) -> Trace:
    """Open a sender of spans, as OpenTelemetry's variables configure it."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    exporter: Any
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        exporter = trace_exporter.OTLPSpanExporter()
    is_named = "OTEL_SERVICE_NAME" in environ
    is_named |= "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if is_named else {"service.name": "vllm-commext-proxy"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    return Trace(provider, BatchSpanProcessor(exporter))
