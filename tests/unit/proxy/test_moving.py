"""Streams whose decode engine drains: they go on at another one, or stay where they are, and either
way the client gets each token once."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.unit.proxy import test_resume
from tests.unit.proxy.test_resume import CHAT, COMPLETIONS, DONE
from vllm_commext.proxy.engines.health_and_metrics import read_capabilities
from vllm_commext.proxy.errors_phases import Resume
from vllm_commext.proxy.session import restart_resume_move as session
from vllm_commext.proxy.session.failures import end_tasks
from vllm_commext.proxy.session.resumable_stream import ANSWER

ANSWERED = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
OTHER = [(1, "a"), (9, "x"), (3, "c"), (4, "d")]


def event(engine: int, path: str, tokens: Sequence[tuple[int, str]], end: str | None) -> bytes:
    text, ids = "".join(word for _, word in tokens), [token for token, _ in tokens]
    return test_resume.event(
        engine, path, **test_resume.part(path, text), token_ids=ids, finish_reason=end
    )


class Told:
    def __init__(self, raw: bytes) -> None:
        self.text, _, self.names, _ = test_resume.told(raw)
        events = test_resume.contents(raw)
        self.resumed = [one["commext_resumed"] for one in events if "commext_resumed" in one]
        self.is_whole = raw.endswith(DONE)


class Engines:
    """Behaviour of two decode engines. The first one says two tokens, and the rest once it is let
    go; the other one repeats what it is told, or begins anew, with *answer* in events of one token.
    """

    def __init__(self, path: str, answer: Sequence[tuple[int, str]] = ANSWERED) -> None:
        self.path, self.answer = path, answer
        self.release = asyncio.Event()
        self.goes_on = True

    async def first(self, call: Any) -> None:
        await call.begin_stream()
        for token in ANSWERED[:2]:
            await call.chunk(event(0, self.path, [token], None))
        await self.release.wait()
        await call.chunk(event(0, self.path, ANSWERED[2:], "stop") + DONE)
        await call.end_stream()

    async def second(self, call: Any) -> None:
        params = call.body["kv_transfer_params"]
        count = len(params[ANSWER]) if self.goes_on else 1
        cuts = [self.answer[:count], *([one] for one in self.answer[count:])]
        await call.begin_stream()
        for number, cut in enumerate(cuts, 1):
            await asyncio.sleep(0 if self.goes_on else 0.05)
            await call.chunk(event(1, self.path, cut, "stop" if number == len(cuts) else None))
        await call.chunk(DONE)
        await call.end_stream()


COMPUTED, READ = "computed", "read"
AHEAD = (COMPUTED, READ)
"""Where the other engine has the prompt from: a prefill engine, or the first one."""


def tell(cluster: Any, ahead: str) -> None:
    """Whether decode engines cache prefixes, and offer blocks."""
    for engine in cluster.pools[1].engines:
        known = engine.capabilities
        ranks = tuple(replace(rank, reuse=ahead == READ) for rank in known.ranks)
        engine.capabilities = replace(known, caches=ahead == READ, ranks=ranks)


async def beginning(response: Any, count: int) -> bytes:
    """What a client has got when that are so many events, or more."""
    got = b""
    while got.count(b"\n\n") < count:
        got += await response.content.readany()
    return got


async def drained(
    cluster: Any,
    engines: Engines,
    body: dict[str, Any],
    expected: Resume,
    at_drain: Callable[[], None] = lambda: None,
) -> bytes:
    """What a client gets whose first engine is drained once it has two tokens."""
    first, second = cluster.decode
    first.behave, second.behave = engines.first, engines.second
    body = {"prompt": "hello", "messages": [], "stream": True, **body}
    counted = f'commext_proxy_moves_total{{result="{expected}"}} 1.0'
    async with cluster.post(body, engines.path) as response:
        got = await beginning(response, 2)
        at_drain()
        cluster.proxy.registry.drain(frozenset((first.url,)))
        while counted not in await cluster.metrics():
            await asyncio.sleep(0.01)
        if expected is not Resume.RESUMED:
            engines.release.set()
        got += await response.read()
    await cluster.idle()
    return got


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("way", ["goes on", "begins anew"])
@pytest.mark.parametrize("ahead", AHEAD)
async def test_a_stream_leaves_an_engine_that_drains(
    kit: Any, path: str, way: str, ahead: str
) -> None:
    engines = Engines(path)
    engines.goes_on = way != "begins anew"
    async with kit.cluster(num_decode=2) as cluster:
        tell(cluster, ahead)
        places = list(cluster.pools[1].engines[0].capabilities.offers)
        got = Told(await drained(cluster, engines, {}, Resume.RESUMED))
        assert (got.text, got.is_whole, got.resumed) == ("abcd", True, [1])
        assert got.names == {("one-0", 1000)}
        first, second = cluster.decode
        await kit.until(lambda: first.num_left == 1, "the first engine to be let go")
        (asked,) = second.calls
        given = {"reuse_from": places} if ahead == READ else kit.kv_params
        assert asked.body["kv_transfer_params"] == {
            **given,
            ANSWER: [1, 2],
            **kit.asks_mark,
            **test_resume.PIECES[path],
        }
        assert len(first.calls) == 1
        assert len(cluster.prefill[0].calls) == (1 if ahead == READ else 2)
        page = await cluster.metrics()
        assert "commext_proxy_move_pause_seconds_count 1.0" in page
        assert 'commext_proxy_resumes_total{result="resumed"} 0.0' in page


STAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Resume]] = {
    # What is asked for, the proxy's options, and why the stream stays where it is.
    "off": ({}, {"move": False}, Resume.OFF),
    "nothing is kept": ({}, {"resume": False}, Resume.OFF),
    "an echo": ({"echo": True}, {}, Resume.ECHO),
    "samples": ({"n": 2}, {}, Resume.SAMPLES),
    "about to end": ({"max_tokens": 12}, {}, Resume.ENDING),
    "no answer in time": ({}, {"move_pause_seconds": 0.2}, Resume.FAILED),
    "another answer": ({}, {}, Resume.DIFFERS),
    "an error": ({}, {}, Resume.FAILED),
    "a refusal": ({}, {}, Resume.FAILED),
    "a stream that breaks off": ({}, {}, Resume.FAILED),
    "no other engine": ({}, {"health_interval_seconds": 60.0}, Resume.FAILED),
}


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("case", STAYS)
async def test_a_stream_that_cannot_leave_ends_where_it_is(
    kit: Any, case: str, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREPARE_SECONDS", 0.2)
    body, options, expected = STAYS[case]
    engines = Engines(COMPLETIONS, OTHER if case == "another answer" else ANSWERED)

    async def fails(call: Any) -> None:
        if case == "no answer in time":
            await kit.hanging(call)
        elif case == "a stream that breaks off":
            await call.begin_stream()
            await call.chunk(event(1, COMPLETIONS, ANSWERED[:1], None))
        else:
            await call.answer(500 if case == "an error" else 400, b"{}")

    if case in ("an error", "a refusal", "a stream that breaks off", "no answer in time"):
        engines.second = fails
    async with kit.cluster(num_decode=2, **options) as cluster:
        tell(cluster, ahead)
        cluster.pools[1].engines[1].state.healthy = case != "no other engine"
        got = Told(await drained(cluster, engines, body, expected))
        assert (got.text, got.is_whole, got.resumed) == ("abcd", True, [])
        assert cluster.decode[0].num_left == 0
        assert case != "no other engine" or cluster.decode[1].calls == []


async def test_an_answer_that_is_begun_anew_after_long_stays(kit: Any) -> None:
    """It would pause for about as long as it has taken."""
    engines = Engines(COMPLETIONS)
    engines.goes_on = False
    async with kit.cluster(num_decode=2, move_pause_seconds=0.2) as cluster:
        first_behaviour = engines.first

        async def late(call: Any) -> None:
            await asyncio.sleep(0.3)
            await first_behaviour(call)

        engines.first = late
        got = Told(await drained(cluster, engines, {}, Resume.ANEW))
        assert (got.text, got.resumed) == ("abcd", [])


async def test_a_stream_waits_for_an_engine_that_comes_back(kit: Any) -> None:
    """Of engines that are replaced, one may drain before a check tells of the one before it."""
    engines = Engines(COMPLETIONS)
    async with kit.cluster(num_decode=2) as cluster:
        away = cluster.pools[1].engines[1]
        refuse = partial(away.refuse, "it was away")  # until a check, which is made at once
        got = Told(await drained(cluster, engines, {}, Resume.RESUMED, refuse))
        assert (got.text, got.resumed) == ("abcd", [1])


@pytest.mark.parametrize("ahead", AHEAD)
async def test_a_client_that_leaves_meanwhile_leaves_nothing(kit: Any, ahead: str) -> None:
    engines = Engines(COMPLETIONS)
    async with kit.cluster(num_decode=2) as cluster:
        tell(cluster, ahead)
        first, second = cluster.decode
        first.behave, second.behave = engines.first, kit.hanging
        async with cluster.post({"prompt": "hello", "stream": True}) as response:
            await response.content.readany()
            cluster.proxy.registry.drain(frozenset((first.url,)))
            await kit.until(lambda: bool(second.calls), "the other engine to be asked")
        await cluster.idle()
        await kit.until(lambda: first.num_left > 0 and second.num_left == 1, "both to be left")


@pytest.mark.parametrize("caches", ["True", "False"])
def test_an_engine_says_whether_it_caches_prefixes(kit: Any, caches: str) -> None:
    page = kit.engine(kit.decode_ok).page
    setting = f'enable_prefix_caching="{caches}"'
    page += f'vllm:cache_config_info{{block_size="16",{setting},engine="0"}} 1.0\n'
    found = read_capabilities(page)
    assert (found.caches, found.forgets) == (caches == "True", caches == "False")


class Prefills:
    """A prefill engine that computes a stream's prompt, and then hangs, while the first decode
    engine ends its answer."""

    def __init__(self, kit: Any, engines: Engines) -> None:
        self.kit, self.engines, self.num = kit, engines, 0

    async def behave(self, call: Any) -> None:
        self.num += 1
        if self.num > 1:
            self.engines.release.set()
            await self.kit.hanging(call)
        await self.kit.prefill_ok(call)


async def test_an_answer_that_ends_while_its_move_is_prepared_is_counted(kit: Any) -> None:
    engines = Engines(COMPLETIONS)
    async with kit.cluster(num_decode=2) as cluster:
        cluster.prefill[0].behave = Prefills(kit, engines).behave
        got = Told(await drained(cluster, engines, {}, Resume.ENDING))
        assert (got.text, got.is_whole, got.resumed) == ("abcd", True, [])
        assert cluster.decode[1].calls == []


async def test_a_client_that_leaves_as_its_stream_ends_leaves_nothing(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its move is being prepared; what waits for that to end is told that the client left."""
    has_ended = asyncio.Event()

    async def wait_long(tasks: Iterable[asyncio.Task[Any]]) -> None:
        await end_tasks(tasks)
        has_ended.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(session, "end_tasks", wait_long)
    engines = Engines(COMPLETIONS)
    async with kit.cluster(num_decode=2) as cluster:
        first, prefill = cluster.decode[0], cluster.prefill[0]
        first.behave, prefill.behave = engines.first, Prefills(kit, engines).behave
        body, leaving = {"prompt": "hello", "stream": True}, {"Connection": "close"}
        async with cluster.post(body, COMPLETIONS, headers=leaving) as response:
            got = await beginning(response, 2)
            cluster.proxy.registry.drain(frozenset((first.url,)))
            while not got.endswith(DONE):
                got += await response.content.readany()
            await has_ended.wait()
        assert Told(got).text == "abcd"
        await cluster.idle()
        await kit.until(lambda: prefill.num_left == 1, "the prefill engine to be left")
        assert [one.work.in_flight for one in cluster.proxy.registry.engines] == [0, 0, 0]
        assert 'outcome="client_gone"' not in await cluster.metrics()


async def test_streams_move_a_few_at_a_time(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has begun to leave goes on at the other engine before the next one stops."""
    monkeypatch.setattr("vllm_commext.proxy.routes_readiness_shutdown.MAX_MOVES", 1)
    engines, num_asked, lets = Engines(COMPLETIONS), 0, asyncio.Semaphore(0)
    async with kit.cluster(num_decode=2) as cluster:
        tell(cluster, READ)
        first, second = cluster.decode

        async def repeats(call: Any) -> None:
            nonlocal num_asked
            num_asked += 1
            await lets.acquire()
            await engines.second(call)

        first.behave, second.behave = engines.first, repeats
        cluster.proxy.registry.drain(frozenset((second.url,)))
        async with AsyncExitStack() as stack:
            body = {"prompt": "hello", "stream": True}
            streams = [await stack.enter_async_context(cluster.post(body)) for _ in range(3)]
            begun = [await beginning(one, 2) for one in streams]
            cluster.proxy.registry.drain(frozenset((first.url,)))
            for number in (1, 2, 3):
                await kit.until(lambda number=number: num_asked == number, "the next one to stop")
                await asyncio.sleep(0.05)
                assert num_asked == number
                lets.release()
            got = [a + await b.read() for a, b in zip(begun, streams, strict=True)]
        assert [(Told(one).text, Told(one).resumed) for one in got] == [("abcd", [1])] * 3


WHOLE = [(number, "x") for number in range(1, 600)]


def says(engine: int, seconds: float) -> Any:
    """An engine that says a token each so many seconds, after it has repeated what it is told."""

    async def behave(call: Any) -> None:
        told = len(call.body["kv_transfer_params"].get(ANSWER, ()))
        await call.begin_stream()
        if told:
            await call.chunk(event(engine, COMPLETIONS, WHOLE[:told], None))
        for token in WHOLE[told:-1]:
            await asyncio.sleep(seconds)
            await call.chunk(event(engine, COMPLETIONS, [token], None))
        await call.chunk(event(engine, COMPLETIONS, WHOLE[-1:], "stop") + DONE)
        await call.end_stream()

    return behave


@pytest.mark.parametrize("ahead", AHEAD)
async def test_the_policy_of_placement_knows_of_moves(kit: Any, ahead: str) -> None:
    """What was computed for another engine is not counted as unread for ever."""
    async with kit.cluster(num_decode=2, prompt_order="shortest") as cluster:
        tell(cluster, ahead)
        first, second = cluster.decode
        old, new = (one.load for one in cluster.pools[1].engines)
        first.behave, second.behave = says(0, 0.002), says(1, 0.002)
        async with cluster.post({"prompt": "hello", "stream": True}, COMPLETIONS) as response:
            got = await beginning(response, 50)
            cluster.proxy.registry.drain(frozenset((first.url,)))
            await kit.until(lambda: not old.answers, "the first engine to be let go")
            assert len(new.answers) == 1
            got += await response.read()
        assert (Told(got).text, Told(got).resumed) == ("x" * len(WHOLE), [1])
        await cluster.idle()
        assert len(cluster.prefill[0].calls) == (1 if ahead == READ else 2)
        assert [one.load.cache.unread for one in cluster.proxy.registry.engines] == [0, 0, 0]
