"""The proxy as a process: what it prints, and how it ends."""

import asyncio
import os
import select
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.proxy.config import ProxyConfig

RUN = (
    "import argparse, sys; from vllm_commext.cli import proxy; p = argparse.ArgumentParser(); "
    "proxy.add_arguments(p); sys.exit(proxy.run(p.parse_args()))"
)
BOUND_SECONDS = 60.0


async def _start(*options: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *options, stdout=pipe, stderr=pipe
    )


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), BOUND_SECONDS)).decode().strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def test_sigterm_lets_a_running_stream_end_and_refuses_new_connections(kit: Any) -> None:
    release = asyncio.Event()

    async def held(call: Any) -> None:
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await release.wait()
        await call.chunk(b"data: [DONE]\n\n")
        await call.end_stream()

    import aiohttp

    async with (
        kit.engine(kit.prefill_ok).running() as prefill,
        kit.engine(held).running() as decode,
        aiohttp.ClientSession() as session,
        aiohttp.ClientSession() as connected,
    ):
        process = await _start(
            "--prefill", prefill.url, "--decode", decode.url, "--port", "0"
        )  # fmt: skip
        try:
            assert await _line(process) == f"prefill0 {prefill.url} healthy"
            assert await _line(process) == f"decode0 {decode.url} healthy"
            url = (await _line(process)).removeprefix("listening on ")
            assert url.startswith("http://127.0.0.1:")
            body = {"prompt": "x", "stream": True}
            async with connected.get(url + "/health") as response:
                assert response.status == 200
            async with session.post(url + "/v1/completions", json=body) as response:
                assert await response.content.readany() == b"data: 1\n\n"
                process.send_signal(signal.SIGTERM)
                assert await _line(process) == "stopping: 1 requests in flight"
                await _expect_refused(session, url)
                async with connected.post(url + "/v1/completions", json=body) as refusal:
                    assert refusal.status == 503
                    assert (await refusal.json())["error"]["type"] == "shutdown"
                release.set()
                assert await response.read() == b"data: [DONE]\n\n"
            assert await asyncio.wait_for(process.wait(), BOUND_SECONDS) == 0
        finally:
            await _end(process)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_many_clients_may_come_at_once(kit: Any, workers: str) -> None:
    async with (
        kit.engine(kit.prefill_ok).running() as prefill,
        kit.engine(kit.decode_ok).running() as decode,
    ):
        process = await _start(
            "--prefill", prefill.url, "--decode", decode.url, "--port", "0", "--workers", workers
        )  # fmt: skip
        stopped: list[int] = []
        try:
            for _ in range(2):
                assert (await _line(process)).endswith(" healthy")
            url = (await _line(process)).removeprefix("listening on ").split(" by ")[0]
            stopped = [process.pid, *_children(process.pid)]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)  # so that nobody accepts
            with ExitStack() as stack:
                waiting = [stack.enter_context(socket.socket()) for _ in range(600)]
                for one in waiting:
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1])))
                connected = select.select([], waiting, [], 0.5)[1]
            assert len(connected) == len(waiting)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            await _end(process)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _expect_refused(session: Any, url: str) -> None:
    import aiohttp

    try:
        async with session.get(url + "/health"):
            raise AssertionError("a new connection was accepted after SIGTERM")
    except aiohttp.ClientConnectorError:
        return


async def test_draining_is_bounded_and_aborts_what_is_left(kit: Any) -> None:
    import aiohttp

    async with (
        kit.engine(kit.hanging).running() as prefill,
        kit.engine(kit.decode_ok).running() as decode,
        aiohttp.ClientSession() as session,
    ):
        process = await _start(
            "--prefill", prefill.url, "--decode", decode.url, "--port", "0",
            "--drain-timeout", "0.1",
        )  # fmt: skip
        try:
            lines = [await _line(process) for _ in range(3)]
            url = lines[-1].removeprefix("listening on ")
            request = session.post(url + "/v1/completions", json={"prompt": "x"})
            asking = asyncio.ensure_future(request.__aenter__())
            await kit.until(lambda: bool(prefill.calls), "the prefill step")
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), BOUND_SECONDS) == 0
            await kit.until(lambda: prefill.num_left == 1, "the abort to arrive")
            result = await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(result[0], aiohttp.ClientError)
        finally:
            await _end(process)


async def test_a_taken_port_ends_with_status_1_and_says_what_to_do(kit: Any) -> None:
    async with kit.engine(kit.decode_ok).running() as taken:
        process = await _start(
            "--prefill", "http://127.0.0.1:9", "--decode", taken.url,
            "--port", str(taken.port),
        )  # fmt: skip
        try:
            _, told = await asyncio.wait_for(process.communicate(), BOUND_SECONDS)
            assert process.returncode == 1
            last = told.decode().splitlines()[-1]
            assert last.startswith(
                f"vllm-commext proxy: cannot listen on 127.0.0.1 port {taken.port}"
            )
            assert "choose another --host or --port" in last
        finally:
            await _end(process)


async def test_workers_share_the_port_the_metrics_and_what_the_admin_port_asks(
    kit: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t")
    import aiohttp

    async with (
        kit.engine(kit.prefill_ok).running() as prefill,
        kit.engine(kit.decode_ok).running() as decode,
        kit.engine(kit.decode_ok).running() as added,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        process = await _start(
            "--prefill", prefill.url, "--decode", decode.url, "--port", "0", "--workers", "2",
            "--admin-port", "0", "--admin-token-file", str(tmp_path / "token"),
        )  # fmt: skip
        try:
            admin = (await _line(process)).removeprefix("admin port on ")
            assert await _line(process) == f"prefill0 {prefill.url} healthy"
            assert await _line(process) == f"decode0 {decode.url} healthy"
            url, by = (await _line(process)).removeprefix("listening on ").split(" ", 1)
            assert by == "by 2 workers"

            async def ask(num: int) -> None:
                for _ in range(num):
                    async with session.post(
                        url + "/v1/completions", json={"prompt": "x"}
                    ) as response:
                        assert response.status == 200

            await ask(12)
            wanted = 'requests_total{endpoint="completions",outcome="ok",side="proxy"} 12.0'

            async def counted() -> None:  # by whichever worker answers, when the last has ended
                text = ""
                while wanted not in text:
                    async with session.get(url + "/metrics") as response:
                        text = await response.text()

            await asyncio.wait_for(counted(), BOUND_SECONDS)
            headers = {"Authorization": "Bearer t"}
            body = {"role": "decode", "url": added.url}
            async with session.post(admin + "/engines", json=body, headers=headers) as response:
                assert len((await response.json())["engines"]) == 3
            body = {"url": decode.url, "wait_seconds": 5}
            async with session.post(admin + "/drain", json=body, headers=headers) as response:
                drained = [e for e in (await response.json())["engines"] if e["draining"]]
                assert [(e["url"], e["in_flight"]) for e in drained] == [(decode.url, 0)]
            num_before = len(decode.calls)
            await ask(6)
            assert (len(decode.calls), len(added.calls)) == (num_before, 6)
            process.send_signal(signal.SIGTERM)
            assert await _line(process) == "stopping: 0 requests in flight"
            assert await asyncio.wait_for(process.wait(), BOUND_SECONDS) == 0
        finally:
            await _end(process)


async def test_a_worker_that_dies_is_replaced(kit: Any) -> None:
    import aiohttp

    async with (
        kit.engine(kit.prefill_ok).running() as prefill,
        kit.engine(kit.decode_ok).running() as decode,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        process = await _start(
            "--prefill", prefill.url, "--decode", decode.url, "--port", "0", "--workers", "2"
        )  # fmt: skip
        try:
            lines = [await _line(process) for _ in range(3)]
            url = lines[-1].removeprefix("listening on ").split()[0]
            before = _children(process.pid)
            os.kill(before[0], signal.SIGKILL)
            await kit.until(
                lambda: (
                    len(_children(process.pid)) == 2 and before[0] not in _children(process.pid)
                ),
                "another worker",
            )
            for _ in range(4):
                async with session.post(url + "/v1/completions", json={"prompt": "x"}) as response:
                    assert response.status == 200
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), BOUND_SECONDS)
            await _end(process)
            assert not any(Path(f"/proc/{pid}").exists() for pid in before)


async def test_a_worker_that_cannot_be_started_is_tried_again(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No process is left for it, for a moment."""
    from vllm_commext.proxy import supervisor

    monkeypatch.setattr(supervisor, "RESTART_SECONDS", 0.01)
    start, failures = supervisor.Supervisor._start, [OSError("no process left")] * 3

    async def starting(self: Any) -> Any:
        if failures:
            raise failures.pop()
        return await start(self)

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


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
