"""`vllm-commext bench --shapes` with real engines."""

import re
import sys
from pathlib import Path

import pytest

from tests.kit.processes import run

LOAD = "--rate 2 --seconds 3 --rounds 1 --workload short --scale 0.05 --tpot-ms 9e3 --ttft-ms 9e4"


@pytest.mark.long
def test_each_way_to_use_two_engines_answers_all(model: Path) -> None:
    command = [sys.executable, "-m", "vllm_commext", "bench", "--shapes", str(model)]
    command += ["--engines", "2", *LOAD.split(), "--", "--max-model-len", "256"]
    done = run(command, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| 2 x TP 1, (\w+) \| .* \| 0 of [1-9]\d* \|$", done.stdout, re.MULTILINE)
    assert rows == ["replicas", "roles", "placed"], done.stdout
    assert "both serve all but 0 of" in done.stdout.splitlines()[-1]
