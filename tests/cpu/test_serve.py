"""`vllm-commext serve`: two engines on CPUs by one command; one is killed, and all ends clean."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.kit.cluster import BLOCK_SIZE
from tests.kit.parity import complete
from tests.kit.ports import free_port
from tests.kit.processes import stat_of
from tests.kit.supervisor import descendants

READY_SECONDS = 240.0
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
OPTIONS += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "256"]
PROMPT = tuple(range(40, 90))


def wait_until(holds: Callable[[], bool], output: Path, what: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"expected {what}, got {output.read_text()}"
        time.sleep(0.1)


def numbered(pids: Iterable[int]) -> set[tuple[int, str]]:
    """Processes by number and start: numbers come again."""
    return {(one, start) for one in pids if (start := start_of(one))}


def start_of(pid: int) -> str:
    """When it started, in ticks; empty for one that has ended."""
    try:
        state, *others = stat_of(f"/proc/{pid}")
    except OSError:
        return ""
    return "" if state == "Z" else others[18]


def is_vllm(pid: int) -> bool:
    return b"vllm.entrypoints.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_engines_start_serve_come_back_and_leave_nothing(model: Path, tmp_path: Path) -> None:
    output, port = tmp_path / "output", free_port()
    command = [sys.executable, "-m", "vllm_commext", "serve", str(model), "--engines", "2"]
    command += ["--port", str(port), "--logs", str(tmp_path / "logs"), "--", *OPTIONS]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: f"at {url}/v1" in output.read_text(), output, "an address")
        right = complete(url, str(model), PROMPT)
        started = numbered(descendants(process.pid))
        engine = min(pid for pid, _ in started if is_vllm(pid))
        (folder,) = re.findall(rb"VLLM_RPC_BASE_PATH=([^\0]+)", environ_of(engine))
        os.kill(engine, signal.SIGKILL)
        assert complete(url, str(model), PROMPT) == right
        came_back = re.compile("engine0 .* is ready.*engine0 .* is ready", re.DOTALL)
        wait_until(lambda: bool(came_back.search(output.read_text())), output, "it back")
        assert complete(url, str(model), PROMPT) == right
        started |= numbered(descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert not [one for one in started if start_of(one[0]) == one[1]]
    assert not Path(os.fsdecode(folder)).exists()
    assert "ended by SIGKILL" in output.read_text()
