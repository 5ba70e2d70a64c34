"""vLLM servers, and workers of pytest-xdist, forked from a process that has imported vLLM (see
``fork_server.py``).

    python -m tests.kit.forked COMMAND ...

runs a command below which all share such processes. There xdist starts ``python -m tests.kit.forked
-u -c CODE`` as a worker, which hands its streams over to a fork, and ends with that."""

import fcntl
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.kit import ROOT, fork_server, servers

FOLDER = "COMMEXT_TEST_FORK_SERVERS"
OWNER = "COMMEXT_TEST_OWNER"
SHARED = "COMMEXT_TEST_SHARED"
VLLM = ["-m", "vllm.entrypoints.cli.main"]
# What every process of a server imports before it is ready.
SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.compilation.backends",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.run_batch",
    "vllm.v1.engine.async_llm",
    "vllm.renderers.hf",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.tokenize.api_router",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.lifespan.on",
    "prometheus_fastapi_instrumentator",
    "pydantic.v1",
)
# Variables that are read after the imports, or by shells and make; others, of libraries, as they
# are loaded.
LATE = ("VLLM_COMMEXT", "COMMEXT_", "UCX_", "PYTEST_", "PYTHONPATH")
LATE += ("MAKE", "MFLAGS", "LINES", "COLUMNS", "PWD", "OLDPWD", "SHLVL", "_")
# What the run was given: its imports and tests set more, each worker other variables, so that each
# would need a fork server of its own.
GIVEN = dict(os.environ)
# With several API servers vLLM has prometheus_client share their metrics through files, and that is
# decided when it is imported.
UNFORKED = {"--data-parallel-size", "--api-server-count"}
START_SECONDS = 300.0
POLL_SECONDS = 0.05


class Forked:
    """A forked supervisor: as much of a ``Popen`` as ``Server`` needs."""

    def __init__(self, channel: socket.socket, stdin: IO[bytes]) -> None:
        self.stdin = stdin
        self._channel = channel
        self._status: int | None = None
        self.pid: int = fork_server.receive(channel)[0]["pid"]

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises ``subprocess.TimeoutExpired``."""
        if self._status is None:
            self._channel.settimeout(timeout)
            try:
                message, _ = fork_server.receive(self._channel)
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0) from error
            self._status = 137 if message is None else int(message["status"])
            self._channel.close()
        return self._status


def launch(
    command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
) -> servers.Supervisor:
    """Fork ``vllm`` where the fork server can be what the command would start; else start it."""
    if list(command[1:3]) != VLLM or not UNFORKED.isdisjoint(command):
        return servers.start_program(command, environ, log)
    program = {"module": VLLM[1], "arguments": list(command[3:])}
    outputs = (log.fileno(), log.fileno())
    return start(program, environ, SERVER_MODULES, outputs, python=command[0])


def start(
    program: Mapping[str, Any],
    environ: Mapping[str, str],
    modules: Sequence[str],
    outputs: tuple[int, int],
    late: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Forked:
    """Fork a program with these descriptors as standard output and error.

    The variables in ``late`` are the program's only; those in ``environ`` were also there when the
    modules were imported, by the interpreter ``python``."""
    channel = _connected(python, modules, environ)  # may fail, so nothing is open before it
    reader, writer = os.pipe()
    request = {
        **program,
        "environ": {**environ, **(late or {})},
        "folder": os.getcwd(),
        "grace": servers.GRACE_SECONDS,
        "nice": os.nice(0),
    }
    fork_server.send(channel, request, [reader, *outputs])
    os.close(reader)
    return Forked(channel, os.fdopen(writer, "wb"))


def worker_spec() -> str:
    """xdist's of a worker."""
    forked = f"popen//python={shlex.quote(sys.executable)} -m tests.kit.forked"
    return forked if SHARED in os.environ else "popen"


def _work(code: str) -> None:
    request = {"worker": code, "environ": dict(os.environ), "folder": os.getcwd()}
    with _connected(sys.executable, SERVER_MODULES, os.environ) as channel:
        fork_server.send(channel, {**request, "nice": os.nice(0)}, [0, 1, 2])
        for number in range(2):  # the worker's end is to be seen by who reads them
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        pid = fork_server.receive(channel)[0]["pid"]
        signal.signal(signal.SIGINT, lambda number, frame: os.kill(pid, number))
        fork_server.receive(channel)


def _share(command: Sequence[str]) -> int:
    with fork_servers():
        process = subprocess.Popen(command, env={**os.environ, SHARED: "1"})
        _connected(sys.executable, SERVER_MODULES, os.environ).close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends by it
        return process.wait()


def _connected(python: str, modules: Sequence[str], environ: Mapping[str, str]) -> socket.socket:
    path = _fork_server(python, modules, environ)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(str(path))
    return channel


def _fork_server(python: str, modules: Sequence[str], environ: Mapping[str, str]) -> Path:
    """The socket of the one of this interpreter with these modules and variables, which is started
    first if need be."""
    early = {
        key: value
        for key, value in environ.items()
        if not key.startswith(LATE) and value in (GIVEN.get(key), servers.CPU_ENVIRON.get(key))
    }
    if environ.get("TORCHDYNAMO_DISABLE") == "1":  # torch compiles nothing, whatever vLLM is told
        early["TORCH_COMPILE_DISABLE"] = "1"
    folder = Path(os.environ[FOLDER])
    key = json.dumps([python, list(modules), sorted(early.items())])
    path = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _begin(path, python, modules, early)
    return path


def _begin(path: Path, python: str, modules: Sequence[str], environ: Mapping[str, str]) -> None:
    command = [python, "-m", "tests.kit.fork_server", str(path), os.environ[OWNER]]
    with path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *modules],
            env=environ,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        assert process.poll() is None, path.with_suffix(".log").read_text()
        assert time.monotonic() < deadline, f"imports took longer than {START_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)


@contextmanager
def fork_servers() -> Iterator[None]:
    """Fork servers for this process and those below it, unless one above has them."""
    if FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="commext-fork-") as folder:
        os.environ.update({FOLDER: folder, OWNER: str(os.getpid())})
        yield
        del os.environ[FOLDER], os.environ[OWNER]


@contextmanager
def forking() -> Iterator[None]:
    """Servers are forked; ``COMMEXT_TEST_FORK=0`` starts each from nothing, as a user does."""
    if os.environ.get("COMMEXT_TEST_FORK") == "0":
        yield
        return
    with fork_servers():
        servers.launch = launch
        yield
        servers.launch = servers.start_program


if __name__ == "__main__":
    if SHARED in os.environ:
        _work(sys.argv[-1])
    else:
        sys.exit(_share(sys.argv[1:]))
