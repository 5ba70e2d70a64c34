"""The open-loop client against servers that are slow, wrong or gone."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from goodputs import shapes
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.bench import client, figures
from vllm_commext.bench.client import Events
from vllm_commext.bench.workload import Arrival, bodies, scaled

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PART = {"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def usage(num_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": num_tokens}})


@asynccontextmanager
async def server(answer: Handler) -> AsyncIterator[str]:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": "/nowhere", "max_model_len": 99}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def play(
    answer: Handler, arrivals: list[Arrival], wait_seconds: float = 20.0
) -> client.Played:
    async with server(answer) as url:
        endpoint = await client.find(url)
        assert endpoint == client.Endpoint(url, "m", client.DEFAULT_VOCAB, 99)
        made = bodies(arrivals, endpoint.model, endpoint.vocab_size, (1,))
        return await client.play(endpoint, arrivals, made, wait_seconds=wait_seconds)


async def stream(request: web.Request, *pieces: bytes, pause: float = 0.0) -> web.StreamResponse:
    told = {client.PLACEMENT_HEADER: "local; ttft=5", client.ENGINE_HEADER: "e1"}
    response = web.StreamResponse(headers=told)
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(pause)
    return response


async def right(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    parts = [event(PART)] * (asked["max_tokens"] - 1)
    return await stream(request, *parts, usage(asked["max_tokens"]), b"data: [DONE]\n\n")


def test_arrivals_go_out_while_the_server_answers_nobody() -> None:
    num_come, all_come = 0, asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        nonlocal num_come
        num_come += 1
        if num_come == 20:
            all_come.set()
        await all_come.wait()
        return await right(request)

    arrivals = [Arrival(place * 0.02, 5, 3) for place in range(20)]
    played = asyncio.run(play(waits, arrivals))
    assert not any(one.error for one in played.samples)
    for place, one in enumerate(played.samples):
        assert one.first > 0.02 * (19 - place) - 0.01, "counted from when it was due"
    assert played.late < 20


def test_times_are_those_of_the_events() -> None:
    async def paced(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        half = event(PART)[:10]
        return await stream(
            request,
            half,
            event(PART)[10:],
            event(PART) * 2,
            usage(4) + b"data: [DONE]\n\n",
            pause=0.1,
        )

    one = asyncio.run(play(paced, [Arrival(0.0, 5, 4)])).samples[0]
    assert not one.error
    assert (figures.placements([one]), figures.engines([one])) == ({"local": 1}, {"e1": 1})
    assert one.first >= 0.3
    assert 0 < one.gap <= one.last - one.first
    assert one.tpot == pytest.approx((one.last - one.first) / 3)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([event(PART), usage(2), b"data: [DONE]\n\n"], "expected 3 tokens, got 2"),
        ([event(PART)] * 3, "ended before"),
        ([event(PART), event({"error": {"message": "lost"}}), b"data: [DONE]\n\n"], "lost"),
        ([event(PART), b"data: {error]"], "ended before"),
    ],
)
def test_a_wrong_stream_is_a_failure_with_its_reason(pieces: list[bytes], said: str) -> None:
    async def wrong(request: web.Request) -> web.StreamResponse:
        return await stream(request, *pieces)

    one = asyncio.run(play(wrong, [Arrival(0.0, 5, 3)])).samples[0]
    assert said in one.error


def test_what_fails_or_hangs_is_counted_within_bounds() -> None:
    async def mixed(request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["max_tokens"]
        if asked == 1:
            raise web.HTTPServiceUnavailable(text="full")
        if asked == 2:
            assert request.transport is not None
            request.transport.abort()
        if asked == 3:
            await asyncio.sleep(60)
        return await right(request)

    arrivals = [Arrival(0.0, 5, count) for count in (1, 2, 3, 4)]
    begun = time.monotonic()
    played = asyncio.run(play(mixed, arrivals, wait_seconds=1.0))
    assert time.monotonic() - begun < 20
    told = [one.error for one in played.samples]
    assert told[0] == "HTTP 503: full"
    assert told[1]
    assert told[2].startswith("not ended within 1 s")
    assert told[3] == ""


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 5))
def test_how_a_stream_is_cut_does_not_matter(cuts: list[int], num_parts: int) -> None:
    whole = event(PART) * num_parts + usage(7) + b"data: [DONE]\n\n"
    events = Events()
    for size in [*cuts, len(whole)]:
        events.feed(whole[:size], 1.0)
        whole = whole[size:]
    assert (events.num_tokens, events.done, events.first, events.error) == (7, True, 1.0, "")


def test_prompts_share_what_their_group_says_and_nothing_else() -> None:
    arrivals = [
        *scaled(shapes.WORKLOADS["agentic"](5, 10, 1), 0.01, 200),
        Arrival(11, 40, 1, 0, 30),
        Arrival(12, 40, 1, 0, 30),
    ]

    def prompts(*seed: int) -> list[list[int]]:
        return [json.loads(one)["prompt"] for one in bodies(arrivals, "m", 10_000, seed)]

    found, others = prompts(1, 2), prompts(1, 3)
    assert found == prompts(1, 2)
    assert [len(one) for one in found] == [one.prompt_tokens for one in arrivals]
    for one, other in zip(found, others, strict=True):
        assert one[:4] != other[:4]
    for place, one in enumerate(arrivals):
        for before, other in enumerate(arrivals[:place]):
            shared = min(one.shared_tokens, other.shared_tokens) if one.group == other.group else 0
            assert found[place][:shared] == found[before][:shared]
    assert found[-1][30:] != found[-2][30:]
