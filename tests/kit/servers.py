"""vLLM servers and proxies as child processes: own session, free loopback port, log file, bounded
start and stop. ``start()`` and ``wait_ready()`` let several start at the same time."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol, Self
from urllib.error import URLError
from urllib.request import urlopen

from tests.kit import supervisor
from tests.kit.ports import LOOPBACK, free_port
from vllm_commext.errors import CommextError, CommextTimeoutError

UNVERIFIED = ssl.create_default_context()
UNVERIFIED.check_hostname, UNVERIFIED.verify_mode = False, ssl.CERT_NONE
READY_SECONDS = 300.0
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.1
TAIL_LINES = 40

# What a vLLM server on CPUs needs. One thread a process: two cores carry two servers or more, and
# each server must split its sums in the same way for outputs to be comparable. Even an eager server
# compiles two small functions in its first requests, which takes a C++ compiler and many seconds.
# UCX watches memory that is unmapped, for registrations that TCP does not have; to place its hooks
# each worker spins for a third of a second.
CPU_ENVIRON: dict[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The n-gram search's threads spin as they wait: two engines on two cores took 10.2 s an answer
    # in place of 0.5, without this package too.
    "NUMBA_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": LOOPBACK,
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "UCX_MEM_MMAP_HOOK_MODE": "none",
}

# vLLM 0.33 gives each engine of data parallelism a NUMA node of its own, and has an IndexError
# where there are fewer; with this variable at all it takes those that there are.
ANY_NODE: Mapping[str, str] = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}

# No multicast object, neither ours nor vLLM's: one that is left behind can take a machine's GPUs
# down.
NO_MULTICAST: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
CUDA_ENVIRON: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": LOOPBACK,
    **NO_MULTICAST,
}
EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")
ACTIVE = re.compile(r"commext: (\w+) active")


class Supervisor(Protocol):
    """The part of ``subprocess.Popen`` that is needed. The server ends when ``stdin`` is closed."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start_program(command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> Supervisor:
    """Start the supervisor of a new process."""
    return subprocess.Popen(
        [sys.executable, str(Path(supervisor.__file__)), str(GRACE_SECONDS), *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )


launch = start_program
"""How servers are started; the tests fork theirs from a process that has imported vLLM."""


class ServerEndedError(CommextError, RuntimeError):
    """A server ended before it was ready, or something of it could not be ended."""


class Server:
    """One HTTP server as a child process under a supervisor (see ``supervisor.py``); its log holds
    standard output and error."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path | str,
        *,
        port: int,
        environ: Mapping[str, str | None] | None = None,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://{LOOPBACK}:{port}"
        self.command = list(command)
        self.log_path = Path(folder) / f"{name}.log"
        self.ready_seconds = ready_seconds
        self.environ = {**os.environ}
        for key, value in (environ or {}).items():
            if value is None:
                self.environ.pop(key, None)
            else:
                self.environ[key] = value
        self._supervisor: Supervisor | None = None
        self._started = 0.0

    def start(self) -> None:
        if self._supervisor is not None:
            raise ServerEndedError(f"{self.name}: already started")
        self._started = time.monotonic()
        with self.log_path.open("wb") as log:
            self._supervisor = launch(self.command, self.environ, log)

    def wait_ready(self) -> float:
        """Wait until ``/health`` answers 200; return the seconds since ``start()``.

        Raises ``ServerEndedError`` as soon as the process has ended, ``CommextTimeoutError`` after
        ``ready_seconds``; both carry the end of the log."""
        deadline = self._started + self.ready_seconds
        while not self.healthy():
            if not self.running():
                raise ServerEndedError(
                    f"{self.name}: expected to become ready, but it ended with status "
                    f"{self.exit_status()}; its first errors: {self.first_errors()}; "
                    f"the end of {self.log_path}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise CommextTimeoutError(
                    f"{self.name}: expected 200 from {self.url}/health within "
                    f"{self.ready_seconds:.0f} s; "
                    f"the end of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(POLL_SECONDS)
        return time.monotonic() - self._started

    def healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5, context=UNVERIFIED) as response:
                return response.status == 200
        except (URLError, OSError):
            return False

    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def exit_status(self) -> int | None:
        """Status the process ended with (128 + N after signal N); None while it runs."""
        return None if self._supervisor is None else self._supervisor.poll()

    def pids(self) -> list[int]:
        """Process ids of the server and everything below it, the server's own first."""
        return supervisor.descendants(self._supervisor.pid) if self._supervisor is not None else []

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server, as a fault to be survived by its peers."""
        for pid in self.pids():
            with suppress(ProcessLookupError):  # it has ended meanwhile, perhaps with another
                os.kill(pid, number)

    def stop(self) -> int | None:
        """End the server and prove that nothing of it is left; return its exit status (None: never
        started).

        SIGTERM, ``GRACE_SECONDS``, SIGKILL. Raises ``ServerEndedError`` when something outlives
        that."""
        if self._supervisor is None:
            return None
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
        try:
            status = self._supervisor.wait(GRACE_SECONDS + supervisor.KILL_SECONDS + 10)
        except subprocess.TimeoutExpired as error:
            raise ServerEndedError(f"{self.name}: processes {self.pids()} did not end") from error
        if status == supervisor.STATUS_OF_LEFTOVERS:
            raise ServerEndedError(
                f"{self.name}: not all of its processes ended:\n{self.log_tail()}"
            )
        return status

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def active(self) -> set[str]:
        """The capabilities of ours that are on, by what the log says."""
        return set(ACTIVE.findall(self.log_text()))

    def first_errors(self, num: int = 3) -> list[str]:
        """The exceptions that the log names first: a cause stands far above what follows of it."""
        lines = (line for line in self.log_text().splitlines() if " WARNING " not in line)
        named = (line for line in lines if EXCEPTION.search(line))
        return list(islice(dict.fromkeys(named), num))

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        return "\n".join(self.log_text().splitlines()[-num_lines:])

    def wait_for_log(self, text: str, seconds: float, start: int = 0) -> str:
        """The first line with ``text`` at or after character ``start`` of the log.

        Raises ``CommextTimeoutError`` when it has not come after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.log_text()[start:].splitlines():
                if text in line:
                    return line
            if time.monotonic() > deadline:
                raise CommextTimeoutError(
                    f"{self.name}: expected a log line with {text!r} within {seconds:.0f} s; "
                    f"the end of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(POLL_SECONDS)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class VllmServer(Server):
    """``vllm serve`` with this interpreter.

    ``environ`` is laid over ``base_environ``; a value of None takes a variable away."""

    def __init__(
        self,
        name: str,
        model: Path | str,
        folder: Path | str,
        *,
        port: int | None = None,
        tensor_parallel_size: int = 1,
        kv_transfer_config: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        environ: Mapping[str, str | None] | None = None,
        base_environ: Mapping[str, str | None] = CPU_ENVIRON,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        chosen = free_port() if port is None else port
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", LOOPBACK, "--port", str(chosen)]
        command += ["--tensor-parallel-size", str(tensor_parallel_size)]
        if kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
        base = dict(base_environ)
        if base_environ is CPU_ENVIRON and "--data-parallel-size" in args:
            base |= ANY_NODE
        environ = {**base, **(environ or {})}
        command += args
        super().__init__(name, command, folder, port=chosen, environ=environ)
        self.ready_seconds = ready_seconds
        self.model = str(model)


class ProxyServer(Server):
    """``vllm-commext proxy``. ``values``: those of its configuration that have no option."""

    def __init__(
        self,
        name: str,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        folder: Path | str,
        *,
        port: int | None = None,
        args: Sequence[str] = (),
        values: Mapping[str, float] | None = None,
        environ: Mapping[str, str | None] | None = None,
    ) -> None:
        chosen = free_port() if port is None else port
        program = ["-m", "vllm_commext", "proxy"]
        if values:
            tuned = [f"{one}={value:g}" for one, value in values.items()]
            program = [str(Path(__file__).with_name("tuned_proxy.py")), *tuned, "--"]
        command = [sys.executable, *program, "--host", LOOPBACK, "--port", str(chosen)]
        for option, urls in (("--prefill", prefill_urls), ("--decode", decode_urls)):
            for url in urls:
                command += [option, url]
        command += args
        super().__init__(name, command, folder, port=chosen, environ=environ, ready_seconds=60.0)
        self.url = f"https://{LOOPBACK}:{chosen}" if "--tls-cert-file" in args else self.url
