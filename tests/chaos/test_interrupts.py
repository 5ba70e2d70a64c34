"""Ctrl-C and SIGTERM at random moments of `vllm-commext serve` leave nothing behind."""

import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit import stand_in_engine
from tests.kit.ports import free_port

NUM = int(os.environ.get("COMMEXT_INTERRUPTS", "20"))
START_SECONDS, LOAD_SECONDS, END_SECONDS = 3.0, 8.0, 60.0


class Run:
    """One `serve` with two stand-in engines, whose processes carry a mark in their environment."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.dice, self.mark, self.port = dice, f"commext-test-{uuid.uuid4().hex}", free_port()
        package = folder / "path" / "vllm" / "entrypoints" / "cli"
        package.mkdir(parents=True)
        for one in (package, *package.parents[:2]):
            (one / "__init__.py").touch()
        shutil.copy(stand_in_engine.__file__, package / "main.py")
        self.files = Path(tempfile.mkdtemp(dir="/tmp"))
        environ = {**os.environ, "COMMEXT_TEST_MARK": self.mark, "TMPDIR": str(self.files)}
        environ |= {"PYTHONPATH": f"{folder / 'path'}:{Path.cwd()}"}
        command = [sys.executable, "-m", "vllm_commext", "serve", "m", "--engines", "2"]
        self.log = folder / "output"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], env=environ, stdout=output, stderr=output
            )

    @property
    def serves(self) -> bool:
        return "in a browser" in self.log.read_text()

    def marked(self) -> list[int]:
        """Processes of this run, that of `serve` itself among them."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def ask(self) -> None:
        """Stream answers until none come."""
        body = json.dumps({"model": "m", "prompt": "x", "stream": True, "max_tokens": 30})
        with suppress(OSError, http.client.HTTPException):
            while True:
                one = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
                one.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                one.getresponse().read()
                one.close()

    def kill_an_engine(self) -> None:
        for pid in self.dice.sample(marked := self.marked(), len(marked)):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text()
                if "vllm.entrypoints" in line and "--port" in line:
                    (os.killpg if self.dice.random() < 0.5 else os.kill)(pid, signal.SIGKILL)
                    return

    def interrupt(self) -> None:
        number = self.dice.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM))
        self.process.send_signal(number)
        if self.dice.random() < 0.5:
            time.sleep(self.dice.choice((0.0, 0.05, 1.0, 3.0)) * self.dice.random())
            self.process.send_signal(number)

    def left(self) -> list[str]:
        """All that should be gone."""
        found = [f"process {pid}" for pid in self.marked()]
        found += map(str, Path("/dev/shm").glob(f"{self.mark}*"))
        return found + [str(path) for path in self.files.rglob("*")]

    def end(self) -> None:
        for pid in self.marked():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for path in Path("/dev/shm").glob(f"{self.mark}*"):
            path.unlink()
        shutil.rmtree(self.files)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(NUM))
def test_an_interrupt_at_a_random_moment_leaves_nothing(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    moment = ("start", "load", "restart")[seed % 3]
    run = Run(tmp_path, dice)
    try:
        if moment == "start":
            time.sleep(START_SECONDS * dice.random())
        else:
            deadline = time.monotonic() + END_SECONDS
            while not run.serves and time.monotonic() < deadline:
                time.sleep(0.05)
            for _ in range(4):
                threading.Thread(target=run.ask, daemon=True).start()
            time.sleep(dice.random())
            if moment == "restart":
                run.kill_an_engine()
                time.sleep(3.0 * dice.random())
        run.interrupt()
        status = run.process.wait(END_SECONDS)
        asked_too_early = "init_import_site" in run.log.read_text()  # Python itself was starting
        wanted = (0, 130, -signal.SIGINT, -signal.SIGTERM, *([1] if asked_too_early else []))
        assert status in wanted, run.log.read_text()
        assert "Traceback" not in run.log.read_text() or moment == "start"
        assert not run.left(), f"{moment}: {run.log.read_text()}"
    finally:
        run.end()
