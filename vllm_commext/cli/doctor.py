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

from vllm_commext.cli import above_zero
from vllm_commext.cli.report import Check, Level, as_json, as_text, decode, exit_status

KILL_WAIT_SECONDS = 10.0
STDERR_TAIL_CHARACTERS = 300


def _command(probe: str, result: Path) -> list[str]:
    return [sys.executable, "-m", "vllm_commext.cli.checks", probe, str(result)]


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"ended with status {status} and without a result"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the probe with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_WAIT_SECONDS)


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
                found = _how_it_ended(process.wait(timeout_seconds))
            except subprocess.TimeoutExpired:
                _end(process)
                found = f"no answer within {timeout_seconds:g} s"
            except BaseException:
                _end(process)
                raise
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return decode(result.read_bytes())
        tail = " ".join(stderr.read_text(errors="replace").split())[-STDERR_TAIL_CHARACTERS:]
        hint = f"it last said: {tail}" if tail else ""
        return [Check(probe, "probe", found, Level.ERROR, hint)]


HELP = "check the installation and this machine; exit status 0: ok, 1: warnings, 2: errors"
PROBES = ("package", "toggles", "vllm", "nixl", "gpu", "machine")
MAX_PARALLEL = 3
TIMEOUT_SECONDS = 120.0
PROGRESS_SECONDS = 2.0
GONE = (
    "it is gone. To check a link, start both engines, send a request, and look for `self-probe` in "
    "the decode engine's log"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object, no table")
    add("--verbose", action="store_true", help="print every check instead of the headlines")
    add(
        "--timeout",
        type=above_zero(float, "a number of seconds above 0"),
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="bound for each probe (default: %(default)g)",
    )
    for option in ("--peer", "--listen"):
        add(option, type=_refuse, help=argparse.SUPPRESS)


def _refuse(_: str) -> None:
    raise argparse.ArgumentTypeError(GONE)


def _checks(args: argparse.Namespace) -> list[Check]:
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        running = {probe: pool.submit(run_guarded, probe, args.timeout) for probe in PROBES}
        if not args.json:
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
    checks = _checks(args)
    print(as_json(checks) if args.json else as_text(checks, every=args.verbose))
    return exit_status(checks)
