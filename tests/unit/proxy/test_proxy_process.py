"""The proxy as a process: what it prints, and how it ends."""

import asyncio
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from vllm_commext.proxy.config import ProxyConfig

RUN = (
    "import argparse, sys; from vllm_commext.cli import proxy; p = argparse.ArgumentParser(); "
    "proxy.add_arguments(p); sys.exit(proxy.run(p.parse_args()))"
)
BOUND_SECONDS = 60.0


class Proxy:
    def __init__(self, process: asyncio.subprocess.Process, prefill: Any, decode: Any) -> None:
        self.process, self.prefill, self.decode = process, prefill, decode
        self.url = ""

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), BOUND_SECONDS)).decode()[:-1]

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), BOUND_SECONDS)

    async def is_up(self) -> None:
        assert await self.line() == f"prefill0 {self.prefill.url} healthy"
        assert await self.line() == f"decode0 {self.decode.url} healthy"
        self.url = (await self.line()).removeprefix("listening on ")


@asynccontextmanager
async def started(
    kit: Any,
    *options: str,
    prefill: Any = None,
    decode: Any = None,
    limits: tuple[int, int] | None = None,
) -> AsyncIterator[Proxy]:
    """The proxy before engines that behave so, or well; it is not up yet. limits: of descriptors,
    soft and hard."""

    def prepare() -> None:
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    async with (
        kit.engine(prefill or kit.prefill_ok).running() as first,
        kit.engine(decode or kit.decode_ok).running() as second,
    ):
        words = ["--prefill", first.url, "--decode", second.url, "--port", "0", *options]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, *words, stdout=pipe, stderr=pipe, preexec_fn=prepare
        )
        try:
            yield Proxy(process, first, second)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def test_sigterm_lets_a_running_stream_end_and_refuses_new_connections(kit: Any) -> None:
    import aiohttp

    release = asyncio.Event()

    async with (
        started(kit, decode=kit.held_stream(release)) as proxy,
        aiohttp.ClientSession() as session,
        aiohttp.ClientSession() as connected,
    ):
        await proxy.is_up()
        assert proxy.url.startswith("http://127.0.0.1:")
        asked, body = proxy.url + "/v1/completions", {"prompt": "x", "stream": True}
        async with connected.get(proxy.url + "/health") as response:
            assert response.status == 200
        async with session.post(asked, json=body) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.line() == "stopping: 1 requests in flight"
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(proxy.url + "/health")
            async with connected.post(asked, json=body) as refusal:
                assert refusal.status == 503
                assert (await refusal.json())["error"]["type"] == "shutdown"
            release.set()
            assert await response.read() == b"data: [DONE]\n\n"
        assert await proxy.ended() == 0


async def test_many_clients_may_come_at_once(kit: Any) -> None:
    async with started(kit) as proxy:
        await proxy.is_up()
        proxy.process.send_signal(signal.SIGSTOP)  # it accepts none
        try:
            with ExitStack() as stack:
                waiting = [stack.enter_context(socket.socket()) for _ in range(600)]
                for one in waiting:
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1])))
                connected = select.select([], waiting, [], 0.5)[1]
            assert len(connected) == len(waiting)
        finally:
            proxy.process.kill()


async def test_draining_is_bounded_and_aborts_what_is_left(kit: Any) -> None:
    import aiohttp

    async with (
        started(kit, "--drain-timeout", "0.1", prefill=kit.hanging) as proxy,
        aiohttp.ClientSession() as session,
    ):
        await proxy.is_up()
        request = session.post(proxy.url + "/v1/completions", json={"prompt": "x"})
        asking = asyncio.ensure_future(request.__aenter__())
        await kit.until(lambda: bool(proxy.prefill.calls), "the prefill step")
        proxy.process.send_signal(signal.SIGINT)
        assert await proxy.ended() == 0
        await kit.until(lambda: proxy.prefill.num_left == 1, "the abort to arrive")
        result = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(result[0], aiohttp.ClientError)


async def test_a_taken_port_ends_with_status_2_and_says_what_to_do(kit: Any) -> None:
    async with (
        kit.engine(kit.decode_ok).running() as taken,
        started(kit, "--port", str(taken.port)) as proxy,
    ):
        _, told = await asyncio.wait_for(proxy.process.communicate(), BOUND_SECONDS)
        assert proxy.process.returncode == 2
        last = told.decode().splitlines()[-1]
        assert last.startswith(f"vllm-commext proxy: cannot listen on 127.0.0.1 port {taken.port}")
        assert "choose another --host or --port" in last


async def test_two_proxies_share_a_port(kit: Any) -> None:
    import aiohttp

    async with (
        started(kit, "--reuse-port") as first,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        await first.is_up()
        port = first.url.rsplit(":", 1)[1]
        async with started(kit, "--reuse-port", "--port", port) as second:
            await second.is_up()
            first.process.terminate()
            assert await first.ended() == 0
            async with session.post(first.url + "/v1/completions", json={"prompt": "x"}) as answer:
                assert answer.status == 200
            assert len(second.decode.calls) == 1


async def test_six_hundred_streams_at_the_usual_soft_limit(kit: Any) -> None:
    import aiohttp

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 4096:
        pytest.skip(f"needs a hard limit of 4,096 descriptors, got {hard}")
    release = asyncio.Event()

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        started(kit, decode=kit.held_stream(release), limits=(1024, hard)) as proxy,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def ask() -> bytes:
            body = {"prompt": "x", "stream": True}
            async with session.post(proxy.url + "/v1/completions", json=body) as answer:
                first = await answer.content.readany()
                num_begun[0] += 1
                return first + await answer.read()

        await proxy.is_up()
        num_begun = [0]
        asking = [asyncio.ensure_future(ask()) for _ in range(600)]
        await kit.until(lambda: num_begun[0] == 600, "600 streams")
        release.set()
        assert set(await asyncio.gather(*asking)) == {b"data: 1\n\ndata: [DONE]\n\n"}


async def test_a_lack_of_descriptors_is_nobodys_fault_but_the_proxys(kit: Any) -> None:
    # No connection to an engine is at hand.
    options = {"keep_alive_seconds": 0.001, "health_interval_seconds": 60.0}
    async with kit.cluster(**options) as cluster:
        await asyncio.sleep(0.2)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        await cluster.get("/live")
        filling: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
            with suppress(OSError):
                while True:
                    filling.append(os.dup(0))
            async with cluster.post({"prompt": "x"}) as response:
                status, told = response.status, await response.json()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in filling:
                os.close(descriptor)
        assert (status, told["error"]["type"], told["error"]["side"]) == (
            503,
            "overloaded",
            "proxy",
        )
        engines = [engine for pool in cluster.pools for engine in pool.engines]
        assert all(engine.state.healthy and not engine.state.suspected for engine in engines)
        assert (await cluster.ask({"prompt": "x"})).status == 200


@pytest.mark.parametrize(
    ("limit", "in_flight", "connections"),
    [(1 << 20, 1024, 4096), (4096, 1024, 1984), (1024, 320, 320), (100, 12, 12), (10, 1, 1)],
)
def test_requests_and_connections_fit_the_descriptors(
    limit: int, in_flight: int, connections: int
) -> None:
    from vllm_commext.proxy.process import fitted

    config = fitted(ProxyConfig(prefill=("http://h:1",), decode=("http://h:2",)), limit)
    assert (config.max_in_flight, config.max_connections) == (in_flight, connections)
