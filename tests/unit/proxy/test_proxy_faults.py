"""Engines that fail, say nothing or are not well: who is asked again, and who is told what."""

import asyncio
import json
import re
from typing import Any

import pytest

from vllm_commext.proxy.engines.engine import SILENT_SECONDS, State

BODY = {"prompt": "hello", "max_tokens": 20}
STREAM = {**BODY, "stream": True}
EVENT = b'data: {"n": 1}\n\n'


async def test_a_refused_prefill_goes_to_another_engine_and_the_first_is_left_alone(
    kit: Any,
) -> None:
    async with kit.cluster(num_prefill=2, health_interval_seconds=60) as cluster:
        await cluster.prefill[0].stop()
        for _ in range(3):
            assert (await cluster.ask(BODY)).headers["X-Commext-Prefill"] == "prefill1"
        assert "commext_proxy_retries_total" in (text := await cluster.metrics())
        assert 'retries_total{role="prefill"} 1.0' in text
        assert 'commext_proxy_engines_healthy{role="prefill"} 1.0' in text
        first = cluster.pools[0].engines[0]
        assert first.state.healthy is False
        await kit.until(lambda: "/health failed" in first.state.detail, "the check that follows")


def local_prefills(reason: str, count: int) -> str:
    return f'commext_proxy_local_prefills_total{{reason="{reason}"}} {count:.1f}'


async def expect_decode_alone(cluster: Any, body: Any = BODY) -> None:
    async with cluster.post(body) as response:
        assert (response.status, response.headers["X-Commext-Path"]) == (200, "local-prefill")
        assert "X-Commext-Prefill" not in response.headers


async def test_without_any_prefill_engine_decode_engines_answer_alone_and_at_once(kit: Any) -> None:
    waits = {"health_interval_seconds": 60, "engine_wait_seconds": 3600}
    async with kit.cluster(**waits) as cluster:
        await cluster.prefill[0].stop()
        for _ in range(3):
            await expect_decode_alone(cluster)
        assert [call.body for call in cluster.decode[0].calls] == [BODY] * 3
        assert local_prefills("prefill_away", 3) in await cluster.metrics()
        response = await cluster.get("/health")
        assert (response.status, (await response.json())["status"]) == (200, "degraded")


async def test_without_any_decode_engine_the_request_fails_and_health_says_so(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waits = {"health_interval_seconds": 60, "engine_wait_seconds": 0.1}
    async with kit.cluster(**waits) as cluster:
        await cluster.decode[0].stop()
        assert "no usable decode engine among 1" in await kit.expect_error(
            cluster, 503, "no_engine", "decode"
        )
        response = await cluster.get("/health")
        assert (response.status, (await response.json())["status"]) == (503, "unavailable")
        assert len(cluster.prefill[0].calls) == 1
    assert "prefill0 keeps its KV blocks until their lease expires" in caplog.text


@pytest.mark.parametrize("step", ["prefill", "decode"])
async def test_one_lost_connection_takes_no_engine_from_the_others(kit: Any, step: str) -> None:
    async with kit.cluster(health_interval_seconds=60, health_fall=1000) as cluster:
        server = getattr(cluster, step)[0]
        (engine,) = cluster.pools[step == "decode"].engines

        suspected: list[bool] = []

        async def drop(_: Any) -> None:
            suspected.append(engine.state.suspected)

        server.behave = drop
        await cluster.ask(BODY)
        assert (engine.usable, any(suspected)) == (True, False)
        await kit.until(lambda: not engine.state.suspected, "the check that clears it")
        server.behave = kit.prefill_ok if step == "prefill" else kit.decode_ok
        async with cluster.post(BODY) as response:
            assert (response.status, response.headers["X-Commext-Path"]) == (200, "two-step")


async def test_a_retry_goes_to_a_busier_engine_rather_than_to_the_failed_one(kit: Any) -> None:
    async with kit.cluster(num_prefill=2) as cluster:
        first, second = cluster.prefill
        first.behave = second.behave = kit.hanging
        held = [asyncio.ensure_future(cluster.post(BODY).__aenter__()) for _ in range(2)]
        await kit.until(lambda: bool(first.calls and second.calls), "both to be busy")
        held[0].cancel()
        await kit.until(lambda: first.num_left == 1, "the first to be free again")
        first.behave, second.behave = kit.answering(500, b"oops"), kit.prefill_ok
        assert (await cluster.answered(BODY))[:2] == (200, "prefill1")
        held[1].cancel()


async def test_prefill_attempts_are_bounded_and_then_a_decode_engine_answers(kit: Any) -> None:
    async with kit.cluster(num_prefill=3) as cluster:
        for engine in cluster.prefill:
            engine.behave = kit.answering(503, b'{"error": "engine is tired"}')
        await expect_decode_alone(cluster)
        assert sum(len(engine.calls) for engine in cluster.prefill) == 2
        assert local_prefills("prefill_failed", 1) in await cluster.metrics()


async def test_a_prefill_engines_refusal_is_final_and_passed_on(kit: Any) -> None:
    async with kit.cluster(num_prefill=2) as cluster:
        cluster.prefill[0].behave = kit.answering(400, b'{"error": "too long"}')
        async with cluster.post(BODY) as response:
            assert (response.status, response.headers["X-Commext-Side"]) == (400, "prefill")
            assert await response.read() == b'{"error": "too long"}'
        assert (cluster.prefill[1].calls, cluster.decode[0].calls) == ([], [])
        assert kit.outcome("refused", "prefill") in await cluster.metrics()


async def test_a_prefill_that_takes_too_long_is_aborted_and_not_repeated(kit: Any) -> None:
    async with kit.cluster(num_prefill=2, prefill_timeout_seconds=0.1) as cluster:
        cluster.prefill[0].behave = kit.hanging
        await expect_decode_alone(cluster)
        await kit.until(lambda: cluster.prefill[0].num_left == 1, "the abort to arrive")
        assert cluster.prefill[1].calls == []


async def test_a_decode_engine_that_refuses_connections_is_replaced(kit: Any) -> None:
    async with kit.cluster(num_decode=2, health_interval_seconds=60) as cluster:
        await cluster.decode[0].stop()
        assert (await cluster.answered(BODY))[::2] == (200, "decode1")
        assert cluster.decode[1].calls[0].body["kv_transfer_params"] == kit.kv_params
        assert len(cluster.prefill[0].calls) == 1


ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
# A stream as vLLM ends it when the request fails in the engine: with status 200.
FAILED_EVENTS = b'data: {"error": {"message": "x", "code": 500}}\n\n', b"data: [DONE]\n\n"
FAILED_DECODES = {
    "lost": lambda kit: kit.dropping,
    "status": lambda kit: kit.answering(500, b'{"error": "load failed"}'),
    "event": lambda kit: kit.streaming(*FAILED_EVENTS),
    "event after the role": lambda kit: kit.streaming(ROLE, *FAILED_EVENTS),
}


@pytest.mark.parametrize("failing", list(FAILED_DECODES))
async def test_a_failed_decode_is_served_anew_from_its_first_step(kit: Any, failing: str) -> None:
    async with kit.cluster(num_prefill=2, num_decode=2) as cluster:
        cluster.decode[0].behave = FAILED_DECODES[failing](kit)
        async with cluster.post(STREAM) as response:
            assert (response.status, response.headers["X-Commext-Path"]) == (200, "two-step")
            assert response.headers["X-Commext-Decode"] == "decode1"
            assert response.headers["X-Commext-Prefill"] == "prefill1"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert [len(engine.calls) for engine in cluster.prefill + cluster.decode] == [1] * 4
        kind = "lost" if failing == "lost" else "engine_error"
        assert f'commext_proxy_restarts_total{{outcome="{kind}"}} 1.0' in await cluster.metrics()


async def test_after_a_failed_load_a_lone_decode_engine_computes_the_prompt(kit: Any) -> None:
    async def fail_loads(call: Any) -> None:
        behave = kit.answering(500, b"x") if "kv_transfer_params" in call.body else kit.decode_ok
        await behave(call)

    async with kit.cluster() as cluster:
        cluster.decode[0].behave = fail_loads
        await expect_decode_alone(cluster)
        assert [len(cluster.prefill[0].calls), len(cluster.decode[0].calls)] == [1, 2]
        assert local_prefills("after_failure", 1) in await cluster.metrics()


@pytest.mark.parametrize("status", [400, 429])
async def test_what_a_decode_engine_refuses_is_not_tried_again(kit: Any, status: int) -> None:
    async with kit.cluster(num_decode=2) as cluster:
        cluster.decode[0].behave = kit.answering(status, b'{"error": "no"}')
        async with cluster.post(STREAM) as response:
            assert (response.status, response.headers["X-Commext-Side"]) == (status, "decode")
            assert await response.read() == b'{"error": "no"}'
        assert kit.outcome("refused", "decode") in await cluster.metrics()
        assert cluster.decode[1].calls == []


@pytest.mark.parametrize("has_headers", [False, True])
async def test_a_stream_whose_first_token_never_comes_is_aborted(
    kit: Any, has_headers: bool
) -> None:
    async with kit.cluster(decode_timeout_seconds=0.1) as cluster:
        cluster.decode[0].behave = kit.streaming(hangs=True) if has_headers else kit.hanging
        assert (await cluster.ask(STREAM)).status == 504
        assert kit.outcome("timeout", "decode") in await cluster.metrics()
        await kit.until(lambda: cluster.decode[0].num_left == 1, "the abort to arrive")


async def test_an_answer_in_one_piece_may_take_six_times_as_long(kit: Any) -> None:
    async def slow(call: Any) -> None:
        await asyncio.sleep(0.5)
        await kit.decode_ok(call)

    short = {"decode_timeout_seconds": 0.25, "decode_idle_timeout_seconds": 0.05}
    async with kit.cluster(**short, engine_lost_seconds=0.2) as cluster:
        cluster.decode[0].behave = slow
        assert (await cluster.ask(BODY)).status == 200
        cluster.decode[0].behave = kit.hanging
        assert "within 1.5 s" in await kit.expect_error(cluster, 504, "timeout", "decode")


async def test_a_response_begins_with_its_first_text_and_until_then_may_begin_elsewhere(
    kit: Any,
) -> None:
    """vLLM says that it has accepted one before it computes."""
    told = {"response": {"id": "resp_1", "output": [], "instructions": "w" * 70_000}}
    accepted = [
        b"event: response.%b\ndata: %b\n\n" % (name, json.dumps(told).encode())
        for name in (b"created", b"in_progress")
    ]
    delta = b'event: response.output_text.delta\ndata: {"delta": "a"}\n\n'

    async def slow(call: Any) -> None:
        await call.begin_stream()
        for piece in accepted:
            await call.chunk(piece)
        await asyncio.sleep(0.3)
        await call.chunk(delta)
        await call.end_stream()

    async with kit.cluster(num_decode=2) as cluster:
        lost, other = cluster.decode
        lost.behave, other.behave = kit.streaming(*accepted), slow
        body = {"input": "hello", "stream": True}
        async with cluster.post(body, "/v1/responses") as response:
            assert await response.read() == b"".join((*accepted, delta))
        assert [len(engine.calls) for engine in cluster.decode] == [1, 1]
        seconds = re.search(r"first_token_seconds_sum.* (\S+)", await cluster.metrics())
        assert seconds is not None
        assert float(seconds[1]) > 0.3


@pytest.mark.parametrize("kinds", [{"num_decode": 2}, {"num_prefill": 0, "num_decode": 0}])
async def test_an_engine_that_falls_silent_is_asked_after_others_until_it_answers(
    kit: Any, kinds: dict[str, int]
) -> None:
    num_both = 2 * ("num_prefill" in kinds)
    async with kit.cluster(**kinds, num_both=num_both, decode_timeout_seconds=0.3) as cluster:
        first, second = cluster.both or cluster.decode
        behave, first.behave = first.behave, kit.hanging
        assert [(await cluster.ask(STREAM)).status for _ in range(5)] == [200] * 5
        assert [len(one.calls) for one in (first, second)] == [1, 5]
        first.behave, state = behave, cluster.pools[1].engines[0].state
        assert state.healthy
        state.silent_until -= SILENT_SECONDS
        for _ in range(4):
            assert (await cluster.ask(STREAM)).status == 200
        assert (len(first.calls) > 1, state.silent_until) == (True, 0.0)


async def test_prefill_engines_that_fall_silent_are_left_out(kit: Any) -> None:
    async with kit.cluster(num_prefill=2, prefill_timeout_seconds=0.2) as cluster:
        for engine in cluster.prefill:
            engine.behave = kit.hanging
        for _ in range(4):
            await expect_decode_alone(cluster)
        assert [len(engine.calls) for engine in cluster.prefill] == [1, 1]
        assert local_prefills("prefill_away", 2) in await cluster.metrics()


@pytest.mark.parametrize("falls", [False, True])
def test_a_check_that_passes_after_one_that_failed_ends_a_silence(falls: bool) -> None:
    state = State(healthy=True)
    state.note_silence()
    state.pass_check()
    assert state.is_silent
    state.count_failure()
    if falls:
        state.fall("no answer")
    state.note_silence()
    state.pass_check()
    assert not state.is_silent


async def test_an_engine_that_answers_nothing_any_more_is_given_up(kit: Any) -> None:
    checks = {"health_interval_seconds": 0.02, "health_timeout_seconds": 0.5}
    asked: list[Any] = []

    def silent_if_first(engine: Any) -> Any:
        async def behave(call: Any) -> None:
            asked.append((engine, cluster.pools[1].num_usable))
            if engine is asked[0][0]:
                engine.health_status = 0
                await kit.hanging(call)
            await kit.decode_ok(call)

        return behave

    async with kit.cluster(num_decode=2, **checks, engine_lost_seconds=0.3) as cluster:
        for engine in cluster.decode:
            engine.behave = silent_if_first(engine)
        assert (await asyncio.wait_for(cluster.answered(BODY), 30))[0] == 200
        assert [num for _, num in asked] == [2, 1]


async def test_an_engine_that_only_says_that_it_is_unwell_is_waited_for(kit: Any) -> None:
    release = asyncio.Event()
    checks = {"health_interval_seconds": 0.02, "engine_lost_seconds": 0.1}
    async with kit.cluster(**checks) as cluster:
        cluster.decode[0].behave = kit.held(release)
        asking = asyncio.ensure_future(cluster.answered(BODY))
        await kit.until(lambda: bool(cluster.decode[0].calls), "the decode step")
        cluster.decode[0].health_status = 503
        await asyncio.sleep(0.4)
        assert not asking.done()
        release.set()
        assert (await asking)[0] == 200


async def test_a_request_waits_a_moment_for_an_engine_to_be_well_again(kit: Any) -> None:
    async with kit.cluster(health_interval_seconds=0.02, engine_wait_seconds=30) as cluster:
        cluster.decode[0].health_status = 503
        pool = cluster.pools[1]
        await kit.until(lambda: not pool.engines[0].state.healthy, "the sick engine to be noticed")
        assert pool.engines[0].state.detail == "/health answered 503"
        request = asyncio.create_task(cluster.answered(BODY))
        await asyncio.sleep(0.1)
        assert not request.done()
        assert cluster.decode[0].calls == []
        cluster.decode[0].health_status = 200
        assert (await asyncio.wait_for(request, 20))[0] == 200
