"""What is forked from a process that has imported vLLM is a program of its own."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forked, supervisor

MODULES = ("msgspec",)
ENVIRON = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
TELL = """
import json, os, sys
print(json.dumps([sys.argv, dict(os.environ), os.getppid(), os.getsid(0) == os.getpid()]))
sys.exit(3)
"""
# Says what a spawned process sees and is, as vLLM's engine and worker processes are spawned.
SPAWN = """
import multiprocessing, os, sys, time
os.environ["SET_BY"] = "the parent"
context = multiprocessing.get_context("spawn")
queue = context.Queue()
child = context.Process(target=os._exit, args=(7,))
child.start()
child.join()
seen = context.Process(target=queue.put, args=((1, 2),))
seen.start()
asked = context.Process(target=os.getppid)
asked.start()
asked.join()
print(child.exitcode, queue.get(timeout=240), asked.exitcode, flush=True)
waiting = context.Process(target=time.sleep, args=(600,))
waiting.start()
print(open(f"/proc/{waiting.pid}/stat").read().rsplit(")", 1)[1].split()[1] == str(os.getpid()))
print(waiting.pid, flush=True)
time.sleep(600)
"""


def run(code: str, folder: Path, *arguments: str, **environ: str) -> tuple[Any, Path]:
    output = folder / "output"
    with output.open("wb") as file:
        program = {"code": code, "arguments": arguments}
        made = forked.start(
            program, {**ENVIRON, **environ}, MODULES, (file.fileno(), file.fileno())
        )
    return made, output


def test_arguments_environment_session_and_status_are_its_own(tmp_path: Path) -> None:
    made, output = run(TELL, tmp_path, "--one", "two", VLLM_COMMEXT_SEEN="yes")
    assert made.wait(240) == 3
    argv, environ, parent, leads = json.loads(output.read_text())
    assert argv == ["-c", "--one", "two"]
    assert environ == {**ENVIRON, "VLLM_COMMEXT_SEEN": "yes"}
    assert parent == made.pid
    assert leads
    made, output = run(TELL, tmp_path)
    made.wait(240)
    assert "VLLM_COMMEXT_SEEN" not in json.loads(output.read_text())[1]


def test_it_spawns_children_of_its_own_and_nothing_is_left_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.kit.servers.GRACE_SECONDS", 1.0)
    made, output = run(SPAWN, tmp_path)
    deadline = time.monotonic() + 240
    while len(lines := output.read_text().splitlines()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lines[:2] == ["7 (1, 2) 0", "True"]
    pid = int(lines[2])
    assert pid in supervisor.descendants(made.pid)
    assert made.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        made.wait(0.1)
    made.stdin.close()
    made.wait(240)
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_supervisor_reads_as_killed(tmp_path: Path) -> None:
    made, _ = run("import time; time.sleep(600)", tmp_path)
    os.kill(made.pid, signal.SIGKILL)
    assert made.wait(240) == 128 + signal.SIGKILL
