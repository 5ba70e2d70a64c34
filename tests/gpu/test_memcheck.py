"""compute-sanitizer's memcheck over both of our kernels: no access outside what was allocated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_commext.testing.servers import free_port

torch = pytest.importorskip("torch", reason="torch is not installed")

NUM_GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
TIMEOUT_SECONDS = 120
FOUND = 9  # exit status
# Libraries look for functions that an older driver lacks, and are told so; that is no error here.
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all")
ENVIRON = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_HOST_IP": "127.0.0.1",
}

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, this machine has {NUM_GPUS}"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer"),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


@pytest.mark.parametrize(
    ("script", "checks"),
    [
        ("reduce_rms_ranks.py", ("first_call", "strides_and_single", "pieces")),
        ("allreduce_ranks.py", ("every_backend",)),
    ],
)
def test_no_access_is_out_of_bounds(script: str, checks: tuple[str, ...]) -> None:
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": python_path}
    watched = [str(SANITIZER), *OPTIONS, "--error-exitcode", str(FOUND), sys.executable]
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*watched, str(Path(__file__).with_name(script)), str(rank), "2", port, *checks],
            env=environ,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        text = ranks[0].communicate(timeout=TIMEOUT_SECONDS)[0]
        codes = [rank.wait(30) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
    assert "ERROR SUMMARY: 0 errors" in text, text[-3000:]
    assert codes == [0, 0], text[-3000:]
