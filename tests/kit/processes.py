"""The output of programs; the state of processes, and what they have used, from /proc."""

import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def run(
    command: Sequence[str | Path], *, seconds: float | None = 60.0, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. *check*: raise where it fails."""
    more |= {"capture_output": True, "text": True, "timeout": seconds}
    return subprocess.run(command, check=check, **more)


def stat_of(folder: Path | str) -> list[str]:
    """Fields of a process's or thread's ``stat`` behind its name, which may hold blanks: the letter
    of the state comes first."""
    return (Path(folder) / "stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pids: Iterable[int | str]) -> float:
    nanoseconds = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9
