"""One engine whose two workers are on two hosts: network namespaces, each with its own /dev/shm.

The executor of the first host writes to a queue that the second one's worker reads over the
network, and reads that worker's answers so: by vLLM's queue, to which ours leaves it. And with the
collectives on, which leave such a group to vLLM.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.network import Link
from tests.kit import cluster
from tests.kit.parity import complete
from tests.kit.ports import free_port
from tests.kit.prompts import prompt_set
from tests.kit.servers import CPU_ENVIRON, Server, VllmServer

pytestmark = pytest.mark.long
PROMPTS = prompt_set(4, seed=5, block_size=cluster.BLOCK_SIZE)
END_SECONDS = 90
TOGGLE = "VLLM_COMMEXT_SHM_QUEUE"
LEFT = "commext: shm_queue: left to vLLM's own: a queue has readers on other hosts"
OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"'


ALL_ON = {  # as far as a machine without GPUs lets them be asked for
    TOGGLE: "1",
    "VLLM_COMMEXT_CPU_COLLECTIVES": "1",
    "VLLM_COMMEXT_ALLREDUCE": "auto",
    "VLLM_COMMEXT_REDUCE_RMS": "auto",
}
WITHOUT = {"VLLM_PLUGINS": "none"}
STOOD_ASIDE = "commext: cpu_collectives: not for group tp:0: its ranks are on several hosts"


@contextmanager
def engine(
    link: Link, name: str, toggles: Mapping[str, str], model: Path, folder: Path
) -> Iterator[tuple[Server, Server]]:
    """A server of two hosts, ready: the one that answers, and the other."""
    port = str(free_port())
    common = [*cluster.ENGINE_ARGS, "--served-model-name", cluster.MODEL_NAME]
    common += ["--distributed-executor-backend", "mp", "--nnodes", "2"]
    common += ["--master-addr", link.near_address, "--master-port", port]
    places = {0: (link.near_address, link.near), 1: (link.far_address, link.far)}
    environ = [
        {**toggles, "VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": device}
        for address, device in places.values()
    ]
    first = VllmServer(
        f"first_{name}",
        model,
        folder,
        tensor_parallel_size=2,
        args=[*common, "--node-rank", "0"],
        environ=environ[0],
    )
    command = [*link.enter(), "unshare", "--mount", "sh", "-c", OWN_SHM, sys.executable]
    command += ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--headless"]
    command += ["--tensor-parallel-size", "2", *common, "--node-rank", "1"]
    second = Server(
        f"second_{name}", command, folder, port=0, environ={**CPU_ENVIRON, **environ[1]}
    )
    second.start()
    try:
        with first:
            yield first, second
    finally:
        second.stop()


def tokens_of(server: Server) -> list[tuple[int, ...]]:
    return [complete(server.url, cluster.MODEL_NAME, prompt).token_ids for prompt in PROMPTS]


def test_two_hosts_are_left_to_vllm_and_the_tokens_are_the_same(
    link: Link, model: Path, tmp_path: Path
) -> None:
    """With everything on the server starts, says once what stands aside, and answers as without."""
    with engine(link, "on", ALL_ON, model, tmp_path) as (first, second):
        found = tokens_of(first)
        logs = first.log_text(), second.log_text()
    assert ["shm_queue active" in log for log in logs] == [True, True]
    assert LEFT in logs[0]
    assert "".join(logs).count(STOOD_ASIDE) == 1
    assert "ring buffers serve" not in "".join(logs)
    with engine(link, "without", WITHOUT, model, tmp_path) as (first, second):
        assert tokens_of(first) == found
        assert "commext:" not in first.log_text() + second.log_text()


def test_the_death_of_the_other_host_ends_the_server(
    link: Link, model: Path, tmp_path: Path
) -> None:
    with engine(link, "1", {TOGGLE: "1"}, model, tmp_path) as (first, second):
        complete(first.url, cluster.MODEL_NAME, PROMPTS[0])
        for pid in second.pids()[::-1]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the client says
            complete(first.url, cluster.MODEL_NAME, PROMPTS[1])
        deadline = time.monotonic() + END_SECONDS
        while first.running() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not first.running()  # Gloo or the queue finds it first
