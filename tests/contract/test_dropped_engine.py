"""An engine that is dropped without `shutdown()`, as vLLM's own tests do, holds up no collection
and no end of its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import dropped_part
from tests.contract.vllm_process import python_at_once
from tests.kit import ROOT

pytestmark = pytest.mark.timeout(600)
COLLECTION_SECONDS = 5.0


def check(returncode: int, stdout: str, stderr: str) -> None:
    assert returncode == 0, stderr
    assert float(stdout.splitlines()[-1]) < COLLECTION_SECONDS


def test_no_part_holds_up_a_collection(folder: Path) -> None:
    code = Path(dropped_part.__file__).read_text()
    all_args = [(part, str(folder)) for part in dropped_part.PARTS]
    for done in python_at_once(code, all_args):
        check(done.returncode, done.stdout, f"{done.args}: {done.stderr}")


@pytest.mark.long
@pytest.mark.parametrize("part", dropped_part.PARTS)
def test_an_interpreter_ends_after_it(folder: Path, part: str) -> None:
    command = [sys.executable, "-m", dropped_part.__name__, part, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    check(done.returncode, done.stdout, done.stderr)
