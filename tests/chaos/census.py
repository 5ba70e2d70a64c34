"""What a server holds: processes, file descriptors, threads, memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

MAX_MORE_DESCRIPTORS = 4
"""HTTP connections come and go.  Peers need no allowance: all have met before the first census, one
that lives keeps its connection, five sockets on either side, and a survivor holds none of a dead
one's once it has read from another peer.  Where a link was cut, they go when UCX has found out."""
SETTLE_SECONDS = 90.0
"""For what goes by itself; what stays longer is held for good."""
MAX_MORE_THREADS = 3
MAX_STEADY_BYTES = 1 << 19
"""From one fault to the next; a buffer of a KV cache or of a transfer is larger, a dead peer costs
3 KiB."""
MIN_SAMPLES = 14
"""With fewer the first batches' allocations are still among the later half: of three steps in 45 s
the middle one was 3.7 MiB, and the next server's 0."""
MAX_MORE_BYTES = 512 << 20
"""In a run of any length: first batches take up to 130 MiB."""


@dataclass(frozen=True)
class Census:
    """Sums over a server's processes: open file descriptors, also by kind, and resident private
    memory without mapped files and shared memory."""

    pids: frozenset[int]
    descriptors: int
    threads: int
    heap_bytes: int
    kinds: Counter[str] = field(default_factory=Counter)


def take_census(pids: Sequence[int]) -> Census:
    """Count what the processes hold now; those that have ended count nothing."""
    threads = heap_bytes = 0
    kinds = Counter[str]()
    for pid in pids:
        try:
            kinds += _kinds(pid)
            fields = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        threads += int(fields["Threads"])
        heap_bytes += int(fields.get("RssAnon", "0 kB").split()[0]) * 1024
    return Census(frozenset(pids), kinds.total(), threads, heap_bytes, kinds)


def _kinds(pid: int) -> Counter[str]:
    found = Counter[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile
        found[target.split(":", 1)[0]] += 1
    return found


def settled(take: Callable[[], Census], before: Census, seconds: float = SETTLE_SECONDS) -> Census:
    """A census in which nothing has grown by more than its tolerance; the last, if none is."""
    deadline = time.monotonic() + seconds
    while growth(before, now := take()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


def growth(before: Census, after: Census) -> list[str]:
    more = after.kinds - before.kinds
    descriptors = f"file descriptors ({', '.join(f'{more[kind]} {kind}' for kind in more)})"
    changes = (
        (descriptors, after.descriptors - before.descriptors, MAX_MORE_DESCRIPTORS),
        ("threads", after.threads - before.threads, MAX_MORE_THREADS),
        ("bytes of memory", after.heap_bytes - before.heap_bytes, MAX_MORE_BYTES),
    )
    found = [
        f"{by} more {what}, expected at most {most}" for what, by, most in changes if by > most
    ]
    missing = before.pids - after.pids
    return [*found, f"processes {sorted(missing)} have ended"] if missing else found


def leak(heap_bytes: Sequence[int]) -> list[str]:
    """Whether memory grows from fault to fault and does not stop, by a sample after each.

    A server's heap grows as it sees new shapes of batches: by tens of MiB, in single steps, fewer
    and fewer. What leaks at every fault adds to every sample. So it is the median of the steps that
    counts, in the later half. Fewer than ``MIN_SAMPLES`` prove nothing."""
    if len(heap_bytes) < MIN_SAMPLES:
        return []
    steps = [after - before for before, after in pairwise(heap_bytes)]
    steady = median(steps[len(steps) // 2 :])
    if steady <= MAX_STEADY_BYTES:
        return []
    return [
        f"{steady / 2**20:.1f} MiB more memory from one fault to the next and no end, expected at "
        f"most {MAX_STEADY_BYTES / 2**20:.1f}; MiB: {[size >> 20 for size in heap_bytes]}"
    ]
