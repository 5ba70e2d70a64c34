"""Requests that go to both engines at once and lose the prefill engine before it has answered."""

import asyncio
from typing import Any

import pytest

from tests.unit.proxy.test_streams import (
    answering,
    ask,
    decode,
    params_of,
    running,
    ways,
)

DEAD = b'{"error": {"message": "EngineCore encountered an issue"}}'


@pytest.mark.parametrize("end", ["it ends", "its core has died"])
@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_when_a_prefill_engine_is_lost_the_decode_engine_goes_on(
    kit: Any, num_prefill: int, end: str
) -> None:
    """What it has read counts there alone."""
    async with running(kit, num_prefill=num_prefill, health_interval_seconds=60.0) as cluster:
        (decoding,), may_answer = cluster.decode, asyncio.Event()

        async def dying(call: Any) -> None:
            (one,) = (one for one in cluster.prefill if call in one.calls)
            one.health_status = 503
            if end == "its core has died":
                await call.answer(500, DEAD)
            asyncio.get_running_loop().call_later(0.3, may_answer.set)

        async def late(call: Any) -> None:
            await may_answer.wait()
            await decode(call)

        for engine in cluster.prefill:
            engine.behave = dying
        decoding.behave = late
        path, answer = await ask(cluster)
        assert path == "streamed"
        assert answer.endswith(b"data: [DONE]\n\n")
        assert [len(one.calls) for one in cluster.decode] == [1]
        assert sum(len(one.calls) for one in cluster.prefill) == 1
        assert await ways(cluster) == {"alone": 1}


async def test_a_prefill_engine_that_lives_is_not_taken_for_lost(kit: Any) -> None:
    """It has closed a connection: another one computes the prompt, and the decode engine is let
    go, which could wait for long for one that has never begun."""
    async with running(kit, num_prefill=2, health_interval_seconds=60.0) as cluster:
        (decoding,), (first, second) = cluster.decode, cluster.prefill

        async def whole_only(call: Any) -> None:
            if "stream_key" in params_of(call):
                await asyncio.Event().wait()
            await decode(call)

        async def once(call: Any) -> None:
            if first.calls and second.calls:
                await answering()(call)

        first.behave = second.behave = once
        decoding.behave = whole_only
        assert (await ask(cluster))[0] == "two-step"
        await kit.until(lambda: decoding.num_left == 1, "the decode engine to be left")
        assert await ways(cluster) == {"again": 1}


async def test_a_decode_engine_that_does_not_go_on_has_the_request_begun_anew(kit: Any) -> None:
    options = {"health_interval_seconds": 60.0, "affinity": True}
    async with running(kit, num_prefill=2, **options) as cluster:
        (decoding,), (first, second) = cluster.decode, cluster.prefill

        async def refusing(call: Any) -> None:
            if "stream_key" in params_of(call):
                await call.answer(500, b'{"error": {"message": "no"}}')
            else:
                await decode(call)

        async def dying(call: Any) -> None:
            if first.calls and second.calls:
                await answering()(call)
            else:
                (first if first.calls else second).health_status = 503

        first.behave = second.behave = dying
        decoding.behave = refusing
        assert (await ask(cluster))[0] == "two-step"
        asked = [params_of(call) for engine in (first, second) for call in engine.calls]
        assert sorted("stream_key" in one for one in asked) == [False, True]
