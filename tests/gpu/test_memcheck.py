"""compute-sanitizer's memcheck over both of our kernels: no access outside what was allocated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from vllm_commext.testing.gpu_ranks import run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")

NUM_GPUS = torch.cuda.device_count()
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
TIMEOUT_SECONDS = 120
FOUND = 9  # exit status
# Libraries look for functions that an older driver lacks, and are told so; that is no error here.
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all")

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
    watched = [str(SANITIZER), *OPTIONS, "--error-exitcode", str(FOUND)]
    script_path = Path(__file__).with_name(script)
    outcome = run_ranks(script_path, 2, checks, TIMEOUT_SECONDS, watched)
    assert "ERROR SUMMARY: 0 errors" in outcome.text, outcome.text[-3000:]
    assert outcome.codes == [0, 0], outcome.text[-3000:]
