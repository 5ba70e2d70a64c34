"""How long a request waits for an engine that says nothing, or is not well."""

import asyncio
from typing import Any

BODY = {"prompt": "hello", "max_tokens": 20}
STREAM = {**BODY, "stream": True}


async def status_of(cluster: Any) -> int:
    return (await cluster.ask(BODY)).status


async def test_a_stream_whose_first_token_never_comes_is_aborted(kit: Any) -> None:
    async with kit.cluster(decode_timeout_seconds=0.1) as cluster:
        cluster.decode[0].behave = kit.hanging
        assert (await cluster.ask(STREAM)).status == 504
        await kit.until(lambda: cluster.decode[0].num_left == 1, "the abort to arrive")


async def test_an_answer_in_one_piece_may_take_as_long_as_its_engine_lives(kit: Any) -> None:
    async def slow(call: Any) -> None:
        await asyncio.sleep(0.5)
        await kit.decode_ok(call)

    short = {"decode_timeout_seconds": 0.05, "decode_idle_timeout_seconds": 0.05}
    async with kit.cluster(**short, engine_lost_seconds=0.2) as cluster:
        cluster.decode[0].behave = slow
        assert (await cluster.ask(BODY)).status == 200


async def test_an_engine_that_answers_nothing_any_more_is_given_up(kit: Any) -> None:
    checks = {"health_interval_seconds": 0.02, "health_timeout_seconds": 0.5}
    asked: list[Any] = []

    def silent_if_first(engine: Any) -> Any:
        async def behave(call: Any) -> None:
            asked.append(engine)
            if engine is asked[0]:
                engine.health_status = 0
                await kit.hanging(call)
            await kit.decode_ok(call)

        return behave

    async with kit.cluster(num_decode=2, **checks, engine_lost_seconds=0.3) as cluster:
        for engine in cluster.decode:
            engine.behave = silent_if_first(engine)
        assert await asyncio.wait_for(status_of(cluster), 30) == 200
        assert len(asked) == len({id(engine) for engine in asked}) == 2


async def test_an_engine_that_only_says_that_it_is_unwell_is_waited_for(kit: Any) -> None:
    release = asyncio.Event()

    checks = {"health_interval_seconds": 0.02, "engine_lost_seconds": 0.1}
    async with kit.cluster(**checks) as cluster:
        cluster.decode[0].behave = kit.held(release)
        asking = asyncio.ensure_future(status_of(cluster))
        await kit.until(lambda: bool(cluster.decode[0].calls), "the decode step")
        cluster.decode[0].health_status = 503
        await asyncio.sleep(0.4)
        assert not asking.done()
        release.set()
        assert await asking == 200


async def test_headers_without_a_first_token_are_a_timeout_too(kit: Any) -> None:
    async with kit.cluster(decode_timeout_seconds=0.1) as cluster:
        cluster.decode[0].behave = kit.streaming(hangs=True)
        assert (await cluster.ask(STREAM)).status == 504
        assert kit.outcome("timeout", "decode") in await cluster.metrics()


async def test_a_request_waits_a_moment_for_an_engine_to_be_well_again(kit: Any) -> None:
    async with kit.cluster(health_interval_seconds=0.02, engine_wait_seconds=30) as cluster:
        cluster.decode[0].health_status = 503
        pool = cluster.proxy.decode_pool
        await kit.until(lambda: pool.num_healthy == 0, "the sick engine to be noticed")
        request = asyncio.create_task(status_of(cluster))
        await asyncio.sleep(0.1)
        assert not request.done()
        assert cluster.decode[0].calls == []
        cluster.decode[0].health_status = 200
        assert await asyncio.wait_for(request, 20) == 200


async def test_health_follows_the_engines_down_and_up(kit: Any) -> None:
    async with kit.cluster(num_decode=2, health_interval_seconds=0.02) as cluster:
        pool = cluster.proxy.decode_pool
        cluster.decode[0].health_status = 503
        await kit.until(lambda: pool.num_healthy == 1, "the sick engine to be noticed")
        assert pool.engines[0].detail == "/health answered 503"
        for _ in range(2):
            assert (await cluster.ask(BODY)).headers["X-Commext-Decode"] == "decode1"
        cluster.decode[0].health_status = 200
        await kit.until(lambda: pool.num_healthy == 2, "the engine to be well again")
        await cluster.decode[1].stop()
        await kit.until(lambda: pool.num_healthy == 1, "the lost engine to be noticed")
        await cluster.decode[1].start()
        await kit.until(lambda: pool.num_healthy == 2, "the engine to be back")
