"""The examples' scripts run as they are, on CPUs, and leave no process and no network behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import run
from tests.kit.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ARGUMENTS = "--enforce-eager --dtype float32 --max-model-len 1024"
RUN_SECONDS = 700

pytestmark = pytest.mark.long


def run_script(name: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """An example's script with a tiny model; what it started is gone when it ends."""
    model = write_tiny_model(folder / "model")
    logs = folder / "logs"
    logs.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": path, "DEVICE": "cpu", "EXTRA_ARGS": ARGUMENTS, "LOGS": str(logs), **environ}
    command = [EXAMPLES / name / "run.sh", model]
    return run(command, env={**os.environ, **given}, seconds=RUN_SECONDS)


def namespaces() -> set[str]:
    listed = run(["ip", "netns", "list"], check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def processes_with(word: str) -> list[str]:
    """Command lines of the processes that name it."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [line.decode(errors="replace") for line in lines if word.encode() in line]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)
def test_two_namespaces_stand_for_two_hosts(tmp_path: Path) -> None:
    before = namespaces()
    done = run_script("multinode", tmp_path)
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: the answer is the prefill engine's own" in done.stdout
    assert namespaces() == before
    assert processes_with(str(tmp_path)) == []


def test_one_prefill_and_one_decode_engine(tmp_path: Path) -> None:
    ports = {"FIRST_PORT": "18100", "PROXY_PORT": "18000", "SIDE_CHANNEL_PORT": "15600"}
    done = run_script("xpyd", tmp_path, PREFILL_TP="1", DECODE_TP="1", **ports)
    assert done.returncode == 0, done.stdout + done.stderr
    (read,) = (
        line
        for line in done.stdout.splitlines()
        if line.startswith("vllm:commext_nixl_bytes_total")
    )
    assert float(read.split()[-1]) > 0
    assert processes_with(str(tmp_path)) == []
