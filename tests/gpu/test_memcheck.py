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
SCRIPTS = {  # and their checks; the last needs no library's kernels
    "reduce_rms_ranks.py": ("strides",),
    "allreduce_ranks.py": ("every_backend",),
    "shared_gpu_ranks.py": ("all_reduce", "fused", "epilogues"),
}
CASES = [
    *(("memcheck", script) for script in SCRIPTS),
    *((tool, script) for tool in ("racecheck", "synccheck") for script in ("shared_gpu_ranks.py",)),
]

pytestmark = [
    needs_gpus(2),
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
