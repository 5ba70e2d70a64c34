"""Spans of each request join to one tree, which engines' spans hang below."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.proxy.test_moving import ANSWERED, OTHER, Engines, drained
from tests.unit.proxy.test_resume import COMPLETIONS
from tests.unit.proxy.test_window import stream_both
from vllm_commext.proxy.errors_phases import Resume

pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")
CLIENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
STREAM = {"prompt": "hello " * 20, "max_tokens": 20, "stream": True}


class Traced:
    """A trace of a cluster's proxy, into memory."""

    def __init__(self, cluster: Any) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from vllm_commext.proxy.window.opentelemetry_spans import Trace

        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        self._trace = Trace(provider, SimpleSpanProcessor(self._exporter))
        cluster.proxy.ledger.trace = self._trace

    def spans(self) -> Sequence[Any]:
        self._trace.close()
        return self._exporter.get_finished_spans()


def ids_of(call: Any) -> tuple[int, int]:
    """Trace and span that an engine was told."""
    _, trace_id, span_id, _ = call.headers["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


async def test_a_client_s_trace_goes_on_and_both_engines_hang_below_the_request(kit: Any) -> None:
    async with kit.cluster() as cluster:
        traced = Traced(cluster)
        await cluster.ask(STREAM, headers={"traceparent": CLIENT, "tracestate": "a=b"})
        calls = [cluster.prefill[0].calls[0], cluster.decode[0].calls[0]]
    spans = {span.name: span for span in traced.spans()}
    assert set(spans) == {"request", "queue", "prefill", "ask", "first token", "decode"}
    request = spans.pop("request")
    assert request.parent.span_id == 0x0123456789ABCDEF
    assert {span.context.trace_id for span in spans.values()} == {
        0x0123456789ABCDEF0123456789ABCDEF
    }
    assert {span.parent.span_id for span in spans.values()} == {request.context.span_id}
    assert {ids_of(call) for call in calls} == {(request.context.trace_id, request.context.span_id)}
    assert {call.headers["tracestate"] for call in calls} == {"a=b"}
    assert all(request.start_time <= span.start_time <= span.end_time for span in spans.values())
    assert all(span.end_time <= request.end_time for span in spans.values())


async def test_whatever_happens_each_request_is_one_tree(kit: Any) -> None:
    async with kit.cluster(0, 0, num_both=3, health_interval_seconds=0.05) as cluster:
        traced = Traced(cluster)
        good = lambda call: stream_both(kit, call)  # noqa: E731
        bad = (good, kit.dropping, kit.answering(500, b"{}"), kit.answering(400, b"{}"))
        for behave in (*bad, kit.streaming(b'data: {"choices": [{"text": "a"}]}\n\n')):
            cluster.both[0].behave = cluster.both[1].behave = behave
            cluster.both[2].behave = behave if behave is bad[2] else good
            for body in (STREAM, {**STREAM, "stream": False}, {"prompt": 5}, "none"):
                await cluster.ask(body)
        told = {ids_of(call) for engine in cluster.both for call in engine.calls}
    spans = traced.spans()
    requests = {(one.context.trace_id, one.context.span_id): one for one in spans if not one.parent}
    assert len(requests) == 20
    assert told <= set(requests)
    for span in spans:
        if span.parent:
            assert (span.context.trace_id, span.parent.span_id) in requests
    outcomes = {one.attributes["outcome"] for one in requests.values()}
    assert {"ok", "bad_request", "engine_error"} <= outcomes
    assert "hello" not in str([dict(one.attributes) for one in spans])


@pytest.mark.parametrize(
    ("answer", "result"), [(ANSWERED, Resume.RESUMED), (OTHER, Resume.DIFFERS)]
)
async def test_who_answers_after_a_move_is_told(kit: Any, answer: Any, result: Resume) -> None:
    async with kit.cluster(num_decode=2) as cluster:
        traced = Traced(cluster)
        await drained(cluster, Engines(COMPLETIONS, answer), {}, result)
    (spans := list(traced.spans())).sort(key=lambda span: span.start_time)
    assert len({span.context.trace_id for span in spans}) == 1
    assert "move" in {span.name for span in spans}
    answered = [span.attributes["engine"] for span in spans if span.name == "decode"]
    assert answered == ["decode0", "decode1" if result is Resume.RESUMED else "decode0"]


@pytest.mark.parametrize("header", ["", "00-0-0-01", f"00-{'1' * 32}-{'0' * 16}-01", "x" * 300])
async def test_a_header_that_is_none_begins_a_new_trace(kit: Any, header: str) -> None:
    async with kit.cluster() as cluster:
        traced = Traced(cluster)
        await cluster.ask(STREAM, headers={"traceparent": header, "tracestate": "a=b"})
        call = cluster.decode[0].calls[0]
    (request,) = (span for span in traced.spans() if span.name == "request")
    assert request.parent is None
    assert ids_of(call)[0] == request.context.trace_id
    assert "tracestate" not in call.headers


async def test_what_the_client_does_not_sample_is_passed_on_and_not_sent(kit: Any) -> None:
    async with kit.cluster() as cluster:
        traced = Traced(cluster)
        await cluster.ask(STREAM, headers={"traceparent": CLIENT[:-1] + "0"})
        assert cluster.decode[0].calls[0].headers["traceparent"].endswith("-00")
    assert not traced.spans()


def test_without_an_endpoint_nothing_is_imported_and_a_lack_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    from vllm_commext.proxy.routes_readiness_shutdown import _trace_of

    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    monkeypatch.setitem(sys.modules, "vllm_commext.proxy.window.opentelemetry_spans", None)
    assert _trace_of({}) is None
    assert _trace_of({**endpoint, "OTEL_SDK_DISABLED": "true"}) is None
    assert not caplog.records
    assert _trace_of(endpoint) is None
    assert "vllm_commext[otel]" in caplog.text
