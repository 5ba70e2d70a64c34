"""Prefills that nobody will read are released at their engines, a request that loses engines is
tried at no third, and answers that are none are told from answers."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from vllm_commext.drain import RELEASE
from vllm_commext.proxy.engines.engine import Capabilities

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 20}
STREAM = {**BODY, "stream": True}
TOLD = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 0}}\n\n'
DEAD = b'{"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}'


def key_of(call: Any) -> str:
    return call.body["kv_transfer_params"].get("prefill_key", "")


def releases(engine: Any) -> list[list[str]]:
    """What the engine was told to release, request by request."""
    params = (call.body["kv_transfer_params"] for call in engine.calls)
    return [one["release"] for one in params if "release" in one]


def asked(engine: Any) -> list[Any]:
    """The prefills that the engine was asked for."""
    return [call for call in engine.calls if "release" not in call.body["kv_transfer_params"]]


async def released(kit: Any, engine: Any) -> None:
    """Every prefill that the engine was asked for is released, once, all in few requests."""
    keys = sorted(key_of(call) for call in asked(engine))
    assert all(keys)
    done = lambda: sorted(sum(releases(engine), [])) == keys  # noqa: E731
    await kit.until(done, "the releases")
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_what_a_decode_engine_refuses_or_fails_is_released(
    kit: Any, status: int, body: dict[str, Any]
) -> None:
    async with kit.cluster(keys=True) as cluster:
        cluster.decode[0].behave = kit.answering(status, b'{"error": {"message": "no"}}')
        response = await cluster.ask(body, headers={"Authorization": "Bearer key"})
        assert (response.status, await response.json()) == (status, {"error": {"message": "no"}})
        await released(kit, cluster.prefill[0])
        told = cluster.prefill[0].calls[-1]
        assert (told.path, told.body["max_tokens"], told.body["model"]) == (
            "/v1/completions", 1, "tiny",
        )  # fmt: skip
        assert told.headers["authorization"] == "Bearer key"
        assert told.headers[RELEASE] == "1"
        num = len(asked(cluster.prefill[0]))
        await kit.until(lambda: num_sent(cluster) == num, "the count")


def num_sent(cluster: Any) -> float:
    """Keys that engines were told, by the proxy's metrics."""
    samples = cluster.proxy.ledger.metrics.steps.releases.collect()[0].samples
    sent = (one for one in samples if one.labels == {"outcome": "sent"})
    return sum(one.value for one in sent if one.name.endswith("_total"))


@pytest.mark.parametrize("step", ["prefill", "decode"])
async def test_a_client_that_leaves_has_its_prefill_released(kit: Any, step: str) -> None:
    async with kit.cluster(keys=True) as cluster:
        engine = getattr(cluster, step)[0]
        before, engine.behave = engine.behave, kit.hanging
        asking = [asyncio.ensure_future(cluster.post(BODY).__aenter__()) for _ in range(8)]
        await kit.until(lambda: len(engine.calls) == 8, "the requests")
        engine.behave = before
        for one in asking:
            one.cancel()
        await released(kit, cluster.prefill[0])
        assert len(releases(cluster.prefill[0])) < 8


async def test_what_is_read_or_refused_by_the_prefill_engine_is_not_released(kit: Any) -> None:
    async with kit.cluster(keys=True) as cluster:
        for body in (BODY, STREAM):
            assert (await cluster.ask(body)).status == 200
        cluster.prefill[0].behave = kit.answering(400, b'{"error": {"message": "no"}}')
        assert (await cluster.ask(BODY)).status == 400
        await asyncio.sleep(0.2)
        assert releases(cluster.prefill[0]) == []
        assert all(call.body["max_tokens"] == 20 for call in asked(cluster.prefill[0]))


async def test_a_prefill_that_was_lost_is_released_where_it_may_be_kept(kit: Any) -> None:
    async with kit.cluster(num_prefill=2, keys=True) as cluster:
        first, second = cluster.prefill
        first.behave = kit.dropping
        for _ in range(2):
            assert (await cluster.ask(BODY)).status == 200
        first.behave = kit.prefill_ok
        await kit.until(lambda: sum(map(len, releases(first))) > 0, "the release")
        assert releases(second) == []


async def test_every_rank_of_an_engine_is_told(kit: Any) -> None:
    async with kit.cluster(keys=True) as cluster:
        engine = cluster.pools[0].engines[0]
        (rank,) = engine.capabilities.ranks
        ranks = (rank, replace(rank, number="1"))
        engine.capabilities = Capabilities(ranks, is_known=True)
        cluster.decode[0].behave = kit.answering(400, b"{}")
        await cluster.ask(BODY)
        await kit.until(lambda: len(releases(cluster.prefill[0])) == 2, "the releases")
        told = [call.headers.get("x-data-parallel-rank") for call in cluster.prefill[0].calls]
        assert told == [None, "0", "1"]


async def test_engines_without_keys_are_told_nothing(kit: Any) -> None:
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.answering(400, b"{}")
        assert (await cluster.ask(BODY)).status == 400
        await asyncio.sleep(0.1)
        [call] = cluster.prefill[0].calls
        assert (key_of(call), call.body["max_tokens"]) == ("", 1)


async def test_a_failed_release_is_told(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with kit.cluster(keys=True) as cluster:

        async def behave(call: Any) -> None:
            is_release = "release" in call.body["kv_transfer_params"]
            await (kit.answering(500, b"{}") if is_release else kit.prefill_ok)(call)

        cluster.prefill[0].behave = behave
        cluster.decode[0].behave = kit.answering(400, b"{}")
        assert (await cluster.ask(BODY)).status == 400
        await kit.until(lambda: "until their leases end" in caplog.text, "the warning")
        assert 'commext_proxy_releases_total{outcome="failed"} 1.0' in await cluster.metrics()


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("ending", ["lost", "dead"])
@pytest.mark.parametrize(
    ("prefill", "decode", "num_prefill", "num_decode"),
    [
        ("ends", "ok", 2, 0),
        ("ok", "ends", 2, 2),
        ("one ends", "ends", 3, 2),
        ("one ends", "ok", 2, 1),
    ],
)
async def test_a_request_that_loses_two_engines_in_one_step_is_tried_at_no_third(
    kit: Any, prefill: str, decode: str, num_prefill: int, num_decode: int, ending: str, body: Any
) -> None:
    ends = kit.dropping if ending == "lost" else kit.answering(500, DEAD)
    options = {"affinity": False, "request_attempts": 5, "prefill_attempts": 5}
    async with kit.cluster(num_prefill=4, num_decode=4, **options) as cluster:
        for number, engine in enumerate(cluster.prefill):
            if prefill == "ends" or (prefill == "one ends" and number == 0):
                engine.behave = ends
        for engine in cluster.decode:
            engine.behave = ends if decode == "ends" else kit.decode_ok
        response = await cluster.ask(body)
        if (prefill, decode) == ("one ends", "ok"):
            assert response.status == 200
        else:
            assert response.status == 502
            error = (await response.json())["error"]
            assert error["type"] == "engines_lost"
            assert "may be what ends engines" in error["message"]
        assert sum(len(asked(one)) for one in cluster.prefill) == num_prefill
        assert sum(len(one.calls) for one in cluster.decode) == num_decode
        if ending == "lost":
            for pool in cluster.pools:
                assert sum(one.state.suspected for one in pool.engines) <= 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("failing", ["prefill", "decode", "both"])
async def test_a_request_that_engines_answer_with_500_is_sent_to_two(
    kit: Any, failing: str, body: Any
) -> None:
    failed = kit.answering(500, b'{"error": {"message": "a parser raised"}}')
    options = {"affinity": False, "request_attempts": 5, "prefill_attempts": 5}
    async with kit.cluster(num_prefill=4, num_decode=4, **options) as cluster:
        asked_to_fail = [
            *(cluster.prefill if failing != "decode" else ()),
            *(cluster.decode if failing != "prefill" else ()),
        ]
        for engine in asked_to_fail:
            engine.behave = failed
        response = await cluster.ask(body)
        assert (response.status, await response.json()) == (
            500, {"error": {"message": "a parser raised"}},
        )  # fmt: skip
        assert sum(len(one.calls) for one in asked_to_fail) == 2
        assert 'outcome="engine_error"' in await cluster.metrics()


async def short_json(call: Any) -> None:
    content = b'{"choices": [{"te'
    await call.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        + content
    )


ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
HALF = {
    "empty": b"",
    "half of the JSON": b'{"choices": [{"text": "hel',
    "a list": b"[]",
    "text": (b"hello", "text/plain"),
    "a page": (b"<html>busy</html>", "text/html"),
    "JSON by another name": (b'{"choices": []}', "text/html"),
    "an empty stream": [],
    # As vLLM 0.32 ends the stream of a completion that is aborted before its first token.
    "an end alone": [DONE],
    "usage alone": [USAGE, DONE],
    "a role alone": [ROLE],
    "half an event": [TOLD[:20]],
    "less than announced": short_json,
}


def half(kit: Any, kind: str) -> Any:
    """An engine that answers so: with a body, one of another type, or the pieces of a stream."""
    answer = HALF[kind]
    if isinstance(answer, list):
        return kit.streaming(*answer)
    if callable(answer):
        return answer
    content, *other = answer if isinstance(answer, tuple) else (answer,)
    return lambda call: call.answer(200, content, *other)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("kind", HALF)
async def test_half_an_answer_is_none(kit: Any, kind: str, body: dict[str, Any]) -> None:
    """Another engine is asked; where that has none either, the client is told who has failed."""
    async with kit.cluster(num_decode=2) as cluster:
        cluster.decode[0].behave = half(kit, kind)
        for _ in range(2):
            response = await cluster.ask(body)
            assert response.status == 200
            text = await response.text()
            assert "hello" in text or text.endswith(DONE.decode())
        assert cluster.decode[0].calls
        cluster.decode[1].behave = half(kit, kind)
        response = await cluster.ask(body)
        assert response.status == 502
        error = (await response.json())["error"]
        assert error["type"] in ("bad_answer", "engines_lost")
        assert error["engine"] in ("decode0", "decode1")
        if body is STREAM and kind in ("an end alone", "usage alone"):
            assert "before its first token" in error["message"]


@pytest.mark.parametrize("kind", [*HALF, "parameters that are none"])
async def test_half_a_prefill_is_none(kit: Any, kind: str) -> None:
    async with kit.cluster() as cluster:
        other = kit.answering(200, b'{"kv_transfer_params": 7}')
        cluster.prefill[0].behave = half(kit, kind) if kind in HALF else other
        response = await cluster.ask(BODY)
        assert response.status == 200
        assert response.headers["X-Commext-Path"] == "local-prefill"
        assert cluster.decode[0].calls[0].body == BODY


@pytest.mark.parametrize("rest", [b"", TOLD, TOLD[:11]], ids=["one", "two", "one and a half"])
async def test_a_stream_that_ends_in_its_midst_ends_with_an_error(kit: Any, rest: bytes) -> None:
    async with kit.cluster() as cluster:
        cluster.decode[0].behave = kit.streaming(TOLD + rest)
        events = (await (await cluster.ask(STREAM)).text()).split("\n\n")
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["engine"]) == ("bad_answer", "decode0")
        assert events[0] + "\n\n" == TOLD.decode()
