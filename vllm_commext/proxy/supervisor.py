"""Several worker processes on one port: started, started anew when one dies or is stuck, and
ended together.

The kernel spreads connections over the workers (SO_REUSEPORT). Each worker has its own view of
the engines' health and load; the supervisor passes on what the admin port asks for. Counters are
shared through prometheus_client's files, so any worker's /metrics tells of all.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.admin import AdminState
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.discovery import ADMIN, Registry, Sources
from vllm_commext.proxy.engines import ROLES, EnginePool
from vllm_commext.proxy.metrics import SHARED_FOLDER as METRICS_FOLDER
from vllm_commext.proxy.metrics import reserve_files
from vllm_commext.proxy.server import admin_port, announce_engine, cannot_listen, on_signal, url_of
from vllm_commext.proxy.worker import MAX_LINE_BYTES, message

logger = logging.getLogger("vllm.commext.proxy")

RESTART_SECONDS = 1.0
START_SECONDS = 60.0
REPORT_SECONDS = 5.0
HEARTBEAT_SECONDS = 1.0
MAX_MISSED = 6
"""Heartbeats in a row that a worker may leave unanswered. They are counted and not timed, so that
a host that stalls, this process too, does not end its workers."""
_END_SECONDS = 5.0
_POLL_SECONDS = 0.02


@dataclass
class _Worker:
    """A process that runs now."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    num_missed: int = 0
    reports: dict[int, asyncio.Future[dict[str, Any]]] = field(
        default_factory=dict[int, "asyncio.Future[dict[str, Any]]"]
    )


class Supervisor:
    """Runs the workers, and is what the admin port acts on."""

    def __init__(self, config: ProxyConfig, log_level: str, metrics_folder: str) -> None:
        self._config = config
        self._log_level = log_level
        self._metrics_folder = metrics_folder
        self._state = AdminState()
        self._workers: dict[int, _Worker] = {}
        self._stopping = False
        self._num_reports = 0
        # What the admin port asks for is checked here, against the command line.
        self._registry = Registry({role: EnginePool(role) for role in ROLES})
        Sources(config, self._registry)

    def apply(self, state: AdminState) -> None:
        """Have every worker do it. Raises `ConfigError`."""
        self._registry.name(ADMIN, sorted(state.places))
        self._state = state
        for worker in self._workers.values():
            worker.writer.write(message(admin=state.as_json()))

    async def engines(self) -> list[dict[str, Any]]:
        """Every engine as the workers see it: load added up, healthy if it is to all."""
        merged: dict[tuple[str, str], dict[str, Any]] = {}
        for report in await self._reports():
            for engine in report["engines"]:
                known = merged.setdefault((engine["role"], engine["url"]), engine)
                if known is not engine:
                    known["in_flight"] += engine["in_flight"]
                    known["tokens"] += engine["tokens"]
                    if known["healthy"] and not engine["healthy"]:
                        known |= {"healthy": False, "detail": engine["detail"]}
        return list(merged.values())

    async def num_in_flight(self) -> int:
        return sum(report["in_flight"] for report in await self._reports())

    async def wait_ready(self) -> None:
        """Wait until all workers serve. Raises `ConfigError` if one does not in time."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while sum(one.ready.is_set() for one in self._workers.values()) < (
                    self._config.workers
                ):
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            number = self._config.workers
            raise ConfigError(
                f"expected {number} workers within {START_SECONDS} s; the log says what ended them"
            ) from error

    async def keep(self, idx: int) -> None:
        """Have a worker run in place *idx*, again and again until `stop`."""
        while not self._stopping:
            try:
                worker = await self._start(idx)
            except OSError as error:  # no memory, process or disk left for one more, now
                logger.warning("worker %d cannot be started: %s", idx, error)
                await asyncio.sleep(RESTART_SECONDS)
                continue
            self._workers[idx] = worker
            watching = asyncio.create_task(self._watch(idx, worker))
            await self._listen_to(worker)
            watching.cancel()
            status = await _ended(worker.process)
            del self._workers[idx]
            if not self._stopping:
                logger.error("worker %d ended with status %d and is started anew", idx, status)
                await asyncio.sleep(RESTART_SECONDS)

    async def stop(self) -> None:
        """Have all workers drain and end; kill what does not."""
        self._stopping = True
        workers = list(self._workers.values())
        for worker in workers:
            worker.writer.write(message(drain=True))
        seconds = self._config.drain_timeout_seconds + _END_SECONDS
        await asyncio.gather(*(_ended(worker.process, seconds) for worker in workers))

    async def _watch(self, idx: int, worker: _Worker) -> None:
        """Kill *worker* when it answers no more."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not worker.ready.is_set():
                continue
            worker.num_missed += 1
            if worker.num_missed > MAX_MISSED:
                logger.error("worker %d has answered no heartbeat of %d", idx, MAX_MISSED)
                worker.process.kill()
                return
            worker.writer.write(message(heartbeat=True))

    async def _start(self, idx: int) -> _Worker:
        reserve_files(self._metrics_folder, idx)
        ours, theirs = socket.socketpair()
        # They end when this process says so: what a signal to the whole group means to them, it
        # tells them. A mask is inherited, so none comes too early.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            with theirs:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "vllm_commext.proxy.worker"),
                        *(str(theirs.fileno()), str(idx)),
                    ],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, METRICS_FOLDER: self._metrics_folder},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        config, admin = asdict(self._config), self._state.as_json()
        writer.write(message(config=config, admin=admin, log_level=self._log_level))
        return _Worker(process, reader, writer)

    async def _listen_to(self, worker: _Worker) -> None:
        # A worker that is killed while it tells something ends in the midst of a line.
        with suppress(ConnectionError):
            while (line := await worker.reader.readline()).endswith(b"\n"):
                told = json.loads(line)
                worker.num_missed = 0
                if "heartbeat" in told:
                    continue
                if "ready" in told:
                    worker.ready.set()
                    # What was asked for while it started.
                    worker.writer.write(message(admin=self._state.as_json()))
                elif (waiting := worker.reports.pop(told["report"], None)) is not None:
                    waiting.set_result(told)
        worker.writer.close()

    async def _reports(self) -> list[dict[str, Any]]:
        """Ask each worker for a report; one that does not answer in time is left out."""
        self._num_reports += 1
        number, loop = self._num_reports, asyncio.get_running_loop()
        asked: list[asyncio.Future[dict[str, Any]]] = []
        for worker in self._workers.values():
            if worker.ready.is_set():
                asked.append(loop.create_future())
                worker.reports[number] = asked[-1]
                worker.writer.write(message(report=number))
        if not asked:
            return []
        done, _ = await asyncio.wait(asked, timeout=REPORT_SECONDS)
        for worker in self._workers.values():
            worker.reports.pop(number, None)
        return [one.result() for one in done]


async def _ended(process: subprocess.Popen[bytes], seconds: float = _END_SECONDS) -> int:
    """The exit status of *process*, which is killed if it has none after that time."""
    end = asyncio.get_running_loop().time() + seconds
    while (status := process.poll()) is None:
        if asyncio.get_running_loop().time() > end:
            process.kill()
        await asyncio.sleep(_POLL_SECONDS)
    return status


async def serve_by_workers(
    config: ProxyConfig, log_level: str, announce: Callable[[str], None]
) -> None:
    """As `server.serve`, by several processes."""
    stopped = on_signal()
    with (
        _reserved(config) as (reserved, url),
        tempfile.TemporaryDirectory(prefix="commext-proxy-metrics-") as folder,
    ):
        supervisor = Supervisor(reserved, log_level, folder)
        keeping = [asyncio.create_task(supervisor.keep(idx)) for idx in range(config.workers)]
        try:
            await supervisor.wait_ready()
            async with admin_port(supervisor, config, announce):
                for engine in await supervisor.engines():
                    announce_engine(engine, announce)
                announce(f"listening on {url} by {config.workers} workers")
                await stopped.wait()
                announce(f"stopping: {await supervisor.num_in_flight()} requests in flight")
        finally:
            await supervisor.stop()
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)


@contextmanager
def _reserved(config: ProxyConfig) -> Iterator[tuple[ProxyConfig, str]]:
    """Reserve the real port while the block runs; yields *config* with it, and the URL."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((config.host, config.port))
        except OSError as error:
            raise cannot_listen(config.host, config.port, "", error) from error
        host, port = held.getsockname()[:2]
        yield replace(config, port=port), url_of(host, port, bool(config.tls_cert_file))
