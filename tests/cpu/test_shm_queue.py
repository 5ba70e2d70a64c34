"""Our message queue between a real engine and its workers: same tokens, idle when idle, and the
death of a worker ends the server with a line that says which.

COMMEXT_TEST_TP is the tensor-parallel size, 2 unless it is set. COMMEXT_TEST_EXECUTOR is the
executor of the server with our queue, which then goes without the toggle.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vllm_commext.testing import cluster
from vllm_commext.testing.parity import complete
from vllm_commext.testing.prompts import prompt_set
from vllm_commext.testing.servers import Server, VllmServer

TP = int(os.environ.get("COMMEXT_TEST_TP", "2"))
PROMPTS = prompt_set(6, seed=5, block_size=cluster.BLOCK_SIZE)
IDLE_SECONDS = 5.0
END_SECONDS = 60
EXECUTOR = os.environ.get("COMMEXT_TEST_EXECUTOR", "")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One with vLLM's queue, one with ours."""
    folder = tmp_path_factory.mktemp("queue")
    made: dict[str, Server] = {
        kind: VllmServer(
            kind,
            model,
            folder,
            tensor_parallel_size=TP,
            args=[
                *(*cluster.ENGINE_ARGS, "--served-model-name", cluster.MODEL_NAME),
                *("--distributed-executor-backend", executor),
            ],
            environ=environ,
        )
        for kind, executor, environ in (
            ("theirs", "mp", {"VLLM_COMMEXT": "0"}),
            ("ours", EXECUTOR or "mp", {"VLLM_COMMEXT_SHM_QUEUE": "0" if EXECUTOR else "1"}),
        )
    }
    with ExitStack() as stack:
        for server in made.values():
            stack.callback(server.stop)
            server.start()
        for server in made.values():
            server.wait_ready()
        yield made


def tokens(server: Server) -> list[tuple[int, ...]]:
    return [complete(server.url, cluster.MODEL_NAME, prompt).token_ids for prompt in PROMPTS]


def named(server: Server, name: str) -> list[int]:
    """The server's processes that vLLM calls so."""
    command = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in server.pids()}
    return sorted(pid for pid, text in command.items() if name in text)


def cpu_seconds(pids: list[int]) -> float:
    """What all threads of these processes have run so far."""
    nanoseconds = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def test_the_tokens_are_those_of_vllms_queue(servers: dict[str, Server]) -> None:
    assert "commext: shm_queue active" in servers["ours"].log_text()
    assert tokens(servers["ours"]) == tokens(servers["theirs"])


def test_engine_and_workers_do_nothing_when_idle(servers: dict[str, Server]) -> None:
    """From right after an answer: vLLM's readers go on for a second."""
    server = servers["ours"]
    pids = named(server, "VLLM::EngineCore") + named(server, "VLLM::Worker")
    assert len(pids) == 1 + TP
    complete(server.url, cluster.MODEL_NAME, PROMPTS[0])
    before = cpu_seconds(pids)
    time.sleep(IDLE_SECONDS)
    used = cpu_seconds(pids) - before
    print(f"{used / IDLE_SECONDS:.2%} of a core by {len(pids)} processes")  # noqa: T201
    assert used < 0.1 * IDLE_SECONDS


def test_a_workers_death_ends_the_server_with_its_name(servers: dict[str, Server]) -> None:
    server = servers["ours"]
    victim = named(server, "VLLM::Worker")[-1]
    os.kill(victim, signal.SIGKILL)
    line = server.wait_for_log(f"(pid {victim}, dead", seconds=END_SECONDS)
    assert "is shut down; dead: " in line
    deadline = time.monotonic() + END_SECONDS
    while server.running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not server.running()
    assert [name for name in os.listdir("/dev/shm") if f"-{victim}-" in name] == []
