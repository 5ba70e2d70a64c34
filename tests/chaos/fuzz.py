"""Garbage in bulk against the real side channel and a real NIXL agent.

    python -m tests.chaos.fuzz --frames 1000000 --notifications 100000 --seed 1

prints what was sent, what was refused, and what the process holds more than after the first tenth.
Exit status: 0 where nothing has grown, 1 where something has (see ``fuzzing.is_steady``).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from tests.chaos.fuzzing import Growth, fuzz_notifications, fuzz_side_channel, is_steady
from tests.kit.servers import CPU_ENVIRON

SECRET = b"a secret that is shared"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--notifications", type=int, default=100_000)
    args = parser.parse_args()
    os.environ.update({name: CPU_ENVIRON[name] for name in ("UCX_TLS", "UCX_NET_DEVICES")})
    half = args.frames // 2
    runs: dict[str, Callable[[], Growth]] = {
        "side channel": lambda: fuzz_side_channel(args.frames - half, args.seed),
        "side channel with a secret": lambda: fuzz_side_channel(half, args.seed + 1, SECRET),
        "notifications": lambda: fuzz_notifications(args.notifications, args.seed),
    }
    steady = [_report(name, run) for name, run in runs.items()]
    return 0 if all(steady) else 1


def _report(name: str, run: Callable[[], Growth]) -> bool:
    started = time.monotonic()
    growth = run()
    print(
        f"{name}: {growth.num_sent} sent in {time.monotonic() - started:.0f} s, "
        f"{growth.num_refused} refused; {growth.heap_bytes / 2**20:+.1f} MiB, "
        f"{growth.num_blocks:+d} blocks, "
        f"{growth.num_threads:+d} threads, {growth.num_descriptors:+d} file descriptors",
        flush=True,
    )
    return is_steady(growth)


if __name__ == "__main__":
    sys.exit(main())
