"""``vllm-commext doctor``: what there is, what this package makes of it, and what is amiss.

Every probe runs in a process of its own with a time-out, so the report is always printed, with
vLLM, torch or NIXL absent, or with one that crashes on import.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from vllm_commext.cli.guard import run_guarded
from vllm_commext.cli.report import Check, as_json, as_text, exit_status

HELP = "Print versions, seams, toggles and hardware; exit 0 (well), 1 (warnings) or 2 (broken)."
PROBES = ("package", "toggles", "vllm", "nixl", "gpu", "machine")
MAX_PARALLEL = 3
TIMEOUT_SECONDS = 120.0


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
        "--timeout",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="bound for each probe (default: %(default)g)",
    )


def _results(timeout_seconds: float) -> Iterator[list[Check]]:
    """Each probe's checks, in the order of `PROBES`, as soon as they are there."""
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        yield from pool.map(lambda probe: run_guarded(probe, timeout_seconds), PROBES)


def run(args: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    checks: list[Check] = []
    for found in _results(args.timeout):
        checks += found
        if not args.json:
            print(as_text(found), flush=True)
    if args.json:
        print(as_json(checks))
    return exit_status(checks)
