"""Two real processes over gloo: they choose alike, and what fails on one fails on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.allreduce.ranks import CHECKS, WORLD

SCRIPT = Path(__file__).with_name("ranks.py")
ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 200
pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS + 40)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    store = tmp_path_factory.mktemp("store") / "store"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store)],
            env={**environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(store.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        texts = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
    assert [process.returncode for process in processes] == [0] * WORLD, texts
    lines = [[json.loads(line) for line in out.splitlines()] for out, _ in texts]
    return [{line["check"]: line["error"] for line in of_rank} for of_rank in lines]


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(found: list[dict[str, str]], check: str) -> None:
    assert [rank[check] for rank in found] == [""] * WORLD
