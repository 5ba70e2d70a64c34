"""The proxy as a process: what it prints, and how it ends."""

import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.proxy.config import ProxyConfig

RUN = (
    "import argparse, sys; from vllm_commext.cli import proxy; p = argparse.ArgumentParser(); "
    "proxy.add_arguments(p); sys.exit(proxy.run(p.parse_args()))"
)
BOUND_SECONDS = 60.0


class Proxy:
    """One process before two engines."""

    def __init__(self, process: asyncio.subprocess.Process, prefill: Any, decode: Any) -> None:
        self.process, self.prefill, self.decode = process, prefill, decode
        self.url = ""

    async def line(self) -> str:
        """The next one that it prints."""
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), BOUND_SECONDS)).decode()[:-1]

    async def ended(self) -> int:
        """Its exit status, once it has one."""
        return await asyncio.wait_for(self.process.wait(), BOUND_SECONDS)

    async def is_up(self) -> str:
        """Read until it listens; what it says of its workers."""
        assert await self.line() == f"prefill0 {self.prefill.url} healthy"
        assert await self.line() == f"decode0 {self.decode.url} healthy"
        self.url, _, workers = (await self.line()).removeprefix("listening on ").partition(" ")
        return workers


@asynccontextmanager
async def started(
    kit: Any, *options: str, prefill: Any = None, decode: Any = None
) -> AsyncIterator[Proxy]:
    """The proxy before engines that behave so, or well; it is not up yet."""
    async with (
        kit.engine(prefill or kit.prefill_ok).running() as first,
        kit.engine(decode or kit.decode_ok).running() as second,
    ):
        words = ["--prefill", first.url, "--decode", second.url, "--port", "0", *options]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, *words, stdout=pipe, stderr=pipe
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


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_many_clients_may_come_at_once(kit: Any, workers: str) -> None:
    async with started(kit, "--workers", workers) as proxy:
        stopped: list[int] = []
        try:
            await proxy.is_up()
            stopped = [proxy.process.pid, *_children(proxy.process.pid)]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)  # so that nobody accepts
            with ExitStack() as stack:
                waiting = [stack.enter_context(socket.socket()) for _ in range(600)]
                for one in waiting:
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1])))
                connected = select.select([], waiting, [], 0.5)[1]
            assert len(connected) == len(waiting)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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


async def test_a_taken_port_ends_with_status_1_and_says_what_to_do(kit: Any) -> None:
    async with (
        kit.engine(kit.decode_ok).running() as taken,
        started(kit, "--port", str(taken.port)) as proxy,
    ):
        _, told = await asyncio.wait_for(proxy.process.communicate(), BOUND_SECONDS)
        assert proxy.process.returncode == 1
        last = told.decode().splitlines()[-1]
        assert last.startswith(f"vllm-commext proxy: cannot listen on 127.0.0.1 port {taken.port}")
        assert "choose another --host or --port" in last


async def test_workers_share_the_port_the_metrics_and_what_the_admin_port_asks(
    kit: Any, tmp_path: Path
) -> None:
    import aiohttp

    (tmp_path / "token").write_text("t")
    options = ["--workers", "2", "--admin-port", "0", "--admin-token-file", str(tmp_path / "token")]
    async with (
        started(kit, *options) as proxy,
        kit.engine(kit.decode_ok).running() as added,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        admin = (await proxy.line()).removeprefix("admin port on ")
        assert await proxy.is_up() == "by 2 workers"
        await _ask(session, proxy, 12)
        wanted = 'requests_total{endpoint="completions",outcome="ok",side="proxy"} 12.0'

        async def counted() -> None:  # by whichever worker answers, when the last has ended
            text = ""
            while wanted not in text:
                async with session.get(proxy.url + "/metrics") as response:
                    text = await response.text()

        async def told(path: str, body: Any) -> Any:
            headers = {"Authorization": "Bearer t"}
            async with session.post(admin + path, json=body, headers=headers) as response:
                return (await response.json())["engines"]

        await asyncio.wait_for(counted(), BOUND_SECONDS)
        assert len(await told("/engines", {"role": "decode", "url": added.url})) == 3
        engines = await told("/drain", {"url": proxy.decode.url, "wait_seconds": 5})
        drained = [(e["url"], e["in_flight"]) for e in engines if e["draining"]]
        assert drained == [(proxy.decode.url, 0)]
        num_before = len(proxy.decode.calls)
        await _ask(session, proxy, 6)
        assert (len(proxy.decode.calls), len(added.calls)) == (num_before, 6)
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.line() == "stopping: 0 requests in flight"
        assert await proxy.ended() == 0


async def _ask(session: Any, proxy: Proxy, num: int) -> None:
    for _ in range(num):
        async with session.post(proxy.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 200


async def test_a_worker_that_dies_is_replaced(kit: Any) -> None:
    import aiohttp

    async with (
        started(kit, "--workers", "2") as proxy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        await proxy.is_up()
        before = _children(proxy.process.pid)

        def is_replaced() -> bool:
            now = _children(proxy.process.pid)
            return len(now) == 2 and before[0] not in now

        os.kill(before[0], signal.SIGKILL)
        await kit.until(is_replaced, "another worker")
        await _ask(session, proxy, 4)
        proxy.process.terminate()
        await proxy.ended()
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)


async def test_a_worker_that_cannot_be_started_is_tried_again(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No process is left for it, for a moment."""
    from vllm_commext.proxy import supervisor

    monkeypatch.setattr(supervisor, "RESTART_SECONDS", 0.01)
    start, failures = supervisor.Supervisor._start, [OSError("no process left")] * 3

    async def starting(self: Any, idx: int) -> Any:
        if failures:
            raise failures.pop()
        return await start(self, idx)

    config = ProxyConfig(("http://127.0.0.1:1",), ("http://127.0.0.1:2",), port=0)
    one = supervisor.Supervisor(config, "WARNING", str(tmp_path))
    monkeypatch.setattr(supervisor.Supervisor, "_start", starting)
    keeping = asyncio.create_task(one.keep(0))
    try:
        await one.wait_ready()
    finally:
        await one.stop()
        await asyncio.wait([keeping], timeout=BOUND_SECONDS)
    assert keeping.done()
    keeping.result()
    assert caplog.text.count("no process left") == 3


@pytest.mark.parametrize("told", [b'{"report": 1, "engi', b""])
async def test_a_worker_that_dies_in_the_midst_of_a_line_is_one_that_dies(
    kit: Any, told: bytes
) -> None:
    from vllm_commext.proxy.supervisor import Supervisor, _Worker
    from vllm_commext.proxy.worker import message

    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    config = ProxyConfig(("http://127.0.0.1:1",), ("http://127.0.0.1:2",))
    theirs.sendall(message(report=7) + told)
    theirs.close()
    worker = _Worker(None, reader, writer)  # type: ignore[arg-type]
    answer = worker.reports[7] = asyncio.get_running_loop().create_future()
    await Supervisor(config, "WARNING", "")._listen_to(worker)
    assert answer.result() == {"report": 7}
