"""The demo itself: parity, prefix hits, streaming, concurrency, transferred bytes, and
the negative control, for a dense model and for a hybrid one between two tensor-parallel sizes; and
that nothing is left of it after an interrupt."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.demo import __main__ as demo
from tests.kit.supervisor import descendants

pytestmark = pytest.mark.long
DEMO = [sys.executable, "-m", "tests.kit.demo"]
STOP_SECONDS = 90
PASSES = ("one at a time", "repeated", "8 at once", "changed (control)")


def row_of(output: str, name: str) -> list[str]:
    """Cells of the table's row of a pass, after its name."""
    line = next(line for line in output.splitlines() if line.startswith(f"{name}  "))
    return re.split(r"\s{2,}", line.removeprefix(name).strip())


def run_demo(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*DEMO, *arguments, "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    return done.stdout


def test_all_claims_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, whose servers are forked, and with fewer requests: `make nightly` runs the
    command itself, as it is."""
    held = demo.choose_scenario(demo.parser().parse_args(["--requests", "8"]), tmp_path).run()
    output = capsys.readouterr().out
    assert held, output
    assert "VERDICT: all 8 held" in output
    cells = {name: row_of(output, name) for name in PASSES}
    assert [cells[name][0] for name in PASSES] == ["8", "8", "8", "4"]
    assert [cells[name][-1] for name in PASSES] == ["8/8", "8/8", "8/8", "0/4"]


def test_a_hybrid_model_with_fewer_groups_than_decode_ranks(tmp_path: Path) -> None:
    output = run_demo(
        tmp_path, "--model", "granite1", "--p-tp", "1", "--d-tp", "2", "--requests", "8"
    )
    assert "VERDICT: all 6 held" in output
    names = [name for name in PASSES if name != "repeated"]
    cells = {name: row_of(output, name) for name in names}
    assert [cells[name][0] for name in names] == ["8", "8", "4"]
    assert [cells[name][-1] for name in names] == ["8/8", "8/8", "0/4"]


@pytest.mark.parametrize("prefill_tp", [1, 3])
def test_a_pretrained_model_answers_questions_and_reads_a_long_file(
    tmp_path: Path, prefill_tp: int
) -> None:
    """Three prefill workers, each with one of its KV heads, and one decode worker with all."""
    output = run_demo(tmp_path, "--model", "smollm2", "--p-tp", str(prefill_tp))
    assert "VERDICT: all 3 held" in output
    assert row_of(output, "chat")[-1] == "8/8"
    assert row_of(output, "changed (control)")[-1] == "0/4"
    answers = [line.split(maxsplit=2) for line in output.splitlines() if "  one server  " in line]
    assert len(answers) == 8
    assert "Paris" in answers[0][2]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [*DEMO, "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if "for reference" in line:
            break
    below: list[int] = []
    deadline = time.monotonic() + STOP_SECONDS
    while len(below) < 2 and time.monotonic() < deadline:
        below = descendants(running.pid)
    running.send_signal(signal.SIGINT)
    output = running.communicate(timeout=STOP_SECONDS)[0]
    assert running.returncode == 130, output
    assert len(below) >= 2
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
