"""``vllm-commext doctor``: what there is, what this package makes of it, and what is amiss.

Every probe runs in a process of its own with a time-out, so the report is always printed, with
vLLM, torch or NIXL absent, or with one that crashes on import.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

from vllm_commext.cli.guard import run_guarded
from vllm_commext.cli.report import Check, as_json, as_text, exit_status
from vllm_commext.cli.summary import as_summary

HELP = "Say whether all is well here, what is amiss, and what could be switched on; exit 0, 1 or 2."
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
        "--verbose", action="store_true", help="print every check instead of the summary"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="bound for each probe (default: %(default)g)",
    )


def _checks(timeout_seconds: float) -> list[Check]:
    """All probes' checks, in the order of `PROBES`."""
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        found = pool.map(lambda probe: run_guarded(probe, timeout_seconds), PROBES)
        return [check for one in found for check in one]


def run(args: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    checks = _checks(args.timeout)
    if args.json:
        print(as_json(checks))
    else:
        print(as_text(checks) if args.verbose else as_summary(checks))
    return exit_status(checks)
