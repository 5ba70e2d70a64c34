"""``vllm-commext doctor``: what there is, what this package makes of it, and what is amiss.

Every probe runs in a process of its own with a time-out, so the report is always printed, with
vLLM, torch or NIXL absent, or with one that crashes on import or hangs.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from vllm_commext.cli.report import Check, Level, as_json, as_summary, as_text, decode, exit_status

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
    """Run a probe; a probe that fails becomes one check that says how, and raises nothing.

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


HELP = "check the installation and this machine; exit status 0: ok, 1: warnings, 2: errors"
PROBES = ("package", "toggles", "vllm", "nixl", "gpu", "machine")
MAX_PARALLEL = 3
TIMEOUT_SECONDS = 120.0
PROGRESS_SECONDS = 2.0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``vllm-commext doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument(
        "--verbose", action="store_true", help="print every check instead of the summary"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="bound for each probe (default: %(default)g)",
    )


def _checks(timeout_seconds: float, shows_progress: bool) -> list[Check]:
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        running = {probe: pool.submit(run_guarded, probe, timeout_seconds) for probe in PROBES}
        if shows_progress:
            _tell_progress(running)
        return [check for one in running.values() for check in one.result()]


def _tell_progress(running: dict[str, "Future[list[Check]]"]) -> None:
    """Say on standard error, every `PROGRESS_SECONDS`, which probes are awaited."""
    began = time.monotonic()
    while awaited := wait(running.values(), PROGRESS_SECONDS).not_done:
        left = ", ".join(probe for probe, one in running.items() if one in awaited)
        seconds = time.monotonic() - began
        print(f"checking {left} ... {seconds:.0f} s", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    checks = _checks(args.timeout, shows_progress=not args.json)
    if args.json:
        print(as_json(checks))
    else:
        print(as_text(checks) if args.verbose else as_summary(checks))
    return exit_status(checks)
