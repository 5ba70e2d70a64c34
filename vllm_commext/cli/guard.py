"""Runs one probe in a process of its own, so that a crash or a hang of it is only one line."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from vllm_commext.cli.report import Check, Level, decode

KILL_WAIT_SECONDS = 10.0
STDERR_TAIL_CHARACTERS = 300


def _command(probe: str, result: Path) -> list[str]:
    return [sys.executable, "-m", "vllm_commext.cli.probes", probe, str(result)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the probe with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_WAIT_SECONDS)


def _failure(probe: str, found: str, stderr: Path) -> Check:
    text = stderr.read_text(errors="replace") if stderr.exists() else ""
    tail = " ".join(text.split())[-STDERR_TAIL_CHARACTERS:]
    return Check(probe, "probe", found, Level.ERROR, f"it last said: {tail}" if tail else "")


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"ended with status {status} and without a result"


def run_guarded(probe: str, timeout_seconds: float) -> list[Check]:
    """What the probe found, or one check that says how it failed; never raises for a failed probe.

    What the probe and its libraries print goes into files, because a pipe can be kept open by
    a process that outlives it.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-commext-doctor-") as folder:
        result, stderr = Path(folder, "result"), Path(folder, "stderr")
        with stderr.open("wb") as sink:
            process = subprocess.Popen(
                _command(probe, result),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return [_failure(probe, f"no answer within {timeout_seconds:g} s", stderr)]
            except BaseException:
                _end(process)
                raise
        try:
            return decode(result.read_bytes())
        except (OSError, msgspec.DecodeError):
            return [_failure(probe, _how_it_ended(status), stderr)]
