"""What processes have used, and what their threads are called."""

from collections.abc import Iterable
from pathlib import Path


def cpu_seconds(pids: Iterable[int | str]) -> float:
    nanoseconds = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9
