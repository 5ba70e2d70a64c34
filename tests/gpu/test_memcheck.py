"""compute-sanitizer over our kernels: no access outside what was allocated, no two threads of a
block at the same shared word without a barrier between them, no barrier that some threads miss."""

import os
import shutil
from pathlib import Path

import pytest

from tests.kit.gpu_checks import needs_gpus
from tests.kit.gpu_ranks import run_ranks

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
TIMEOUT_SECONDS = 240
FOUND = 9  # exit status
# Libraries look for functions that an older driver lacks, and are told so; that is no error here.
OPTIONS = ("--report-api-errors", "no", "--target-processes", "all")
SUMMARIES = {  # of a run in which nothing was found
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}
SHARED = "shared_gpu_ranks.py"
SCRIPTS = {  # and their checks; the last needs no library's kernels, and runs on one GPU
    "reduce_rms_ranks.py": ("strides",),
    "allreduce_ranks.py": ("every_backend",),
    SHARED: ("all_reduce", "fused", "epilogues"),
}
CASES = [
    *(pytest.param("memcheck", one, marks=needs_gpus(1 + (one != SHARED))) for one in SCRIPTS),
    *(pytest.param(tool, SHARED, marks=needs_gpus(1)) for tool in ("racecheck", "synccheck")),
]

pytestmark = [
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer"),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


@pytest.mark.parametrize(("tool", "script"), CASES)
def test_the_sanitizer_finds_nothing(tool: str, script: str) -> None:
    watched = [str(SANITIZER), "--tool", tool, *OPTIONS, "--error-exitcode", str(FOUND)]
    script_path = Path(__file__).with_name(script)
    outcome = run_ranks(script_path, 2, SCRIPTS[script], TIMEOUT_SECONDS, watched)
    assert SUMMARIES[tool] in outcome.text, outcome.text[-3000:]
    assert outcome.codes == [0, 0], outcome.text[-3000:]
