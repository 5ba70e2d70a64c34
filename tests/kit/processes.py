"""The state of processes, and what they have used, from /proc."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


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
