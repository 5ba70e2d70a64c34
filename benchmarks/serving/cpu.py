"""CPU time of the processes of servers, by what they are."""

import os
from collections.abc import Mapping
from pathlib import Path

from tests.kit.processes import stat_of
from tests.kit.servers import GLOO_THREAD, Server

API_SERVER, ENGINE, WORKER, PROXY = "API server", "engine", "worker", "proxy"
# torch's own: each process group polls a hundred times a second, whatever uses it.
GLOO = "gloo's threads"
INNER = (ENGINE, WORKER)
_TITLES = {"VLLM::EngineCore": ENGINE, "VLLM::Worker": WORKER}

# Of one thread: (name of the server and of the process, thread id) -> seconds.
Snapshot = Mapping[tuple[str, int], float]


def snapshot(servers: Mapping[str, Server]) -> Snapshot:
    """CPU seconds so far of every thread of these servers, ``servers`` by their role; the
    threads of gloo go by a name of their own."""
    found: dict[tuple[str, int], float] = {}
    for role, server in servers.items():
        for pid in server.pids():
            kind = _kind(role, pid)
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    is_gloo = (task / "comm").read_text().strip() == GLOO_THREAD
                    name = f"{role} {kind}, {GLOO}" if is_gloo else f"{role} {kind}"
                    found[name, int(task.name)] = _seconds(task)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # the thread ended between the listing and the look
    return found


def used(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """CPU seconds between two snapshots, by process; all workers of a server together."""
    spent: dict[str, float] = {}
    for (name, thread), seconds in after.items():
        spent[name] = spent.get(name, 0.0) + seconds - before.get((name, thread), 0.0)
    return spent


def _kind(role: str, pid: int) -> str:
    if role == PROXY:
        return "process"
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        title = ""
    return next((kind for text, kind in _TITLES.items() if title.startswith(text)), API_SERVER)


def _seconds(task: Path) -> float:
    """To the nanosecond where the kernel keeps it, else in ticks of a hundredth of a second."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        fields = stat_of(task)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
