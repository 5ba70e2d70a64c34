"""`vllm-commext demo` itself: parity, prefix hits, streaming, concurrency, transferred bytes, and
the negative control, with TP 1 and 2; and that nothing is left of it after an interrupt."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_commext.testing.guardian import descendants

DEMO = [sys.executable, "-m", "vllm_commext", "demo"]
STOP_SECONDS = 90
PASSES = ("one at a time", "repeated", "8 at once", "damaged (control)")


def row_of(output: str, name: str) -> list[str]:
    """Cells of the table's row of a pass, after its name."""
    line = next(line for line in output.splitlines() if line.startswith(f"{name}  "))
    return re.split(r"\s{2,}", line.removeprefix(name).strip())


@pytest.mark.parametrize("tp", [1, 2])
def test_all_claims_hold(tp: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--tp", str(tp), "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT: all 8 held" in done.stdout
    assert "FAIL" not in done.stdout
    cells = {name: row_of(done.stdout, name) for name in PASSES}
    assert [cells[name][0] for name in PASSES] == ["32", "8", "32", "4"]
    assert [cells[name][-1] for name in PASSES] == ["32/32", "8/8", "32/32", "0/4"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "for reference" in line:
            break
    below: list[int] = []
    deadline = time.monotonic() + STOP_SECONDS
    while len(below) < 2 and time.monotonic() < deadline:
        below = descendants(demo.pid)
    demo.send_signal(signal.SIGINT)
    output = demo.communicate(timeout=STOP_SECONDS)[0]
    assert demo.returncode == 130, output
    assert len(below) >= 2
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
