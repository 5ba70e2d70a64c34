"""What a server holds: processes, file descriptors, threads, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_MORE_DESCRIPTORS = 8
"""HTTP connections come and go.  Dead peers need no allowance: a survivor holds none of their
sockets once it has read from another peer."""
MAX_MORE_THREADS = 3
MAX_MORE_BYTES = 64 << 20
"""What vLLM allocates as it sees batches of new shapes; a dead peer costs 3 KiB."""


@dataclass(frozen=True)
class Census:
    """Sums over a server's processes.

    Attributes:
        pids: the processes.
        descriptors: open file descriptors.
        threads: threads.
        rss_bytes: resident memory.
    """

    pids: frozenset[int]
    descriptors: int
    threads: int
    rss_bytes: int


def take_census(pids: Sequence[int]) -> Census:
    """Count what the processes hold now; those that have ended count nothing."""
    descriptors = threads = rss_bytes = 0
    for pid in pids:
        try:
            descriptors += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            fields = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        threads += int(fields["Threads"])
        rss_bytes += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return Census(frozenset(pids), descriptors, threads, rss_bytes)


def take_own_census() -> Census:
    """Count what this process holds now."""
    return take_census([os.getpid()])


def growth(before: Census, after: Census) -> list[str]:
    """What has grown by more than its tolerance."""
    changes = (
        ("file descriptors", after.descriptors - before.descriptors, MAX_MORE_DESCRIPTORS),
        ("threads", after.threads - before.threads, MAX_MORE_THREADS),
        ("bytes of memory", after.rss_bytes - before.rss_bytes, MAX_MORE_BYTES),
    )
    found = [
        f"{more} more {what}, expected at most {most}"
        for what, more, most in changes
        if more > most
    ]
    missing = before.pids - after.pids
    return [*found, f"processes {sorted(missing)} have ended"] if missing else found
