"""Engines that come, go, drain and change their role while requests run."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines.discovery import EngineEndpoint, Registry, Sources, read_places
from vllm_commext.proxy.engines.engine import EnginePool

BODY = {"prompt": "hello", "max_tokens": 20}
QUICK = {"health_interval_seconds": 0.05}
TOKEN = "secret-token"
P1 = EngineEndpoint("prefill", "http://p:1")
D1, D2 = EngineEndpoint("decode", "http://d:1"), EngineEndpoint("decode", "http://d:2")


def registry() -> tuple[Registry, dict[str, EnginePool]]:
    pools = {role: EnginePool(role) for role in ("prefill", "decode")}
    return Registry(pools), pools


def test_the_engines_are_the_union_of_all_sources() -> None:
    one, pools = registry()
    one.name("file", [P1, D1])
    one.name("DNS", [D1, D2])
    assert {engine.url for engine in one.engines} == {P1.url, D1.url, D2.url}
    one.name("file", [P1])
    assert [engine.url for engine in pools["decode"].engines] == [D1.url, D2.url]
    one.name("DNS", [])
    assert pools["decode"].engines == ()


def test_streams_leave_an_engine_that_drains_though_nobody_names_it_any_more() -> None:
    """As Kubernetes ends a pod: its address goes first, its `preStop` drains it then."""
    one, pools = registry()
    one.name("DNS", [D1, D2])
    engine = pools["decode"].engines[0]
    told: list[str] = []
    engine.work.on_drain.add(lambda: told.append(engine.url))
    with engine.work.counted(10):
        one.name("DNS", [D2])
        assert (engine.state.leaving, told) == (True, [])
        engine.note_drain()
        assert (engine.state.is_emptied, told) == (True, [D1.url])


def test_an_engine_that_is_named_again_while_it_leaves_stays() -> None:
    one, pools = registry()
    one.name("file", [D1])
    (engine,) = pools["decode"].engines
    engine.state.pass_check()
    with engine.work.counted(10):
        one.name("file", [])
        one.name("file", [D1])
    one.sweep()
    assert pools["decode"].engines == (engine,)
    assert engine.usable


def test_a_role_changes_while_the_old_ones_requests_run() -> None:
    one, pools = registry()
    one.name("admin", [EngineEndpoint("prefill", D1.url)])
    (old,) = pools["prefill"].engines
    with old.work.counted(1):
        one.name("admin", [D1])
        assert (old.state.leaving, pools["decode"].engines[0].url) == (True, D1.url)
    one.sweep()
    assert pools["prefill"].engines == ()


def test_two_roles_at_once_are_refused_and_change_nothing() -> None:
    one, _ = registry()
    one.name("file", [D1])
    with pytest.raises(ConfigError, match="give each engine one role"):
        one.name("admin", [EngineEndpoint("prefill", D1.url)])
    assert [engine.role for engine in one.engines] == ["decode"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected {"),
        ("[]", r"got \[\]"),
        ('{"decoder": []}', "decoder"),
        ('{"decode": "http://d:1"}', "for decode"),
        ('{"decode": ["d:1"]}', "expected http://HOST:PORT"),
    ],
)
def test_a_file_that_names_no_engines_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engines.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_places(path)


def write(path: Path, **engines: list[Any]) -> None:
    urls = {role: [engine.url for engine in servers] for role, servers in engines.items()}
    path.with_suffix(".new").write_text(json.dumps(urls))
    path.with_suffix(".new").rename(path)


async def test_a_watched_file_adds_and_removes_engines_and_a_broken_one_changes_nothing(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.json"
    async with (
        kit.engine(kit.prefill_ok).running() as prefill,
        kit.engine(kit.decode_ok).running() as first,
        kit.engine(kit.decode_ok).running() as second,
    ):
        write(path, prefill=[prefill], decode=[first])
        options = {**QUICK, "engines_file": str(path)}
        async with kit.cluster(num_prefill=0, num_decode=0, **options) as cluster:
            pool = cluster.pools[1]
            assert await cluster.answered(BODY) == (200, "prefill0", "decode0")
            write(path, prefill=[prefill], decode=[second])
            await kit.until(lambda: [e.url for e in pool.engines] == [second.url], "the change")
            await kit.until(lambda: pool.num_usable == 1, "its first check")
            path.write_text("{")
            await kit.until(
                lambda: "could not refresh engines from file" in caplog.text, "the complaint"
            )
            assert (await cluster.answered(BODY))[0] == 200
            assert (len(first.calls), len(second.calls)) == (1, 1)


async def test_no_engines_cookie_goes_to_it_with_anybodys_requests(kit: Any) -> None:
    async def behave(call: Any) -> None:
        await call.answer(200, b'{"choices": [{"text": ""}]}', headers="Set-Cookie: a=b\r\n")

    async with kit.engine(behave).running() as named:
        url = f"http://localhost:{named.port}"  # aiohttp keeps none of a number's
        async with kit.cluster(num_decode=0, decode=(url,)) as cluster:
            await cluster.ask(BODY)
            await cluster.ask(BODY)
        assert ["cookie" in call.headers for call in named.calls] == [False, False]


async def test_a_name_stands_for_an_engine_at_each_of_its_addresses(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["127.0.0.1"]
    async with (
        kit.engine(kit.prefill_ok).running() as prefill,
        kit.engine(kit.decode_ok).running() as decode,
    ):
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(host: Any, port: Any, **options: Any) -> Any:
            if not str(host).endswith(".test"):
                return await real(host, port, **options)
            if host == "scaled-to-none.test" or not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            return [(2, 1, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        options = {
            **QUICK, "prefill": (prefill.url, "dns+http://scaled-to-none.test:1"),
            "decode": (f"dns+http://engines.test:{decode.port}",),
        }  # fmt: skip
        async with kit.cluster(num_prefill=0, num_decode=0, **options) as cluster:
            pool = cluster.pools[1]
            assert await cluster.answered(BODY) == (200, "prefill0", "decode0")
            addresses[:] = ["127.0.0.1", "127.0.0.2"]
            await kit.until(lambda: len(pool.engines) == 2, "the second address")
            assert pool.engines[1].url == f"http://127.0.0.2:{decode.port}"
            addresses.clear()
            await asyncio.sleep(0.2)
            assert len(pool.engines) == 2, "a name server that fails takes no engine away"
            addresses[:] = ["127.0.0.1"]
            await kit.until(lambda: len(pool.engines) == 1, "the second address to go")


async def test_a_watch_of_names_ends_though_it_is_told_so_as_a_name_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()

    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        loop.call_soon(watching.cancel)
        return [(2, 1, 6, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    config = ProxyConfig((P1.url,), ("dns+http://engines.test:1",), health_interval_seconds=0.01)
    watching = asyncio.create_task(Sources(config, registry()[0]).watch())
    ended, _ = await asyncio.wait([watching], timeout=5)
    assert ended


async def test_checks_end_though_they_are_told_so_as_an_engine_is_suspected(kit: Any) -> None:
    import aiohttp

    from vllm_commext.proxy.engines.health_and_metrics import HealthMonitor

    async with kit.engine(kit.decode_ok).running() as server, aiohttp.ClientSession() as session:
        pool = EnginePool("decode")
        pool.add(server.url)
        monitor = HealthMonitor(session, ProxyConfig((P1.url,), (server.url,)))
        async with monitor.running(pool.engines):
            await asyncio.sleep(0)  # until it waits
        [engine] = pool.engines
        for num_turns in range(4):
            others = asyncio.all_tasks()
            monitor.watch(engine)
            [watch] = asyncio.all_tasks() - others
            await asyncio.sleep(0)  # until it waits
            engine.state.suspect()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            monitor.forget(engine)
            ended, _ = await asyncio.wait([watch], timeout=5)
            assert ended, num_turns


class Admin:
    """Requests to the admin port of a cluster's proxy."""

    def __init__(self, cluster: Any, url: str) -> None:
        self._session, self._url = cluster.session, url

    async def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        request = self._session.request(method, self._url + path, json=body, headers=headers)
        async with request as response:
            return response.status, await response.json()


async def admin_of(tmp_path: Path, cluster: Any) -> Admin:
    from vllm_commext.proxy.routes_readiness_shutdown import admin_port

    (tmp_path / "token").write_text(TOKEN + "\n")
    options = {"admin_port": 0, "admin_token_file": str(tmp_path / "token")}
    lines: list[str] = []
    config = ProxyConfig(prefill=(), decode=(), **options)
    await cluster.stack.enter_async_context(admin_port(cluster.proxy, config, lines.append))
    return Admin(cluster, lines[0].removeprefix("admin port on "))


async def test_the_admin_port_adds_drains_and_removes_engines_and_nothing_is_lost(
    kit: Any, tmp_path: Path
) -> None:
    release = asyncio.Event()
    async with kit.engine(kit.held(release)).running() as added, kit.cluster(**QUICK) as cluster:
        admin = await admin_of(tmp_path, cluster)
        pool, first = cluster.pools[1], cluster.decode[0]
        status, told = await admin.ask(
            "POST", "/engines", {"role": "decode", "url": added.url + "/"}
        )
        assert (status, told["engines"][-1]["url"]) == (200, added.url)
        await kit.until(lambda: pool.num_usable == 2, "the new engine's first check")
        assert (await admin.ask("POST", "/drain", {"url": first.url}))[0] == 200
        running = asyncio.ensure_future(cluster.answered(BODY))
        await kit.until(lambda: bool(added.calls), "a request at the new engine")
        assert (await admin.ask("POST", "/undrain", {"url": first.url}))[0] == 200
        assert (await admin.ask("DELETE", "/engines", {"url": added.url}))[0] == 200
        assert await cluster.answered(BODY) == (200, "prefill0", "decode0")
        assert len(pool.engines) == 2, "it still has work"
        series = 'engine_requests_in_flight{engine="decode1",role="decode"}'
        assert f"{series} 1.0" in await cluster.metrics()
        release.set()
        assert await running == (200, "prefill0", "decode1")
        await kit.until(lambda: len(pool.engines) == 1, "the engine to go")
        assert series not in await cluster.metrics()


async def test_draining_can_be_waited_for(kit: Any, tmp_path: Path) -> None:
    release = asyncio.Event()
    async with kit.cluster(**QUICK) as cluster:
        admin = await admin_of(tmp_path, cluster)
        cluster.decode[0].behave = kit.held(release)
        running = asyncio.ensure_future(cluster.answered(BODY))
        await kit.until(lambda: bool(cluster.decode[0].calls), "the request")
        wanted = {"url": cluster.decode[0].url, "wait_seconds": 0}
        _, told = await admin.ask("POST", "/drain", wanted)
        assert [e["in_flight"] for e in told["engines"] if e["role"] == "decode"] == [1]
        waiting = asyncio.ensure_future(admin.ask("POST", "/drain", {**wanted, "wait_seconds": 30}))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        release.set()
        _, told = await waiting
        assert [e["in_flight"] for e in told["engines"] if e["role"] == "decode"] == [0]
        assert await running == (200, "prefill0", "decode0")


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", "/engines", {"role": "decode"}, "expected a JSON object with the strings"),
        ("POST", "/engines", {"role": "x", "url": "http://h:1"}, "role: expected one of"),
        ("POST", "/engines", {"role": "decode", "url": "file:///"}, "expected http://HOST:PORT"),
        ("DELETE", "/engines", {"url": "http://h:1"}, "was not added here"),
        ("POST", "/drain", {"url": "http://h:1"}, "is none of the engines"),
        ("POST", "/drain", {"url": "http://h:1", "wait_seconds": -1}, "wait_seconds: expected"),
        ("POST", "/engines", {"url": "http://h:1", "more": "w" * 100_000}, "Too Large"),
    ],
)
async def test_what_the_admin_port_cannot_do_it_refuses(
    kit: Any, tmp_path: Path, method: str, path: str, body: Any, message: str
) -> None:
    async with kit.cluster() as cluster:
        admin = await admin_of(tmp_path, cluster)
        status, told = await admin.ask(method, path, body)
        assert status == (413 if message == "Too Large" else 400)
        assert message in (said := told["error"]["message"])
        assert "none of this proxy's routes" not in said
        assert (await admin.ask(method, path, body, token="wrong"))[0] == 401
        assert (await admin.ask("GET", "/engines"))[0] == 200
        assert (await cluster.get("/engines")).status == 404, "it is not on the clients' port"
