"""The reduce-RMS op on 2 and on 4 GPUs: a process a rank runs every check, a test reports each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.testing.servers import free_port

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

NUM_GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("reduce_rms_ranks.py")
TIMEOUT_SECONDS = 200
CHECKS = (
    *("first_call", "exact", "same_statistics", "special_values", "many_calls", "chained_calls"),
    *("graphs", "pieces", "strides_and_single", "missing_peer", "streams", "create_and_destroy"),
    *("cache", "mismatch", "fallback", "two_groups", "compile"),
)
ENVIRON = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, this machine has {NUM_GPUS}"),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


def _run_ranks(world: int) -> tuple[dict[str, Any], str]:
    """Each check's line, and what the ranks wrote to standard error."""
    environ = {**os.environ, **ENVIRON}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    port = str(free_port())
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(world), port, *CHECKS],
            env=environ,
            stdout=pipe,
            stderr=subprocess.STDOUT if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        text = ranks[0].communicate(timeout=TIMEOUT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        ranks[0].kill()
        text = ranks[0].communicate()[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"check"')]
    return {line["check"]: line for line in lines}, text


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> tuple[dict[str, Any], str]:
    world: int = request.param
    if world > NUM_GPUS:
        pytest.skip(f"needs {world} GPUs, this machine has {NUM_GPUS}")
    return _run_ranks(world)


@pytest.mark.parametrize("check", CHECKS)
def test_check(
    outcomes: tuple[dict[str, Any], str],
    check: str,
    record_property: Callable[[str, object], None],
) -> None:
    lines, text = outcomes
    assert check in lines, f"the ranks ended before this check:\n{text[-3000:]}"
    line = lines[check]
    sys.stdout.write(json.dumps(line) + "\n")
    record_property("figures", line["figures"])
    assert not line["errors"], "\n".join(line["errors"].values())
    if "skipped" in line["figures"]:
        pytest.skip(line["figures"]["skipped"])
