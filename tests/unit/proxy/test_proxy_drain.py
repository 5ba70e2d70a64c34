"""Engines that say themselves that they drain, or give up what they were asked: nothing is lost."""

import asyncio
import json
from typing import Any

import pytest

from vllm_commext.proxy.http.answer_events import is_aborted, opens_aborted

BODY = {"prompt": "hello", "max_tokens": 20}
NEVER = {"health_interval_seconds": 600.0}
QUICK = {"health_interval_seconds": 0.05}
ABORTED = {"choices": [{"text": "", "finish_reason": "abort"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_draining_engines_refuse_others_serve_with_the_same_parameters(
    kit: Any, stream: bool
) -> None:
    body = {**BODY, "stream": stream}
    async with kit.cluster(3, 3, **NEVER) as cluster:
        for engine in (*cluster.prefill[:2], *cluster.decode[:2]):
            engine.drains = True
        for _ in range(3):
            assert await cluster.answered(body) == (200, "prefill2", "decode2")
        refused = [engine.num_refused for engine in (*cluster.prefill, *cluster.decode)]
        assert refused == [1, 1, 0, 1, 1, 0], "once each, and then it is known"
        calls = [call.body["kv_transfer_params"] for call in cluster.decode[2].calls]
        assert calls == [{**kit.kv_params, **kit.asks_mark} if stream else kit.kv_params] * 3
        assert len(cluster.prefill[2].calls) == 3, "no prompt was prefilled twice"


async def test_an_engine_that_drains_finishes_its_work_and_comes_back(kit: Any) -> None:
    release = asyncio.Event()
    async with kit.cluster(1, 2, **QUICK) as cluster:
        first, pool = cluster.decode[0], cluster.pools[1]
        first.behave = kit.held(release)
        running = asyncio.ensure_future(cluster.answered(BODY))
        await kit.until(lambda: bool(first.calls), "the request")
        first.drains = True
        await kit.until(lambda: pool.engines[0].state.drains_itself, "the check")
        assert (pool.engines[0].state.healthy, pool.engines[0].usable) == (True, False)
        assert cluster.proxy.registry.engines[1].as_json()["draining"]
        for _ in range(3):
            assert (await cluster.answered(BODY))[2] == "decode1"
        release.set()
        assert (await running)[::2] == (200, "decode0")
        assert first.num_refused == 0
        first.drains = False
        await kit.until(lambda: pool.engines[0].usable, "the engine to be back")


async def test_without_any_prefill_engine_left_decode_engines_go_on_alone(kit: Any) -> None:
    async with kit.cluster(2, 1, **NEVER) as cluster:
        for engine in cluster.prefill:
            engine.drains = True
        assert await cluster.answered(BODY) == (200, None, "decode0")
        assert 'local_prefills_total{reason="prefill_away"} 1.0' in await cluster.metrics()


async def test_where_all_decode_engines_drain_the_client_is_told(kit: Any) -> None:
    async with kit.cluster(1, 2, engine_wait_seconds=0.1, **NEVER) as cluster:
        for engine in cluster.decode:
            engine.drains = True
        await kit.expect_error(cluster, 503, "no_engine", "decode")
        assert 'engines_healthy{role="decode"} 0.0' in await cluster.metrics()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_an_engine_gives_up_is_served_anew(kit: Any, stream: bool) -> None:
    async def aborting(call: Any) -> None:
        cluster.decode[0].health_status = 0
        if not call.body.get("stream"):
            await call.answer(200, json.dumps(ABORTED).encode())
            return
        event = b"data: " + json.dumps(ABORTED).encode() + b"\n\n"
        await kit.streaming(event, b"data: [DONE]\n\n")(call)

    async with kit.cluster(2, 2, **NEVER) as cluster:
        cluster.decode[0].behave = aborting
        assert await cluster.answered({**BODY, "stream": stream}) == (200, "prefill1", "decode1")
        assert await cluster.answered({**BODY, "stream": stream}) == (200, "prefill0", "decode1")
        assert len(cluster.decode[0].calls) == 1, "until a check passes it is left alone"


@pytest.mark.parametrize("told", [(200, json.dumps(ABORTED).encode()), (500, b"EngineDeadError")])
async def test_a_prompt_that_an_engine_gives_up_is_computed_elsewhere(kit: Any, told: Any) -> None:
    async with kit.cluster(2, 1, **NEVER) as cluster:
        cluster.prefill[0].behave = kit.answering(*told)
        assert await cluster.answered(BODY) == (200, "prefill1", "decode0")
        cluster.pools[0].engines[1].state.healthy = False
        assert await cluster.answered(BODY) == (200, None, "decode0")
        assert len(cluster.prefill[0].calls) == 2
        assert 'local_prefills_total{reason="prefill_away"} 1.0' in await cluster.metrics()


async def test_one_answer_that_is_given_up_moves_no_other_stream(kit: Any) -> None:
    """Anybody may abort a request; whether the engine ends, its /health tells."""
    release = asyncio.Event()
    token = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}
    given_up = event(index=0, text="", token_ids=[], finish_reason="abort")

    async def aborting(call: Any) -> None:
        await kit.streaming(event(**token), given_up, b"data: [DONE]\n\n")(call)

    async with kit.cluster(1, 2, **NEVER) as cluster:
        first, other = cluster.decode
        first.behave = other.behave = kit.held_stream(release)
        async with cluster.post({**BODY, "stream": True}) as running:
            await running.content.readany()
            busy = first if first.calls else other
            (engine,) = (e for e in cluster.pools[1].engines if e.url == busy.url)
            busy.behave = aborting
            (away,) = (e for e in cluster.pools[1].engines if e is not engine)
            away.state.healthy = False
            assert (await cluster.answered({**BODY, "stream": True}))[0] == 200
            away.state.healthy = True
            await kit.until(lambda: not engine.state.suspected, "the check")
            assert engine.usable
            release.set()
            assert (await running.content.read()).endswith(b"data: [DONE]\n\n")
        assert 'moves_total{result="failed"} 0.0' in (page := await cluster.metrics())
        assert 'moves_total{result="not_told"} 0.0' in page


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (event(text="", finish_reason="abort"), True),
        (event(delta={"role": "assistant"}) + event(delta={}, finish_reason="abort"), True),
        (event(text="a", finish_reason="abort"), False),
        (event(delta={"content": "a"}) + event(delta={}, finish_reason="abort"), False),
        (event(text="", finish_reason="stop"), False),
        (event(text='"abort"', finish_reason=None), False),
        (b'data: "abort"\n\n', False),
        (b"", False),
    ],
)
def test_a_stream_that_opens_with_the_end_of_a_given_up_request(
    events: bytes, expected: bool
) -> None:
    assert opens_aborted(events) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (json.dumps(ABORTED).encode(), True),
        (b'{"choices": [{"text": "abc", "finish_reason": "abort"}]}', True),
        (b'{"choices": [{"text": "abort", "finish_reason": "stop"}]}', False),
        (b'{"choices": [{"text": "x", "finish_reason": "abort"', False),
        (b'["abort"]', False),
        (b'{"choices": ["abort"]}', False),
    ],
)
def test_an_answer_of_a_given_up_request(answer: bytes, expected: bool) -> None:
    assert is_aborted(answer) is expected
