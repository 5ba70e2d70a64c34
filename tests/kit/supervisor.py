"""Runs one server and leaves nothing of it behind: ``python supervisor.py GRACE_SECONDS COMMAND
...``.

When standard input closes (the asking process ended the server, or died itself) or SIGTERM arrives,
the command gets SIGTERM and, after the grace period, everything it left gets SIGKILL. The
supervisor reaps all its orphaned descendants (Linux ``PR_SET_CHILD_SUBREAPER``), so that its own
end is the proof: vLLM's processes survive their parent otherwise, and hold ports and shared memory.
It needs the standard library alone."""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
LEFTOVER_SECONDS = 3.0
KILL_SECONDS = 20.0
STATUS_OF_LEFTOVERS = 70


class Child(Protocol):
    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        children = _children(pending.pop())
        found += children
        pending += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in listing.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended between the listing and the look
    return found


def prctl(option: int, value: int) -> None:
    """Linux's prctl(2) for this process; raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself meanwhile, which is what the signal was for


def _reap() -> bool:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _wait_for_all(seconds: float) -> bool:
    """Wait until every descendant is gone; False when some outlived ``seconds``."""
    deadline = time.monotonic() + seconds
    while _reap():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _watch(server: Child, asked_to_stop: list[int]) -> None:
    while server.poll() is None and not asked_to_stop:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return


def _end(server: Child, grace_seconds: float) -> bool:
    if server.returncode is None:
        _send(server.pid, signal.SIGTERM)
    if _wait_for_all(grace_seconds if server.returncode is None else LEFTOVER_SECONDS):
        return True
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            _send(pid, signal.SIGKILL)
        if _wait_for_all(POLL_SECONDS):
            return True
    return False


def guard(grace_seconds: float, start: Callable[[], Child]) -> int:
    """Start the server and see to its end; its exit status (128 + N after signal N), or 70 when
    something of it could not be ended."""
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_stop.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = start()
    _watch(server, asked_to_stop)
    status = server.returncode
    if not _end(server, grace_seconds):
        print(
            f"supervisor: left behind after SIGKILL: {descendants(os.getpid())}",
            file=sys.stderr,
            flush=True,
        )
        return STATUS_OF_LEFTOVERS
    if status is None:
        return 0
    return status if status >= 0 else 128 - status


def main() -> int:
    """Guard the command of the arguments."""
    grace_seconds, command = float(sys.argv[1]), sys.argv[2:]
    return guard(
        grace_seconds,
        lambda: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
