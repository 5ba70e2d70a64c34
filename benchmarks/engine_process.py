"""An engine in a process of its own that answers questions, a line each."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READY, ANSWER = "READY ", "ANSWER "
GRACE_SECONDS = 15.0
SHOWN_CHARACTERS = 6000  # of what an engine wrote, where it does not answer


def say(mark: str, what: object) -> None:
    """In the engine: a line that `EngineProcess` looks for."""
    print(f"\n{mark}{json.dumps(what)}", flush=True)


def run_program(
    parser: argparse.ArgumentParser,
    serve: Callable[[argparse.Namespace], None],
    compare: Callable[[argparse.Namespace], int],
) -> int:
    """A benchmark's ``main``: one engine that answers where it is told of a model, else what starts
    and compares several.

    Args:
        parser: gets ``--tp``, ``--out``, ``--commit``, ``--cpu`` and ``--model``.
        serve: answers the lines of its input.
        compare: returns the exit status.
    """
    parser.add_argument("--tp", type=int, default=2, help="number of GPUs")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--commit", default="", help="what the report is to name")
    parser.add_argument("--cpu", action="store_true", help="a small model on CPUs")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        serve(args)
        return 0
    code = compare(args)
    sys.stdout.flush()
    os._exit(code)


class EngineProcess:
    """A script that serves, in a session of its own; what it writes is read by a thread."""

    def __init__(
        self,
        name: str,
        script: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        self.name = name
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, **environ, "PYTHONPATH": python_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._read = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify()

    def await_line(self, mark: str, end: float) -> Any:
        """What the next line that begins with `mark` says, in JSON.

        Args:
            mark: such as `READY`.
            end: until when to wait, in seconds of `time.monotonic`.

        Raises:
            RuntimeError: the engine has ended, or the time is over; with the end of what it wrote.
        """
        with self._news:
            while time.monotonic() < end:
                while self._read < len(self.lines):
                    self._read += 1
                    if self.lines[self._read - 1].startswith(mark):
                        return json.loads(self.lines[self._read - 1].removeprefix(mark))
                if self._process.poll() is not None:
                    break
                self._news.wait(0.5)
        text = "\n".join(self.lines)[-SHOWN_CHARACTERS:]
        raise RuntimeError(f"{self.name}: expected {mark.strip()} in time, got\n{text}")

    def ask(self, line: object, end: float) -> Any:
        """The engine's answer to a line; raises as `await_line`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.await_line(ANSWER, end)

    def end(self) -> None:
        """The engine and all its workers; nothing that still runs may keep the GPUs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
