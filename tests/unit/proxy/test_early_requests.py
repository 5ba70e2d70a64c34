"""First tokens sent ahead of decode engines' answers: when, and what becomes of the stream if an
engine then fails."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.kit.vllm_streams import Stream

EARLY = "X-Commext-First-Token"
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0, "stream": True}
CHAT_BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "stream": True,
}
DRAWN = {**BODY, "temperature": 0.7}
TOKENS = ((7, "one"), (8, " two"), (9, " three"))
ANSWER = Stream(TOKENS)
CHAT_ANSWER = Stream(TOKENS, is_chat=True)
OTHER = replace(ANSWER, tokens=((6, "another"), *TOKENS[1:]))


def answer_of(call: Any) -> Stream:
    return CHAT_ANSWER if "chat" in call.path else ANSWER


async def prefill(call: Any) -> None:
    await call.answer(200, json.dumps(answer_of(call).prefill_answer()).encode())


def streaming(answer: Stream | None = None, sizes: tuple[int, ...] = (1, 1, 1)) -> Any:
    async def behave(call: Any) -> None:
        stream = replace(answer or answer_of(call), request_id=call.headers["x-request-id"])
        await call.begin_stream()
        for event in stream.events(sizes):
            await call.chunk(event)
        await call.end_stream()

    return behave


def breaking(num_events: int) -> Any:
    """Some events, then nothing more on this connection."""

    async def behave(call: Any) -> None:
        stream = replace(answer_of(call), request_id=call.headers["x-request-id"])
        await call.begin_stream()
        for event in stream.events((1, 1, 1))[:num_events]:
            await call.chunk(event)

    return behave


def plain(answer: Stream, response: Any, sizes: tuple[int, ...] = (1, 1, 1)) -> bytes:
    """What a client of one engine gets."""
    stream = replace(answer, request_id=response.headers["X-Request-Id"])
    return b"".join(stream.events(sizes))


def timeless(stream: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', stream)


async def is_early(cluster: Any, body: Any, answer: Stream = ANSWER) -> bool:
    """Whether a stream, which must be this one, began ahead of the decode engine's answer."""
    async with cluster.post(body) as response:
        assert timeless(await response.read()) == timeless(plain(answer, response))
        return response.headers.get(EARLY) == "early"


async def ways(cluster: Any) -> dict[str, int]:
    found = re.findall(
        r'commext_proxy_first_tokens_total{way="(\w+)"} (\d+)', await cluster.metrics()
    )
    return {way: int(count) for way, count in found if count != "0"}


async def learn(cluster: Any, *bodies: Any) -> None:
    """Have all decode engines shown what their streams look like."""
    for body in bodies or (BODY,):
        for _ in cluster.decode:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            async with cluster.post(body, path) as response:
                assert EARLY not in response.headers
                assert (await response.read()).endswith(b"data: [DONE]\n\n")


@asynccontextmanager
async def running(kit: Any, **options: Any) -> AsyncIterator[Any]:
    settings = {"early_first_token": True, **options}
    async with kit.cluster(affinity=False, **settings) as cluster:
        for engine in cluster.prefill:
            engine.behave = prefill
        for engine in cluster.decode:
            engine.behave = streaming()
        yield cluster


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_the_first_token_is_there_before_the_decode_engine_answers(
    kit: Any, is_chat: bool
) -> None:
    body, answer = (CHAT_BODY, CHAT_ANSWER) if is_chat else (BODY, ANSWER)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    async with running(kit) as cluster:
        await learn(cluster, body)
        may_answer = asyncio.Event()

        async def waiting(call: Any) -> None:
            await may_answer.wait()
            await streaming()(call)

        cluster.decode[0].behave = waiting
        async with cluster.post(body, path) as response:
            assert response.headers[EARLY] == "early"
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["X-Commext-Path"] == "two-step"
            assert response.headers["X-Commext-Decode"] == "decode0"
            expected = timeless(plain(answer, response))
            events = expected.split(b"\n\n")
            first = b"\n\n".join(events[: 2 if is_chat else 1]) + b"\n\n"
            begun = b""
            while len(begun) < len(first):
                begun += timeless(await response.content.readany())
            assert begun == first
            await kit.until(lambda: len(cluster.decode[0].calls) == 2, "the decode engine's call")
            may_answer.set()
            assert begun + timeless(await response.read()) == expected
        sent = cluster.decode[0].calls[1].body
        assert sent["kv_transfer_params"] == answer.prefill_answer()["kv_transfer_params"]
        assert await ways(cluster) == {"unproven": 1, "early": 1}


async def test_all_events_tell_the_same_time(kit: Any) -> None:
    async with running(kit) as cluster:
        await learn(cluster)
        async with cluster.post(BODY) as response:
            raw = await response.read()
        times = set(re.findall(rb'"created":(\d+)', raw))
        assert len(times) == 1
        assert times != {b"%d" % ANSWER.created}


@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 2)], ids=str)
async def test_tokens_that_came_in_one_event_are_taken_apart(
    kit: Any, sizes: tuple[int, ...]
) -> None:
    async with running(kit) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = streaming(sizes=sizes)
        apart = (1, *((sizes[0] - 1,) if sizes[0] > 1 else ()), *sizes[1:])
        async with cluster.post(BODY) as response:
            expected = plain(ANSWER, response, apart)
            assert timeless(await response.read()) == timeless(expected)


async def test_switched_off_no_stream_begins_early(kit: Any) -> None:
    async with running(kit, early_first_token=False) as cluster:
        for _ in range(3):
            await learn(cluster)
        assert await ways(cluster) == {"off": 3}


async def test_each_reason_is_counted(kit: Any) -> None:
    async with running(kit) as cluster:
        for changes in ({"stream": False}, {"echo": True}, {"max_tokens": 1}, {"n": 2}):
            await cluster.ask({**BODY, **changes})
        cluster.prefill[0].behave = kit.prefill_ok
        await cluster.ask(BODY)
        cluster.prefill[0].behave = kit.answering(500, b"no")
        await cluster.ask(BODY)
        expected = {"not_streamed": 1, "request": 2, "one_token": 1}
        assert await ways(cluster) == {**expected, "not_offered": 1, "no_prefill": 1}


@pytest.mark.parametrize("failing", ["status", "drop", "error event"])
async def test_a_greedy_stream_goes_on_with_another_decode_engine(kit: Any, failing: str) -> None:
    async def told_at_once(call: Any) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"error":{"message":"KV load failed","code":500}}\n\n')

    behaves = {"status": kit.answering(500, b"oops"), "drop": kit.dropping}
    async with running(kit, num_prefill=2, num_decode=2, health_interval_seconds=60) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = behaves.get(failing, told_at_once)
        assert await is_early(cluster, BODY)
        assert [len(engine.calls) for engine in cluster.prefill] == [2, 2]
        assert [len(engine.calls) for engine in cluster.decode] == [2, 2]


async def test_a_greedy_stream_goes_on_with_a_decode_engine_alone(kit: Any) -> None:
    async with running(kit, num_decode=2, health_interval_seconds=60) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = kit.dropping
        assert await is_early(cluster, BODY)
        assert len(cluster.prefill[0].calls) == 3
        assert "kv_transfer_params" not in cluster.decode[1].calls[1].body
        assert await ways(cluster) == {"unproven": 2, "early": 1}


async def broken(cluster: Any, body: Any) -> Any:
    """What ends a stream after its first token."""
    async with cluster.post(body) as response:
        assert (response.status, response.headers[EARLY]) == (200, "early")
        first, told, rest = (await response.read()).split(b"\n\n")
        assert rest == b""
        assert timeless(first + b"\n\n") == timeless(plain(ANSWER, response).split(b"\n\n")[0]) + (
            b"\n\n"
        )
    return json.loads(told.removeprefix(b"data: "))["error"]


async def test_a_drawn_stream_is_not_served_anew(kit: Any) -> None:
    """Another prefill would draw another token."""
    async with running(kit, num_decode=2, health_interval_seconds=60) as cluster:
        await learn(cluster, DRAWN)
        cluster.decode[0].behave = kit.dropping
        error = await broken(cluster, DRAWN)
        assert (error["type"], error["side"], error["engine"]) == ("lost", "decode", "decode0")
        assert len(cluster.prefill[0].calls) == 3
        assert 'outcome="lost",side="decode"} 1.0' in await cluster.metrics()


async def test_a_drawn_stream_goes_to_another_engine_while_none_has_been_reached(kit: Any) -> None:
    async with running(kit, num_decode=2, health_interval_seconds=60, health_fall=1000) as cluster:
        await learn(cluster, DRAWN)
        await cluster.decode[0].stop()
        assert await is_early(cluster, DRAWN)
        assert len(cluster.prefill[0].calls) == 3
        assert len(cluster.decode[1].calls) == 2


async def test_a_decode_engine_that_stays_away_ends_the_stream(kit: Any) -> None:
    async with running(kit, engine_wait_seconds=0.1, health_interval_seconds=0.05) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = kit.dropping
        assert (await broken(cluster, BODY))["type"] == "engines_lost"
        # An engine that was away has to show its streams anew.
        engine = cluster.proxy.decode_pool.engines[0]
        engine.refuse("away")
        await kit.until(lambda: engine.usable, "the check that follows")
        cluster.decode[0].behave = streaming()
        await learn(cluster)


async def test_a_decode_engines_refusal_is_told_in_its_own_words(kit: Any) -> None:
    refusal = {"error": {"message": "the prompt is too long", "code": 400}}
    async with running(kit) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = kit.answering(400, json.dumps(refusal).encode())
        assert await broken(cluster, BODY) == refusal["error"]
        assert len(cluster.decode[0].calls) == 2
        cluster.decode[0].behave = kit.answering(200, b"{}")
        assert (await broken(cluster, BODY))["type"] == "bad_answer"


@pytest.mark.parametrize("num_events", [0, 1, 2])
async def test_a_decode_engine_that_dies_in_mid_stream_is_told(kit: Any, num_events: int) -> None:
    async with running(kit) as cluster:
        await learn(cluster, DRAWN)
        cluster.decode[0].behave = breaking(num_events)
        async with cluster.post(DRAWN) as response:
            assert response.headers[EARLY] == "early"
            *events, told, rest = (await response.read()).split(b"\n\n")
            expected = plain(ANSWER, response).split(b"\n\n")[: max(1, num_events)]
        assert [timeless(event) for event in events] == [timeless(event) for event in expected]
        assert json.loads(told.removeprefix(b"data: "))["error"]["type"] == "lost"
        assert rest == b""


async def test_a_stream_that_ends_before_its_first_token_is_told(kit: Any) -> None:
    async def empty(call: Any) -> None:
        await call.begin_stream()
        await call.end_stream()

    async with running(kit) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = empty
        assert (await broken(cluster, BODY))["type"] == "bad_answer"


async def test_another_first_token_is_told_counted_and_the_last_one(kit: Any) -> None:
    async with running(kit) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = streaming(OTHER)
        error = await broken(cluster, BODY)
        assert (error["type"], error["engine"]) == ("first_token_differs", "decode0")
        assert "another" not in error["message"]
        for _ in range(3):
            assert not await is_early(cluster, BODY, OTHER)
        assert await ways(cluster) == {"unproven": 1, "early": 1, "refuted": 3}
        text = await cluster.metrics()
        assert 'outcome="first_token_differs",side="decode"} 1.0' in text


async def test_a_decode_engine_with_first_tokens_of_its_own_is_never_sent_ahead_of(
    kit: Any,
) -> None:
    async with running(kit) as cluster:
        cluster.decode[0].behave = streaming(OTHER)
        for _ in range(3):
            assert not await is_early(cluster, BODY, OTHER)
        assert await ways(cluster) == {"unproven": 3}


async def refusing(call: Any) -> None:
    """As a decode engine with first tokens of its own: it fails what must begin with another."""
    if call.body["kv_transfer_params"].get("remote_first_token_due"):
        await call.begin_stream()
        await call.chunk(b'data: {"error":{"message":"no","code":500}}\n\n')
        await call.end_stream()
    else:
        await streaming()(call)


async def test_a_drawn_token_is_sent_ahead_only_of_an_engine_that_takes_it(kit: Any) -> None:
    """By luck it draws the same one itself, which proves nothing."""
    async with running(kit, num_prefill=2) as cluster:
        cluster.decode[0].behave = refusing
        for _ in range(4):
            assert not await is_early(cluster, DRAWN)
        asked = [call.body.get("kv_transfer_params", {}) for call in cluster.decode[0].calls]
        assert [params.get("remote_first_token_due") for params in asked] == [
            *(True, None, True, None, None, None)
        ]
        assert await ways(cluster) == {"unproven": 2, "refuted": 2}


async def test_an_engine_that_takes_a_drawn_token_is_told_that_it_must(kit: Any) -> None:
    async with running(kit) as cluster:
        await learn(cluster, DRAWN)
        assert await is_early(cluster, DRAWN)
        for call in cluster.decode[0].calls:
            assert call.body["kv_transfer_params"]["remote_first_token_due"] is True
        # What any engine answers in the same way needs no such promise.
        await is_early(cluster, BODY)
        assert "remote_first_token_due" not in cluster.decode[0].calls[2].body["kv_transfer_params"]
        # One refusal may be an accident.
        cluster.decode[0].behave = refusing
        assert (await broken(cluster, DRAWN))["message"] == "no"
        assert (await broken(cluster, DRAWN))["message"] == "no"
        cluster.decode[0].behave = streaming()
        await learn(cluster, DRAWN)
        assert (await ways(cluster))["refuted"] == 1
        # A greedy one is the same wherever it comes from.
        assert await is_early(cluster, BODY)


def drawn_by(facts: str) -> Any:
    """As a prefill engine with these facts."""

    async def behave(call: Any) -> None:
        answer = answer_of(call).prefill_answer()
        answer["kv_transfer_params"]["remote_sampling"] = f"{facts} temperature=0.7 top_p=1.0"
        await call.answer(200, json.dumps(answer).encode())

    return behave


async def test_what_a_prefill_engine_has_proven_does_not_hold_for_one_of_another_version(
    kit: Any,
) -> None:
    """Engines of two versions behind one proxy: a decode engine takes drawn tokens of its own
    version alone, and no client may be told a token that is then refused."""

    async def takes_its_own_version(call: Any) -> None:
        params = call.body.get("kv_transfer_params", {})
        is_other = not params.get("remote_sampling", "").startswith("this ")
        await (refusing if is_other else streaming())(call)

    async def ask(cluster: Any, facts: str) -> bool:
        cluster.prefill[0].behave = cluster.prefill[1].behave = drawn_by(facts)
        return await is_early(cluster, DRAWN)

    async with running(kit, num_prefill=2) as cluster:
        cluster.decode[0].behave = takes_its_own_version
        versions = ("this", "this", *["other"] * 4, "this")
        told = [await ask(cluster, version) for version in versions]
        assert told == [False, True, *[False] * 4, True]


async def test_a_client_that_leaves_after_the_first_token_ends_the_decode_engines_work(
    kit: Any,
) -> None:
    async with running(kit) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = kit.hanging
        response = await cluster.post(BODY).__aenter__()
        assert response.headers[EARLY] == "early"
        assert await response.content.readany()
        await kit.until(lambda: len(cluster.decode[0].calls) == 2, "the decode engine's call")
        response.close()
        await kit.until(lambda: cluster.decode[0].num_left == 1, "the proxy to let go")


async def test_a_hanging_decode_engine_ends_the_stream_in_time(kit: Any) -> None:
    async with running(kit, decode_timeout_seconds=2.0, decode_idle_timeout_seconds=2.0) as cluster:
        await learn(cluster)
        cluster.decode[0].behave = kit.hanging
        error = await broken(cluster, BODY)
        assert (error["type"], error["code"]) == ("timeout", 504)
