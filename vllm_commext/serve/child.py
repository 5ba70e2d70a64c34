"""A process that belongs to this one: with a session and a log file, and nothing of it stays."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from vllm_commext.serve.plan import Command

STAGES = (
    ("starts", re.compile(r"non-default args|Initializing a V1 LLM engine")),
    ("loads weights", re.compile(r"Starting to load model|Loading (safetensors|pt) checkpoint")),
    ("compiles", re.compile(r"torch\.compile takes|Compiling|Dynamo bytecode|Warming up model")),
    ("sizes its KV cache", re.compile(r"Available KV cache memory|GPU KV cache size|# GPU blocks")),
    ("captures CUDA graphs", re.compile(r"Capturing CUDA graph|Graph capturing")),
    ("opens its API", re.compile(r"Starting vLLM (API )?server|Application startup complete")),
)
"""Stages of a start with the first lines of each, in their order."""
_ERROR = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (\S.*)")
_REFUSED = re.compile(r"\berror: (\S.*)")
_CONSEQUENCES = ("initialization failed", "See root cause above", "EngineCore encountered")
MOST_CAUSE = 400
_SHARED = "/dev/shm/"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Child:
    """One start of a command. stage: how far vLLM's log says that it is, an index of ``STAGES``,
    or -1. began: by ``time.monotonic``."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self.stage = -1
        self.began = time.monotonic()
        self._read = log.stat().st_size if log.exists() else 0
        self._from = self._read
        self._shared = set[str]()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.environ},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def look(self) -> bool:
        """Read what is new in the log; True where the start has come further."""
        before = self.stage
        with self.log.open("rb") as file:
            file.seek(self._read)
            *lines, rest = file.read(1 << 20).split(b"\n")
            self._read = file.tell() - len(rest)
        for line in lines:
            self.stage = max(self.stage, stage_of(line.decode(errors="replace")))
        return self.stage > before

    def cause(self) -> str:
        """The signal or else the error in its log that ended it, or its exit status."""
        status = self.status
        if status is not None and status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        with self.log.open("rb") as file:
            file.seek(self._from)
            found = cause_of(line.decode(errors="replace") for line in file)
        return found or f"exit status {status}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, which passes its end on to those that it has started."""
        self.note_shared()
        if self.status is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it and all of its session at once, and remove their shared memory."""
        for pid in self.note_shared():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for name in self._shared:
            Path(name).unlink(missing_ok=True)

    def note_shared(self) -> list[int]:
        """Return its processes, and note shared memory that they may not live to remove."""
        pids = _session(self._process.pid)
        self._shared |= {name for pid in pids for name in _shared_memory(pid)}
        return pids


def _session(leader: int) -> list[int]:
    """Processes of a session that have not ended."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def _shared_memory(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return [path for line in lines if (path := line[73:]).startswith(_SHARED)]
    return []


def stage_of(line: str) -> int:
    """The stage that a log line belongs to, -1: none."""
    return max((n for n, (_, form) in enumerate(STAGES) if form.search(line)), default=-1)


def cause_of(lines: Iterable[str]) -> str:
    """The error that ended a process, in one line; empty where its log has none.

    A failure of an engine's core is followed by others that only say so: the last error that is
    not one of these is taken.
    """
    found = ""
    for line in lines:
        if match := _ERROR.search(line):
            if not any(text in line for text in _CONSEQUENCES):
                found = f"{match[1].rpartition('.')[2]}: {match[2]}"
        elif match := _REFUSED.search(line):
            found = match[1]
    return " ".join(found.split())[:MOST_CAUSE]
