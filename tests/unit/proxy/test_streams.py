"""Requests that go to both engines at once: when, what each engine is told, and what becomes of the
other one if one of them fails or is lost."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.proxy.test_resume import COMPLETIONS, stream
from vllm_commext.proxy.engines.engine import UNKNOWN, Capabilities, Engine, Rank, SideChannel, Work
from vllm_commext.proxy.engines.health_and_metrics import read_capabilities
from vllm_commext.proxy.session import ask_engines
from vllm_commext.proxy.session.prefill_and_decode import Stream

BODY = {"model": "tiny", "prompt": "long " * 40, "max_tokens": 3, "temperature": 0, "stream": True}
ANSWER = stream(0, COMPLETIONS, [[(7, "one")], [(8, " two")], [(9, " three")]])
SEAL = "5ea1" * 16
CHANNEL = ("10.0.0.7", 5600, SEAL)
PLACE = {
    **dict(zip(("remote_host", "remote_port", "remote_place_seal"), CHANNEL, strict=True)),
    "remote_chunk_tokens": 16,
}
KEY = re.compile("[0-9a-f]{32}")


def answering(usage: dict[str, Any] | None = None, **params: Any) -> Any:
    """A prefill engine that streams; ``params`` are laid over what it returns."""

    async def behave(call: Any) -> None:
        told = {"do_remote_prefill": True, "remote_block_ids": [[1]], **PLACE, **params}
        answer = {"choices": [{"text": "one"}], "kv_transfer_params": told, "usage": usage}
        await call.answer(200, json.dumps(answer).encode())

    return behave


async def decode(call: Any) -> None:
    if not call.body["stream"]:
        await call.answer(200, b'{"choices": [{"text": "one two three"}]}')
        return
    await call.stream(ANSWER)


def params_of(call: Any) -> Any:
    return call.body.get("kv_transfer_params")


def refusing(status: int) -> Any:
    """A decode engine that reads no stream."""

    async def behave(call: Any) -> None:
        if "stream_key" in params_of(call):
            await call.answer(status, b'{"error": {"message": "no"}}')
        else:
            await decode(call)

    return behave


async def whole_only(call: Any) -> None:
    """A decode engine that waits for streams for ever."""
    if "stream_key" in (params_of(call) or {}):
        await asyncio.Event().wait()
    await decode(call)


async def ways(cluster: Any) -> dict[str, int]:
    found = re.findall(r'commext_proxy_streams_total{way="(\w+)"} (\d+)', await cluster.metrics())
    return {way: int(count) for way, count in found if count != "0"}


async def ask(cluster: Any, body: Any = BODY) -> tuple[str, bytes]:
    """The way that a request took, and its answer."""
    async with cluster.post(body) as response:
        assert response.status == 200
        return response.headers["X-Commext-Path"], await response.read()


async def check_alone(cluster: Any) -> None:
    """The decode engine answers a request by itself, and no second prefill engine is asked."""
    path, answer = await ask(cluster)
    assert path == "streamed"
    assert answer.endswith(b"data: [DONE]\n\n")
    assert [len(one.calls) for one in cluster.decode] == [1]
    assert sum(len(one.calls) for one in cluster.prefill) == 1
    assert await ways(cluster) == {"alone": 1}


async def until_answered(cluster: Any, step: str, count: int = 1) -> None:
    while f"{step}_seconds_count {count}" not in await cluster.metrics():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(kit: Any, **options: Any) -> AsyncIterator[Any]:
    settings = {"affinity": False, "channel": CHANNEL, **options}
    async with kit.cluster(**settings) as cluster:
        for engine in cluster.prefill:
            engine.behave = answering()
        for engine in cluster.decode:
            engine.behave = decode
        yield cluster


def streaming_engine() -> Engine:
    rank = Rank("0", SideChannel(*CHANNEL), streams=True)
    return Engine("prefill", "p", "http://p", capabilities=Capabilities((rank,), is_known=True))


async def test_both_engines_are_asked_at_once_from_the_first_request_on(kit: Any) -> None:
    async with running(kit) as cluster:
        prefill, decoding = cluster.prefill[0], cluster.decode[0]
        begun = asyncio.Event()

        async def waiting(call: Any) -> None:
            begun.set()
            await decode(call)

        async def after(call: Any) -> None:
            await asyncio.wait_for(begun.wait(), 10)
            await answering()(call)

        decoding.behave, prefill.behave = waiting, after
        path, answer = await ask(cluster)
        assert path == "streamed"
        assert answer.endswith(b"data: [DONE]\n\n")
        key = params_of(prefill.calls[0])["stream_key"]
        assert KEY.fullmatch(key)
        assert params_of(prefill.calls[0])["do_remote_decode"] is True
        where = {"remote_host": "10.0.0.7", "remote_port": 5600, "remote_place_seal": SEAL}
        step = {"do_remote_prefill": True, "do_remote_decode": False}
        assert params_of(decoding.calls[0]) == {**step, "stream_key": key, **where, **kit.asks_mark}
        assert decoding.calls[0].body["prompt"] == BODY["prompt"]
        await ask(cluster)
        assert params_of(prefill.calls[1])["stream_key"] != key
        assert await ways(cluster) == {"streamed": 2}


@pytest.mark.parametrize("status", [500, 503])
async def test_a_decode_engine_that_cannot_is_asked_once_more_with_the_answer(
    kit: Any, status: int
) -> None:
    async with running(kit) as cluster:
        prefill, decoding = cluster.prefill[0], cluster.decode[0]
        decoding.behave = refusing(status)
        path, answer = await ask(cluster)
        assert path == "two-step"
        assert answer.count(b"data: ") == len(ANSWER)
        assert answer.endswith(b"data: [DONE]\n\n")
        assert len(prefill.calls) == 1
        assert params_of(decoding.calls[-1])["remote_block_ids"] == [[1]]
        assert await ways(cluster) == {"failed": 1}


async def test_a_prefill_engine_that_fails_ends_the_decode_engines_wait(kit: Any) -> None:
    async with running(kit) as cluster:
        prefill, decoding = cluster.prefill[0], cluster.decode[0]
        decoding.behave = whole_only
        prefill.behave = kit.answering(500, b"{}")
        path, _ = await ask(cluster)
        assert path == "local-prefill"
        await kit.until(lambda: decoding.num_left == 1, "the decode engine to be left")


async def test_a_decode_engine_that_drains_passes_a_streamed_request_on(kit: Any) -> None:
    """None of it was begun there: another one reads the same prompt while it is computed."""
    async with running(kit, num_decode=2, health_interval_seconds=60.0) as cluster:
        (prefill,), (first, second) = cluster.prefill, cluster.decode
        await ask(cluster)
        draining, other = (second, first) if len(first.calls) else (first, second)
        draining.drains = True
        seen = len(other.calls)
        assert (await ask(cluster))[0] == "streamed"
        assert draining.num_refused == 1
        read, computed = params_of(other.calls[seen]), params_of(prefill.calls[-1])
        assert read["stream_key"] == computed["stream_key"]
        assert len(prefill.calls) == 2
        assert await ways(cluster) == {"streamed": 2}


async def test_a_prefill_engine_that_drains_takes_a_streamed_request_back(kit: Any) -> None:
    """The decode engine lets go of what it waits for, and both steps are taken with another one;
    as often as engines drain, whatever the number of attempts."""
    options = {"prefill_attempts": 1, "health_interval_seconds": 60.0}
    async with running(kit, num_prefill=3, **options) as cluster:
        for _ in cluster.prefill:
            await ask(cluster)
        (decoding,) = cluster.decode
        *draining, left = cluster.prefill
        for engine in draining:
            engine.drains = True
        answers = [(await ask(cluster))[0] for _ in range(3)]
        assert set(answers) == {"two-step", "streamed"}
        assert [engine.num_refused for engine in draining] == [1] * len(draining)
        assert len(left.calls) == 1 + len(answers)
        assert params_of(decoding.calls[-1])["remote_host"] == "10.0.0.7"
        assert (await ways(cluster))["again"] >= 1


@pytest.mark.parametrize("num_computed", [1, 2])
async def test_a_client_that_leaves_takes_both_requests_along(kit: Any, num_computed: int) -> None:
    async with running(kit) as cluster:
        prefill, decoding = cluster.prefill[0], cluster.decode[0]
        await ask(cluster)
        decoding.behave = kit.hanging
        prefill.behave = answering() if num_computed == 2 else kit.hanging
        task = asyncio.ensure_future(ask(cluster))
        await kit.until(lambda: len(prefill.calls) + len(decoding.calls) == 4, "both requests")
        await until_answered(cluster, "prefill", num_computed)
        task.cancel()
        await kit.until(lambda: decoding.num_left + prefill.num_left == 3 - num_computed, "an end")
        await cluster.idle()
        assert await ways(cluster) == {"streamed": num_computed}


@pytest.mark.parametrize(
    ("ranks", "changes", "way", "options"),
    [
        ([], {}, "not_known", {}),
        ([False], {}, "not_known", {}),
        ([True, True], {}, "several", {}),
        ([True], {"max_tokens": 1}, "one_token", {}),
        ([True], {}, "off", {"stream_chunks": "never"}),
    ],
)
async def test_what_is_not_streamed_is_counted_with_the_reason(
    kit: Any, ranks: list[bool], changes: Any, way: str, options: Any
) -> None:
    """The prefill engine's ranks say whether they stream; an older release's say nothing."""
    async with running(kit, health_interval_seconds=60.0, **options) as cluster:
        (engine,) = cluster.pools[0].engines
        told = [Rank(str(n), SideChannel(*CHANNEL), streams) for n, streams in enumerate(ranks)]
        engine.capabilities = Capabilities(tuple(told), is_known=True)
        path, _ = await ask(cluster, {**BODY, **changes})
        assert path == "two-step"
        assert await ways(cluster) == {way: 1}


async def test_a_prefill_engine_behind_another_side_channel_is_read_from_there(kit: Any) -> None:
    """It was replaced at its address since its page was read."""
    async with running(kit, health_interval_seconds=60.0) as cluster:
        prefill, decoding = cluster.prefill[0], cluster.decode[0]
        (engine,) = cluster.pools[0].engines
        prefill.behave, decoding.behave = answering(remote_port=5601), whole_only
        for ways_taken in ({"several": 1}, {"several": 1, "not_known": 1}):
            assert (await ask(cluster))[0] == "two-step"
            assert params_of(decoding.calls[-1])["remote_port"] == 5601
            assert await ways(cluster) == ways_taken
            assert engine.capabilities == UNKNOWN
        assert sum("stream_key" in params_of(call) for call in decoding.calls) == 1


async def test_nothing_is_streamed_to_a_decode_engine_that_does_not_say_it_can(kit: Any) -> None:
    """An older one, or one on which it is off; any may be chosen."""
    async with running(kit, num_decode=2) as cluster:
        new, old = cluster.decode
        old.streams = False
        for engine in cluster.pools[1].engines:
            engine.capabilities = read_capabilities((old if engine.url == old.url else new).page)
        for _ in range(3):
            assert (await ask(cluster))[0] == "two-step"
        assert await ways(cluster) == {"decode": 3}
        (engine,) = [one for one in cluster.pools[1].engines if one.url == old.url]
        engine.refuse("gone")
        assert (await ask(cluster))[0] == "streamed"


async def test_few_decode_answers_wait_for_one_prefill_engine(kit: Any) -> None:
    async with running(kit) as cluster:
        prefill, decoding = cluster.prefill[0], cluster.decode[0]
        await ask(cluster)
        (engine,) = cluster.pools[0].engines
        may_answer = asyncio.Event()
        prefill.behave = kit.held(may_answer, answering())
        asked = [asyncio.create_task(ask(cluster)) for _ in range(Work.MAX_WAITING + 2)]
        await kit.until(lambda: len(prefill.calls) == 1 + len(asked), "all requests")
        assert len(engine.work.waiting) == Work.MAX_WAITING
        may_answer.set()
        paths = [path for path, _ in await asyncio.gather(*asked)]
        assert sorted(paths) == ["streamed"] * Work.MAX_WAITING + ["two-step"] * 2
        assert (await ways(cluster))["busy"] == 2
        assert not engine.work.waiting
        assert len(decoding.calls) == 1 + len(asked)


async def test_after_a_stream_that_failed_the_prefill_engine_is_asked_again_what_it_can(
    kit: Any,
) -> None:
    """As it knows after its first step that its model is not streamed."""
    async with running(kit) as cluster:
        cluster.decode[0].behave = refusing(500)
        (engine,) = cluster.pools[0].engines
        cluster.prefill[0].streams = False
        assert engine.capabilities.streams
        await ask(cluster)
        await kit.until(lambda: not engine.capabilities.streams, "another look at its page")
        await ask(cluster)
        assert await ways(cluster) == {"failed": 1, "not_known": 1}


async def test_a_cancellation_is_not_lost_while_the_decode_engine_is_let_go() -> None:
    """It says that the client has gone, or that the proxy ends."""
    let_go, may_end = asyncio.Event(), asyncio.Event()

    async def asked(payload: Any, source: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            let_go.set()
            await may_end.wait()

    stream = Stream(BODY, lambda body, reader: body, asked)
    await stream.prefill_payload(streaming_engine())
    assert stream.is_under_way
    await asyncio.sleep(0)
    letting_go = asyncio.create_task(stream.cancel())
    await let_go.wait()
    letting_go.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await letting_go


async def test_an_answer_that_comes_while_it_is_let_go_is_closed() -> None:
    closed: list[bool] = []

    async def asked(payload: Any, source: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return SimpleNamespace(close=lambda: closed.append(True))

    stream = Stream(BODY, lambda body, reader: body, asked)
    await stream.prefill_payload(streaming_engine())
    await asyncio.sleep(0)
    await stream.cancel()
    assert closed == [True]
    assert not stream.is_under_way


@pytest.mark.parametrize("form", ["stream", "whole", "cut"])
@pytest.mark.parametrize("cached", [0, 512, None])
async def test_cached_tokens_come_from_prefill(kit: Any, cached: int | None, form: str) -> None:
    """The decode engine tells of what it was sent, and a read may end within what it tells."""
    text = 'she said "cached_tokens": 7 twice' + " again" * (form == "cut") * 200_000
    details = {"cached_tokens": 520, "created_cache_tokens": 0}
    usage = {"usage": {"prompt_tokens_details": details}}
    content = json.dumps({"choices": [{"index": 0, "text": text}], **usage}).encode()
    end, has_read = content.index(b"20, "), asyncio.Event()
    halves = content[:end], content[end:]
    pieces = halves if form == "cut" else (b"data: %b\n\n" % content, ANSWER[-1])

    async def decoded(call: Any) -> None:
        if form == "whole":
            await call.answer(200, content)
            return
        kind = "application/json" if form == "cut" else "text/event-stream"
        await call.stream(pieces, has_read.wait, kind)

    told = {} if cached is None else {"remote_prefill_cached_tokens": cached}
    async with running(kit) as cluster:
        created = {"prompt_tokens_details": {"created_cache_tokens": 384}}
        cluster.prefill[0].behave = answering(created, **told)
        await ask(cluster)
        cluster.decode[0].behave = decoded
        async with cluster.post({**BODY, "stream": form == "stream"}) as response:
            assert response.headers["X-Commext-Path"] == "streamed"
            answer = await response.content.readexactly(end - 20)
            has_read.set()
            answer += await response.read()
        line = answer.split(b"\n")[0].removeprefix(b"data: ")
        expected = {"cached_tokens": cached, "created_cache_tokens": 384} if told else details
        assert json.loads(line)["usage"]["prompt_tokens_details"] == expected
        assert json.loads(line)["choices"][0]["text"] == text


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

        for engine in cluster.prefill:
            engine.behave = dying
        decoding.behave = kit.held(may_answer, decode)
        await check_alone(cluster)


@pytest.mark.parametrize(
    ("end", "seconds", "late_seconds"), [("hangs", 20, 0.1), ("hangs", 1, 600), ("fails", 20, 60)]
)
async def test_a_decode_engine_that_answers_needs_the_prefill_engine_no_longer(
    kit: Any, monkeypatch: pytest.MonkeyPatch, end: str, seconds: float, late_seconds: float
) -> None:
    """It computes the prompt if its load fails. A silent prefill engine is asked no more."""
    monkeypatch.setattr(ask_engines, "LATE_SECONDS", late_seconds)
    async with running(kit, num_prefill=2, prefill_timeout_seconds=seconds) as cluster:

        async def ending(call: Any) -> None:
            await until_answered(cluster, "decode_headers")
            await (kit.hanging(call) if end == "hangs" else call.answer(500, b"{}"))

        for engine in cluster.prefill:
            engine.behave = ending
        await check_alone(cluster)
        assert 'local_prefills_total{reason="prefill_failed"} 1.0' in await cluster.metrics()
        silent = [one.state.is_silent for one in cluster.pools[0].engines]
        await kit.until(lambda: [bool(one.num_left) for one in cluster.prefill] == silent, "an end")
        assert any(silent) == (end == "hangs")


async def test_a_load_that_fails_at_a_hung_prefill_engine_does_not_wait_for_it(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under vLLM's policy `fail`: the decode engine then computes the prompt."""
    monkeypatch.setattr(ask_engines, "LATE_SECONDS", 0.1)
    async with running(kit, prefill_timeout_seconds=600) as cluster:
        (prefill,), (decoding,) = cluster.prefill, cluster.decode
        prefill.behave = kit.hanging

        async def failing_once(call: Any) -> None:
            if len(decoding.calls) == 1:
                await kit.until(lambda: bool(prefill.calls), "the prefill engine to be asked")
                await call.answer(500, b"{}")
            else:
                await decode(call)

        decoding.behave = failing_once
        async with cluster.post(BODY) as response:
            assert (response.status, response.headers["X-Commext-Path"]) == (200, "local-prefill")
            await response.read()
        assert len(decoding.calls) == 2


@pytest.mark.parametrize(
    ("first", "status", "late_seconds"),
    [("decode", 200, 60.0), ("decode", 400, 0.0), ("prefill", 200, 0.0)],
)
async def test_a_prompts_answer_may_come_before_and_after_the_decode_engines(
    kit: Any, monkeypatch: pytest.MonkeyPatch, first: str, status: int, late_seconds: float
) -> None:
    """As its first token comes from the prefill engine. A refusal says nothing of the prompt."""
    monkeypatch.setattr(ask_engines, "LATE_SECONDS", late_seconds)
    async with running(kit) as cluster:
        (prefill,), (decoding,) = cluster.prefill, cluster.decode

        async def prefilling(call: Any) -> None:
            if first == "decode":
                await until_answered(cluster, "decode_headers")
            await answering()(call)

        async def reading(call: Any) -> None:
            if first == "prefill":
                await until_answered(cluster, "prefill")
            await call.stream(ANSWER, cluster.metrics)

        prefill.behave = prefilling
        decoding.behave = reading if status == 200 else kit.answering(status, b"{}")
        async with cluster.post(BODY) as response:
            assert (response.status, response.headers["X-Commext-Path"]) == (status, "streamed")
            await response.read()
        assert (prefill.num_left, await ways(cluster)) == (0, {"streamed": 1})


async def test_a_prefill_engine_that_lives_is_not_taken_for_lost(kit: Any) -> None:
    """It has closed a connection: another one computes the prompt, and the decode engine is let
    go, which could wait for long for one that has never begun."""
    async with running(kit, num_prefill=2, health_interval_seconds=60.0) as cluster:
        (decoding,), (first, second) = cluster.decode, cluster.prefill

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

        async def dying(call: Any) -> None:
            if first.calls and second.calls:
                await answering()(call)
            else:
                (first if first.calls else second).health_status = 503

        first.behave = second.behave = dying
        decoding.behave = refusing(500)
        assert (await ask(cluster))[0] == "two-step"
        asked = [params_of(call) for engine in (first, second) for call in engine.calls]
        assert sorted("stream_key" in one for one in asked) == [False, True]
