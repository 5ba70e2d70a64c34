"""Engines that come, go and change their roles behind a proxy under constant load."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from tests.chaos.judge import is_right
from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, complete, tls
from tests.kit.processes import run
from tests.kit.servers import LOOPBACK, ProxyServer, Server, free_port
from vllm_commext.drain import MIDDLEWARE, VARIABLE

# vLLM's own bound on what an engine has under way when it is told to end, leases among it.
SHUTDOWN_SECONDS = "240"
MIDDLEWARE_ARGS = ("--middleware", MIDDLEWARE)
DRAIN_ARGS = (*MIDDLEWARE_ARGS, "--shutdown-timeout", SHUTDOWN_SECONDS)
PROXY_ARGS = (*cluster.PATIENT_PROXY_ARGS, "--health-interval", "0.3")
BOUND_SECONDS = 300.0
HELD = "vllm:commext_nixl_held_requests"
POLL_SECONDS = 0.05
NUM_CLIENTS = 3


def drain_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.drain"


def drain_environ(folder: Path, name: str) -> dict[str, str]:
    return {VARIABLE: str(drain_file(folder, name))}


@dataclass
class Load:
    """Clients, each with one request at a time: ``ask`` sends the request of a number, and returns
    what is wrong with its answer or ""; ``bound_seconds`` is for answers under way at the end."""

    ask: Callable[[int], str]
    pause_seconds: float = 0.0
    bound_seconds: float = BOUND_SECONDS
    num_right: int = 0
    problems: list[str] = field(default_factory=list[str])
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    @classmethod
    def of_known(cls, url: str, known: Sequence[Completion], pause_seconds: float = 0.0) -> Load:
        """Ask a proxy for answers that are known."""
        return cls(partial(_ask_known, url, known), pause_seconds)

    def __enter__(self) -> Load:
        for number in range(NUM_CLIENTS):
            self._threads.append(threading.Thread(target=self._client, args=(number,), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self.bound_seconds)
        assert not any(thread.is_alive() for thread in self._threads)

    def go_on(self, num_requests: int) -> None:
        """Wait for as many more right answers; not for ever, and not after a problem."""
        wanted, deadline = self.num_right + num_requests, time.monotonic() + BOUND_SECONDS
        while self.num_right < wanted and not self.problems:
            assert time.monotonic() < deadline, f"{self.num_right} of {wanted} right answers"
            time.sleep(POLL_SECONDS)

    def _client(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                problem = self.ask(number)
            except Exception as error:  # noqa: BLE001 whatever a client sees instead of its answer
                problem = repr(error)
            number += NUM_CLIENTS
            with self._lock:
                self.num_right += not problem
                if problem:
                    self.problems.append(problem)
            self._stop.wait(self.pause_seconds)


def _ask_known(url: str, known: Sequence[Completion], number: int) -> str:
    dice = random.Random(number)
    right, stream = dice.choice(known), dice.random() < 0.5
    tokens = len(right.token_ids)
    got = complete(url, cluster.MODEL_NAME, right.prompt, max_tokens=tokens, stream=stream)
    if is_right(right, got):
        return ""
    return f"wrong: expected {right.token_ids}, got {got.token_ids}"


class Routing:
    """A proxy that reads its engines and their roles from a file."""

    def __init__(
        self,
        folder: Path,
        engines: Mapping[str, Server],
        proxy_args: Sequence[str] = (),
        values: Mapping[str, float] | None = None,
    ) -> None:
        self._engines = engines
        self._file = folder / "engines.json"
        self.roles: dict[str, str] = {}
        args = [*PROXY_ARGS, *proxy_args, "--engines-file", str(self._file)]
        self.proxy = ProxyServer("fleet", [], [], folder, args=args, values=values)

    def assign(self, **roles: str) -> None:
        self.roles = roles
        named = {
            role: [self._engines[name].url for name, has in roles.items() if has == role]
            for role in ("prefill", "decode")
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(named))
        new.rename(self._file)


class AdminPort:
    """The admin port of a proxy that is started with ``args``."""

    def __init__(self, folder: Path) -> None:
        port, token = free_port(), secrets.token_hex(16)
        file = folder / "admin.token"
        file.write_text(token)
        self.args = ("--admin-port", str(port), "--admin-token-file", str(file))
        self._url = f"http://{LOOPBACK}:{port}"
        self._headers = {"Authorization": f"Bearer {token}"}

    def drain(self, url: str, look: Callable[[], object] = lambda: None) -> None:
        """No more work for an engine, and what it has ends: its requests, and what it holds for
        decode engines, as its metrics page says after a *look*."""
        self._ask("drain", url, wait_seconds=BOUND_SECONDS)
        deadline = time.monotonic() + BOUND_SECONDS
        while scrape(url).total(HELD):
            assert time.monotonic() < deadline, f"{url} goes on to hold requests"
            time.sleep(POLL_SECONDS)
            look()

    def begin_drain(self, url: str) -> None:
        self._ask("drain", url)

    def undrain(self, url: str) -> None:
        self._ask("undrain", url)

    def in_flight(self) -> dict[str, int]:
        """Requests under way at each engine, by its URL."""
        answer = httpx.get(f"{self._url}/engines", headers=self._headers, timeout=60, verify=tls())
        return {one["url"]: one["in_flight"] for one in answer.json()["engines"]}

    def _ask(self, what: str, url: str, **more: float) -> None:
        answer = httpx.post(
            f"{self._url}/{what}",
            json={"url": url, **more},
            headers=self._headers,
            timeout=BOUND_SECONDS + 60,
            verify=tls(),
        )
        answer.raise_for_status()


def drain(server: Server, file: Path, seconds: float = BOUND_SECONDS) -> str:
    command = [sys.executable, "-m", "vllm_commext", "drain", "--quiet", "1"]
    command += ["--file", str(file), "--url", server.url, "--wait", f"{seconds:g}"]
    done = run(command, seconds=seconds + 60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def terminate(server: Server) -> None:
    """Tell the server's own process to end, as Kubernetes does, and no other one."""
    os.kill(server.pids()[0], signal.SIGTERM)


def wait_for_end(server: Server) -> int | None:
    deadline = time.monotonic() + BOUND_SECONDS
    while server.running():
        assert time.monotonic() < deadline, f"{server.name} goes on:\n{server.log_tail()}"
        time.sleep(POLL_SECONDS)
    return server.exit_status()
