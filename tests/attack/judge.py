"""Runs one attack and judges it: what others wait, what the victim's memory grows by, and whether
everything is free again soon after the attacker has gone.

A request's wait is judged without the time in which the machine gave the processes that serve it,
or its client, no processor (`run_delay` of ``/proc/PID/schedstat``). Such times may overlap, so it
is never judged as less than the processor time that the victim took while the client could run: a
client sleeps until its answer comes. Both are printed, and an attack during which the machine has
taken more than the bound is run once more."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from vllm_commext.errors import CommextError

MAX_WAIT_SECONDS = 0.1
MAX_GROWTH_MIB = 64.0
FREE_SECONDS = 5.0
SOFT_LIMIT = 1024
QUIET_SECONDS = 1.5
_GAP_SECONDS = 0.01
_NUM_WARM = 30


class Victim(Protocol):
    """What is attacked: running processes and their honest client."""

    @property
    def pids(self) -> Sequence[int]:
        """Processes whose memory counts."""
        ...

    @property
    def serving(self) -> Sequence[int]:
        """Processes that an honest request passes through, the victim first, whose lack of
        processor time is the machine's fault."""
        ...

    def honest(self) -> None:
        """One request of somebody else. Raises if it is not served as it should be."""
        ...

    def held(self) -> Mapping[str, float]:
        """What the victim holds for its clients now; all of it has to be as before in the end."""
        ...


@dataclass(frozen=True)
class Attack:
    """victim: starts it in a folder for its logs. assault: runs in a process of its own, returns
    when it has done its worst; it is killed after `bound_seconds`. by_median: where others' turns
    come behind work of one piece, the median wait is bounded, not the longest."""

    name: str
    victim: Callable[[Path], AbstractContextManager[Victim]]
    assault: Callable[[Victim], None]
    bound_seconds: float = 15.0
    max_growth_mib: float = MAX_GROWTH_MIB
    by_median: bool = False
    max_wait_seconds: float = MAX_WAIT_SECONDS


@dataclass
class Waits:
    """What honest requests waited, in seconds, and how much of that is the victim's own."""

    seconds: list[float] = field(default_factory=list[float])
    own: list[float] = field(default_factory=list[float])
    failures: list[str] = field(default_factory=list[str])

    @property
    def longest(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def longest_own(self) -> float:
        return max(self.own, default=0.0)

    @property
    def median(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0

    def ask(self, victim: Victim) -> None:
        before, began = _times(victim), time.monotonic()
        try:
            victim.honest()
        except (OSError, HTTPException, ValueError, CommextError) as error:
            self.failures.append(f"{type(error).__name__}: {error}"[:200])
        self.seconds.append(waited := time.monotonic() - began)
        worked, delayed, late = map(float.__sub__, _times(victim), before)
        self.own.append(max(waited - delayed - late, min(worked, waited - late)))


@dataclass(frozen=True)
class Verdict:
    """exit_code: of the attacker, None where it was killed when its time was over."""

    attack: Attack
    quiet: Waits
    beside: Waits
    growth_mib: float
    free_seconds: float | None
    left: str
    is_repeat: bool = False
    exit_code: int | None = None

    @property
    def problems(self) -> list[str]:
        found: list[str] = []
        if self.exit_code:
            found.append(f"the attack itself ended with {self.exit_code}")
        if self.beside.failures:
            found.append(f"{len(self.beside.failures)} failed, {self.beside.failures[0]}")
        if self.waited > self.attack.max_wait_seconds:
            found.append(f"others waited {self.waited * 1e3:.0f} ms")
        if self.growth_mib > self.attack.max_growth_mib:
            found.append(f"memory grew by {self.growth_mib:.0f} MiB")
        if self.free_seconds is None:
            found.append(f"not free after {FREE_SECONDS:g} s: {self.left}")
        return found

    @property
    def waited(self) -> float:
        """What is bounded of the victim's own waits."""
        own = sorted([0.0, *self.beside.own])
        return own[len(own) // 2 if self.attack.by_median else -1]

    @property
    def was_stalled(self) -> bool:
        """The machine, not the victim, kept a request waiting."""
        return self.beside.longest > self.attack.max_wait_seconds >= self.beside.longest_own


def judge(attack: Attack, folder: Path) -> Verdict:
    """Run *attack*, once more if the machine has stalled."""
    verdict = _run(attack, folder / attack.name, is_repeat=False)
    if verdict.was_stalled:
        verdict = _run(attack, folder / f"{attack.name}-again", is_repeat=True)
    return verdict


@contextmanager
def soft_limit(number: int = SOFT_LIMIT) -> Iterator[None]:
    """What is started inside has this soft limit of descriptors, and the hard one as it is."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _run(attack: Attack, folder: Path, *, is_repeat: bool) -> Verdict:
    folder.mkdir(parents=True, exist_ok=True)
    with attack.victim(folder) as victim:
        quiet, beside = Waits(), Waits()
        for _ in range(_NUM_WARM):
            victim.honest()
        end = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < end:
            quiet.ask(victim)
            time.sleep(_GAP_SECONDS)
        held, memory = victim.held(), _Memory(victim.pids)
        assault = multiprocessing.get_context("fork").Process(
            target=attack.assault, args=(victim,), daemon=True
        )
        assault.start()
        end = time.monotonic() + attack.bound_seconds
        while assault.is_alive() and time.monotonic() < end:
            beside.ask(victim)
            time.sleep(_GAP_SECONDS)
        exit_code = assault.exitcode
        assault.kill()
        assault.join()
        free_seconds, left = _until_free(victim, held)
        grown = memory.growth_mib()
        return Verdict(
            attack, quiet, beside, grown, free_seconds, left, is_repeat, exit_code=exit_code
        )


def _until_free(victim: Victim, before: Mapping[str, float]) -> tuple[float | None, str]:
    """Seconds until the victim holds no more than *before* and serves, and what it still holds."""
    began = time.monotonic()
    while True:
        left = {name: value for name, value in victim.held().items() if value > before[name]}
        waited = time.monotonic() - began
        if not left:
            victim.honest()
            return waited, ""
        if waited > FREE_SECONDS:
            return None, ", ".join(f"{k} {before[k]:g} -> {v:g}" for k, v in left.items())
        time.sleep(0.05)


class _Memory:
    """The most that processes have had resident since now."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._before = {pid: _status_kib(pid, "VmRSS") for pid in self._pids}
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def growth_mib(self) -> float:
        return sum(_status_kib(pid, "VmHWM") - self._before[pid] for pid in self._pids) / 1024


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"expected {name} in /proc/{pid}/status: is the process a zombie?")


def _times(victim: Victim) -> tuple[float, float, float]:
    """Seconds in which the victim's main thread ran, in which those of whoever serves could have
    run and did not, and in which this client could have and did not."""
    files = [Path(f"/proc/{one}/schedstat").read_text() for one in (*victim.serving, "self")]
    *delays, late = [int(file.split()[1]) / 1e9 for file in files]
    return int(files[0].split()[0]) / 1e9, sum(delays), late
