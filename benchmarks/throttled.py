"""Runs a command in a network namespace of its own, whose loopback moves no more than so many
megabits a second: a slow network between servers of one machine.  Needs root, ``ip`` and ``tc``.

    python benchmarks/throttled.py --mbit 100 -- python benchmarks/handover.py --out OUT
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

BURST = "256kb"
"""More than the largest packet that loopback hands over in one piece."""
LATENCY = "500ms"


def run(*command: str) -> None:
    """Raises ``CalledProcessError`` where the machine does not permit it."""
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, required=True, help="in each direction")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("expected a command after --")
    name = f"commext-bench-{os.getpid()}"
    inside = ("ip", "netns", "exec", name)
    run("ip", "netns", "add", name)
    try:
        run(*inside, "ip", "link", "set", "lo", "up")
        shaping = ("tbf", "rate", f"{args.mbit}mbit", "burst", BURST, "latency", LATENCY)
        run(*inside, "tc", "qdisc", "replace", "dev", "lo", "root", *shaping)
        environ = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        return subprocess.run([*inside, *command], env=environ, check=False).returncode
    finally:
        run("ip", "netns", "delete", name)


if __name__ == "__main__":
    sys.exit(main())
