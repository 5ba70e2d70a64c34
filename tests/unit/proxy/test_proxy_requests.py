"""Requests that succeed, and those the proxy itself refuses, over real connections."""

import asyncio
import json
from typing import Any

import pytest

from tests.kit.parity import PREFILL_PARAMS

TWO_STEP = {"prompt": "hello", "max_tokens": 20, "min_tokens": 4, "logprobs": 2, "seed": 7}


async def test_both_steps_get_what_they_need(kit: Any) -> None:
    async with kit.cluster() as cluster:
        headers = {
            "X-Request-Id": "my-id",
            "Authorization": "Bearer key",
            "X-Session-ID": "s",
            "X-data-parallel-rank": "1",
        }
        async with cluster.post(TWO_STEP, headers=headers) as response:
            assert response.status == 200
            assert await response.json() == {"choices": [{"text": "hello"}]}
            assert response.headers["X-Request-Id"] == "my-id"
            assert response.headers["X-Commext-Path"] == "two-step"
            assert response.headers["X-Commext-Prefill"] == "prefill0"
            assert response.headers["X-Commext-Decode"] == "decode0"
        (first,), (second,) = cluster.prefill[0].calls, cluster.decode[0].calls
        assert first.path == second.path == "/v1/completions"
        assert first.body == {
            "prompt": "hello",
            "max_tokens": 1,
            "min_tokens": 1,
            "logprobs": 2,
            "seed": 7,
            "stream": False,
            "ignore_eos": True,
            "kv_transfer_params": PREFILL_PARAMS,
        }
        assert second.body == {**TWO_STEP, "kv_transfer_params": kit.kv_params}
        for call in (first, second):
            assert call.headers["x-request-id"] == "my-id"
            assert call.headers["authorization"] == "Bearer key"
            assert call.headers["x-session-id"] == "s"
            assert "x-data-parallel-rank" not in call.headers


@pytest.mark.parametrize("given", [None, "with space", "x" * 200])
async def test_an_unusable_request_id_is_replaced_by_one_for_both_engines(
    kit: Any, given: Any
) -> None:
    async with kit.cluster() as cluster:
        headers = {} if given is None else {"X-Request-Id": given}
        async with cluster.post(TWO_STEP, headers=headers) as response:
            told = response.headers["X-Request-Id"]
        engines = *cluster.prefill, *cluster.decode
        sent = [one.calls[0].headers["x-request-id"] for one in engines]
        assert sent == [told, told]
        assert told != given
        assert len(told) == 32


@pytest.mark.parametrize("path", ["/none", "/live", "/v1/completions"])
async def test_errors_of_the_proxy_bear_the_requests_id(kit: Any, path: str) -> None:
    async with kit.cluster() as cluster:
        async with cluster.session.put(cluster.url + path, headers={"X-Request-Id": "x"}) as got:
            assert (got.status in (404, 405), got.headers["X-Request-Id"]) == (True, "x")
        async with cluster.post([1], headers={"X-Request-Id": "x"}) as got:
            assert (got.status, got.headers["X-Request-Id"]) == (400, "x")


async def test_streaming_passes_each_event_on_before_the_next_one_exists(kit: Any) -> None:
    client_has = asyncio.Event()

    async def decode(call: Any) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"n": 1}\n')
        await call.chunk(b"\ndata: cut ")
        await client_has.wait()
        await call.chunk(b"in two\n\ndata: [DONE]\n\n")
        await call.end_stream()

    async with kit.cluster() as cluster:
        cluster.decode[0].behave = decode
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 9,
        }
        async with cluster.post(body, "/v1/chat/completions") as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readany() == b'data: {"n": 1}\n\n'
            client_has.set()
            assert await response.read() == b"data: cut in two\n\ndata: [DONE]\n\n"
        step = cluster.prefill[0].calls[0].body
        assert (step["max_tokens"], step["max_completion_tokens"]) == (1, 1)
        assert step["stream"] is False
        assert "stream_options" not in step
        sent = cluster.decode[0].calls[0].body
        params = {**kit.kv_params, **kit.asks_mark}
        assert sent == {**body, "kv_transfer_params": params, "return_token_ids": True}


@pytest.mark.parametrize(
    ("extra", "reason"), [({"n": 2}, "several_samples"), ({"prompt": ["a", "b"]}, "not_one_prompt")]
)
async def test_what_cannot_take_two_steps_goes_to_a_decode_engine_alone(
    kit: Any, extra: dict[str, Any], reason: str
) -> None:
    async with kit.cluster() as cluster:
        async with cluster.post({**TWO_STEP, **extra}) as response:
            assert response.status == 200
            assert response.headers["X-Commext-Path"] == "local-prefill"
            assert "X-Commext-Prefill" not in response.headers
        assert cluster.prefill[0].calls == []
        assert cluster.decode[0].calls[0].body == {**TWO_STEP, **extra}
        assert f'local_prefills_total{{reason="{reason}"}} 1.0' in await cluster.metrics()


@pytest.mark.parametrize("content", [b"{}", b'{"kv_transfer_params": null}'])
async def test_without_parameters_the_decode_engine_prefills_and_it_is_counted(
    kit: Any, content: bytes
) -> None:
    async with kit.cluster() as cluster:
        cluster.prefill[0].behave = kit.answering(200, content)
        assert (await cluster.ask(TWO_STEP)).headers["X-Commext-Path"] == "local-prefill"
        assert cluster.decode[0].calls[0].body == TWO_STEP
        assert 'local_prefills_total{reason="no_kv_transfer_params"} 1.0' in await cluster.metrics()


@pytest.mark.parametrize(
    ("raw", "kind", "status", "message"),
    [
        (b"{", "application/json", 400, "not valid JSON"),
        (b'"x"', "application/json", 400, "expected a JSON object"),
        (b"{}", "text/plain", 415, "expected Content-Type: application/json"),
        (b'{"prompt": "' + b"x" * 2000 + b'"}', "application/json", 413, "at most 1000 bytes"),
    ],
    ids=["cut", "string", "content-type", "too-large"],
)
async def test_bad_requests_reach_no_engine(
    kit: Any, raw: bytes, kind: str, status: int, message: str
) -> None:
    async with kit.cluster(max_body_bytes=1000) as cluster:
        request = cluster.session.post(
            cluster.url + "/v1/completions", data=raw, headers={"Content-Type": kind}
        )
        async with request as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert message in error["message"]
            assert error["side"] == response.headers["X-Commext-Side"] == "proxy"
        assert cluster.prefill[0].calls == cluster.decode[0].calls == []
        assert (await cluster.ask(TWO_STEP)).status == 200
        count = 'requests_total{endpoint="completions",outcome="bad_request",side="proxy"} 1.0'
        assert count in await cluster.metrics()


async def test_a_header_no_engine_could_read_is_refused(kit: Any) -> None:
    async with kit.cluster() as cluster:
        async with cluster.post(TWO_STEP, headers={"Authorization": "Bearer \xff"}) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
            assert message == "expected ASCII in the header Authorization"
        assert cluster.prefill[0].calls == []


async def test_models_health_and_unknown_routes(kit: Any) -> None:
    async with kit.cluster(num_prefill=2) as cluster:
        response = await cluster.get("/v1/models")
        assert (response.status, await response.json()) == (200, {"object": "list", "data": []})
        response = await cluster.get("/health")
        detail = {"status": "ok", "prefill": 2, "decode": 1}
        assert (response.status, await response.json()) == (200, detail), "no engine's address"
        assert (await cluster.get("/live")).status == 200
        async with cluster.session.post(cluster.url + "/v1/unknown") as response:
            assert response.status == 404
        text = await cluster.metrics()
        assert 'commext_proxy_engines_healthy{role="prefill"} 2.0' in text
        assert "commext_proxy_requests_in_flight 0.0" in text


async def test_load_is_spread_over_the_engines_of_each_role(kit: Any) -> None:
    release = asyncio.Event()
    async with kit.cluster(num_prefill=3, num_decode=2) as cluster:
        for engine in cluster.decode:
            engine.behave = kit.held(release)
        asking = [asyncio.ensure_future(cluster.ask(TWO_STEP)) for _ in range(6)]
        calls = [engine.calls for engine in cluster.decode]
        await kit.until(lambda: sum(map(len, calls)) == 6, "all six to reach decode")
        assert [len(each) for each in calls] == [3, 3]
        text = await cluster.metrics()
        assert 'engine_requests_in_flight{engine="decode0",role="decode"} 3.0' in text
        release.set()
        assert [one.status for one in await asyncio.gather(*asking)] == [200] * 6
        assert [len(engine.calls) for engine in cluster.prefill] == [2, 2, 2]
        text = await cluster.metrics()
        assert 'requests_total{endpoint="completions",outcome="ok",side="proxy"} 6.0' in text
        assert "commext_proxy_prefill_seconds_count 6.0" in text


async def test_one_request_too_many_is_refused(kit: Any) -> None:
    async with kit.cluster(max_in_flight=1) as cluster:
        cluster.prefill[0].behave = kit.hanging
        first = asyncio.ensure_future(cluster.ask(TWO_STEP))
        await kit.until(lambda: bool(cluster.prefill[0].calls), "the first request")
        async with cluster.post(TWO_STEP) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert json.loads(await response.read())["error"]["type"] == "overloaded"
        assert (await cluster.get("/v1/models")).status == 503
        first.cancel()
        await cluster.idle()
        cluster.prefill[0].behave = kit.prefill_ok
        assert (await cluster.ask(TWO_STEP)).status == 200
        assert (await cluster.get("/v1/models")).status == 200
