"""Reads through mappings of other processes' GPU memory: every byte, and what happens when they
cannot be made or a prefill worker dies."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.gpu_checks import needs_gpus

SCRIPT = Path(__file__).with_name("mapped_reader.py")
TIMEOUT_SECONDS = 150
CHECKS = ("equal", "split", "tiny", "odd", "busy", "reopened", "refused", "captured", "killed")

pytestmark = [
    needs_gpus(1),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


@pytest.fixture(scope="module")
def lines() -> tuple[dict[str, Any], str]:
    path = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *CHECKS],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        text = process.communicate()[0]
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"check"')]
    return {line["check"]: line for line in found}, text


@pytest.mark.parametrize("check", CHECKS)
def test_check(
    lines: tuple[dict[str, Any], str], check: str, record_property: Callable[[str, object], None]
) -> None:
    found, text = lines
    assert check in found, f"it ended before this check:\n{text[-3000:]}"
    sys.stdout.write(json.dumps(found[check]) + "\n")
    record_property("figures", found[check]["figures"])
    assert not found[check]["errors"], "\n".join(found[check]["errors"].values())
