"""Our message queue between a real engine and its workers, which sum through shared memory: same
tokens, idle when idle, the same between prefill and decode engines, and the death of a worker ends
the server with a line that says which. Both servers have our connector. The one with vLLM's queue
has its peers read and write a copy of its cache in host memory, although NIXL reaches the cache
itself here.

COMMEXT_TEST_TP is the tensor-parallel size, 2 unless it is set. COMMEXT_TEST_EXECUTOR is the
executor of the server with our queue, which then goes without the toggle."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import compare, complete
from tests.kit.processes import cpu_seconds
from tests.kit.prompts import equal_prompts
from tests.kit.servers import ACTIVE, Server

TP = int(os.environ.get("COMMEXT_TEST_TP", "2"))
NUM_PROMPTS, PROMPT_TOKENS = 4, 130
PROMPTS = equal_prompts(NUM_PROMPTS, PROMPT_TOKENS, seed=5)
IDLE_SECONDS = 5.0
# NIXL's progress thread is not what is measured.
END_SECONDS = 60
NO_RINGS = "cpu_collectives: not for group tp:0: vLLM's own shared memory serves it"
EXECUTOR = os.environ.get("COMMEXT_TEST_EXECUTOR", "")


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One with vLLM's queue, one with ours."""
    folder = tmp_path_factory.mktemp("queue")
    made: dict[str, Server] = {
        kind: cluster.engine_server(
            kind,
            model,
            folder,
            cluster.kv_transfer_config("kv_both", extra={"host_copy": kind == "theirs"}),
            tensor_parallel_size=TP,
            # Two steps a prompt, both to be copied: the last token by itself, as it is where the
            # others have been read.
            args=[
                *("--max-num-batched-tokens", str(PROMPT_TOKENS - 1)),
                *("--no-enable-prefix-caching", "--distributed-executor-backend", executor),
            ],
            environ={
                "VLLM_COMMEXT_SHM_QUEUE": toggle,
                "VLLM_COMMEXT_CPU_COLLECTIVES": "1" if kind == "ours" else "0",
            },
        )
        for kind, executor, toggle in (
            ("theirs", "mp", "0"),
            ("ours", EXECUTOR or "mp", "0" if EXECUTOR else "1"),
        )
    }
    with cluster.all_ready(made.values()):
        yield made


def test_what_is_on_is_said_once_a_server(servers: dict[str, Server]) -> None:
    for server in servers.values():
        said = ACTIVE.findall(server.log_text())
        assert "nixl" in said
        assert len(said) == len(server.active())


def tokens(server: Server) -> list[tuple[int, ...]]:
    return [complete(server.url, cluster.MODEL_NAME, prompt).token_ids for prompt in PROMPTS]


def named(server: Server, name: str) -> list[int]:
    """The server's processes that vLLM calls so."""
    command = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in server.pids()}
    return sorted(pid for pid, text in command.items() if name in text)


def test_the_tokens_are_those_of_vllms_queue(servers: dict[str, Server]) -> None:
    log = servers["ours"].log_text()
    has_rings = TP > 1 and not torch.cpu._is_avx512_supported()  # vLLM has its own there
    assert [cluster.COLLECTIVES in log, NO_RINGS in log] == [has_rings, TP > 1 and not has_rings]
    ours = servers["ours"]
    assert len(cluster.queue_segments(ours)) == cluster.num_queues(ours, TP)
    assert cluster.queue_segments(servers["theirs"]) == set()
    assert tokens(servers["ours"]) == tokens(servers["theirs"])


@pytest.mark.parametrize(
    "kinds", [("theirs", "ours"), pytest.param(("ours", "theirs"), marks=pytest.mark.long)]
)
def test_answers_after_a_transfer_are_the_engines_own(
    servers: dict[str, Server], kinds: tuple[str, str]
) -> None:
    source, target = (servers[kind].url for kind in kinds)
    before = scrape(target)
    for prompt in PROMPTS:
        got = cluster.disaggregated(source, target, cluster.MODEL_NAME, prompt)
        assert compare(complete(target, cluster.MODEL_NAME, prompt), got).equal
    moved = scrape(target).minus(before)
    assert moved.total("vllm:commext_nixl_transfer_seconds_count") >= NUM_PROMPTS
    assert moved.total("vllm:commext_nixl_failures_total") == 0


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
