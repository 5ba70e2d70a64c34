"""Several workers: signals to the whole group, one that is stuck, a disk without room."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kit.crossed import crossed

RUN = (
    "import argparse, sys; from vllm_commext.cli import proxy; p = argparse.ArgumentParser(); "
    "proxy.add_arguments(p); sys.exit(proxy.run(p.parse_args()))"
)
BOUND_SECONDS = 60.0


class Proxy:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    def workers(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children]

    async def ended(self) -> tuple[int | None, str]:
        """The exit status and what it has written since."""
        out, err = await asyncio.wait_for(self.process.communicate(), BOUND_SECONDS)
        return self.process.returncode, (out + err).decode()


@asynccontextmanager
async def started(
    kit: Any,
    tmp_path: Path,
    *options: str,
    decode: Any = None,
    limits: tuple[int, int] | None = None,
) -> AsyncIterator[Proxy]:
    """A proxy of two workers in a process group of its own."""

    def prepare() -> None:
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    async with (
        kit.engine(kit.prefill_ok).running() as first,
        kit.engine(decode or kit.decode_ok).running() as second,
    ):
        words = ["--prefill", first.url, "--decode", second.url, "--port", "0", *options]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUN, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            preexec_fn=prepare,
        )
        try:
            assert process.stdout is not None
            line = b""
            while not line.startswith(b"listening on "):
                line = await asyncio.wait_for(process.stdout.readline(), BOUND_SECONDS)
                assert line
            yield Proxy(process, line.decode().split()[2])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


@pytest.mark.parametrize(
    ("workers", "number"), crossed(["1", "2"], [signal.SIGTERM, signal.SIGINT])
)
async def test_a_signal_to_the_group_ends_requests_whole(
    kit: Any, tmp_path: Path, number: signal.Signals, workers: str
) -> None:
    import aiohttp

    release = asyncio.Event()

    async with (
        started(kit, tmp_path, "--workers", workers, decode=kit.held_stream(release)) as proxy,
        aiohttp.ClientSession() as session,
    ):
        body = {"prompt": "x", "stream": True}
        asked = [session.post(proxy.url + "/v1/completions", json=body) for _ in range(6)]
        answers = [await one for one in asked]
        for answer in answers:
            assert await answer.content.readany() == b"data: 1\n\n"
        before = set(proxy.workers())
        os.killpg(proxy.process.pid, number)
        await asyncio.sleep(0.5)
        assert set(proxy.workers()) <= before
        release.set()
        assert [await answer.read() for answer in answers] == [b"data: [DONE]\n\n"] * 6
        status, told = await proxy.ended()
        assert (status, len(before)) == (0, 2 * (workers == "2"))
        assert "Traceback" not in told
        assert "anew" not in told
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT]
)
async def test_a_signal_to_the_group_ends_idle_workers(
    kit: Any, tmp_path: Path, number: signal.Signals
) -> None:
    async with started(kit, tmp_path, "--workers", "3") as proxy:
        os.killpg(proxy.process.pid, number)
        status, told = await proxy.ended()
        assert (status, "Traceback" in told, "anew" in told) == (0, False, False)


async def test_a_stopped_worker_is_replaced(kit: Any, tmp_path: Path) -> None:
    async with started(kit, tmp_path, "--workers", "2") as proxy:
        stopped = proxy.workers()[0]
        os.kill(stopped, signal.SIGSTOP)
        await kit.until(
            lambda: stopped not in proxy.workers() and len(proxy.workers()) == 2, "another worker"
        )


async def test_the_folder_goes_with_the_last_worker(kit: Any, tmp_path: Path) -> None:
    async with started(kit, tmp_path, "--workers", "2") as proxy:
        assert len(list(tmp_path.iterdir())) == 1
        proxy.process.kill()
        await kit.until(lambda: not list(tmp_path.iterdir()), "the folder to go")


def test_files_of_metrics_are_on_the_disk_before_they_are_mapped(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from vllm_commext.proxy.metrics import reserve_files

    reserve_files(str(tmp_path), 3)
    for file in tmp_path.iterdir():
        assert file.stat().st_blocks * 512 >= file.stat().st_size > 0
    assert {file.name for file in tmp_path.iterdir()} >= {"counter_3.db", "histogram_3.db"}


async def test_six_hundred_streams_at_the_usual_soft_limit(kit: Any, tmp_path: Path) -> None:
    import aiohttp

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 4096:
        pytest.skip(f"needs a hard limit of 4,096 descriptors, got {hard}")
    release = asyncio.Event()

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        started(kit, tmp_path, decode=kit.held_stream(release), limits=(1024, hard)) as proxy,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def ask() -> bytes:
            body = {"prompt": "x", "stream": True}
            async with session.post(proxy.url + "/v1/completions", json=body) as answer:
                first = await answer.content.readany()
                num_begun[0] += 1
                return first + await answer.read()

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
        async with cluster.session.get(cluster.url + "/live") as response:
            await response.read()
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
        engines = [engine for pool in cluster.proxy.pools for engine in pool.engines]
        assert all(engine.healthy and not engine.suspected for engine in engines)
        assert (await cluster.ask({"prompt": "x"})).status == 200


@pytest.mark.parametrize(
    ("limit", "in_flight", "connections"),
    [(1 << 20, 1024, 4096), (4096, 1024, 1984), (1024, 320, 320), (100, 12, 12), (10, 1, 1)],
)
def test_requests_and_connections_fit_the_descriptors(
    limit: int, in_flight: int, connections: int
) -> None:
    from vllm_commext.proxy.config import ProxyConfig
    from vllm_commext.proxy.process import fitted

    config = fitted(ProxyConfig(prefill=("http://h:1",), decode=("http://h:2",)), limit)
    assert (config.max_in_flight, config.max_connections) == (in_flight, connections)
