"""The run's report as Markdown.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.chaos.judge import LATE, WRONG, Recovery
from tests.chaos.schedule import KINDS
from vllm_commext.proxy.errors_phases import Resume


@dataclass(frozen=True)
class FaultRecord:
    """One fault; ``problems`` should not have happened."""

    number: int
    kind: str
    recovery: Recovery
    problems: tuple[str, ...] = ()


@dataclass
class RunRecord:
    """A whole run: requests by verdict, errors by their text, streams whose decode engine was lost
    (``resumes``) or drained (``moves``) by how they ended, as the proxy counts; ``problems``
    outside of a fault, and kinds that this machine does not permit."""

    settings: dict[str, Any]
    faults: list[FaultRecord] = field(default_factory=list[FaultRecord])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    resumes: Counter[str] = field(default_factory=Counter[str])
    moves: Counter[str] = field(default_factory=Counter[str])
    samples: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


def failures(run: RunRecord, *, timed: bool = True) -> list[str]:
    """Everything for which the run has failed; empty where it has passed.

    ``timed`` counts a recovery that came late or at a later attempt; without it only one that did
    not come at all."""
    found = list(run.problems)
    if run.verdicts[WRONG]:
        found.append(f"{run.verdicts[WRONG]} answers with status 200 and wrong tokens")
    if run.verdicts[LATE]:
        found.append(f"{run.verdicts[LATE]} requests took longer than their bound")
    no_fault = {Resume.RESUMED} | ({Resume.ENDPOINT} if run.settings.get("talks") else set())
    broken = sum(num for why, num in run.resumes.items() if why not in no_fault)
    if run.settings.get("spares") and broken:
        found.append(f"{broken} streams broke off beside a second decode engine")
    for fault in run.faults:
        name = f"fault {fault.number} ({fault.kind})"
        found += [f"{name}: {problem}" for problem in fault.problems]
        recovery = fault.recovery
        if not (recovery.is_in_time if timed else recovery.succeeded):
            found.append(f"{name}: {describe(recovery)}")
    return found


def describe(recovery: Recovery) -> str:
    how = "read from the prefill engine" if recovery.succeeded else "not back"
    why = f": {recovery.why}" if recovery.why else ""
    return f"{how} after {recovery.attempts} attempts and {recovery.seconds:.2f} s{why}"


def as_markdown(run: RunRecord) -> str:
    """The verdict, a row a kind, then what was wrong."""
    wrong = failures(run)
    lines = [
        *("# Chaos run", "", "FAILED" if wrong else "PASSED", ""),
        *(f"- {name}: {value}" for name, value in run.settings.items()),
        f"- {len(run.faults)} faults in {run.seconds:.0f} s",
        f"- requests: {_told(run.verdicts)}",
        f"- {run.resumes.total()} streams lost their decode engine: {_told(run.resumes)}",
        f"- {run.moves.total()} streams had it drained: {_told(run.moves)}",
        "",
        "Seconds are from the peer's return to the end of the first good request.",
        "",
        "| kind | what happens | count | max attempts | median s | max s | problems |",
        "|" + " --- |" * 7,
        *(_row(kind, run.faults) for kind in sorted({fault.kind for fault in run.faults})),
        "",
    ]
    lines += _section("Failures", wrong)
    lines += _section("Details", run.samples)
    lines += _section("Errors that clients saw", [f"{n} x {e}" for e, n in run.errors.items()])
    lines += _section("Left out", [f"{kind}: {why}" for kind, why in run.skipped.items()])
    return "\n".join(lines)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _row(kind: str, faults: Sequence[FaultRecord]) -> str:
    own = [fault for fault in faults if fault.kind == kind]
    seconds = [fault.recovery.seconds for fault in own]
    attempts = max(fault.recovery.attempts for fault in own)
    bad = sum(not fault.recovery.is_in_time or bool(fault.problems) for fault in own)
    times = f"{attempts} | {median(seconds):.2f} | {max(seconds):.2f}"
    return f"| {kind} | {KINDS[kind].meaning} | {len(own)} | {times} | {bad} |"


def _section(title: str, entries: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {entry}" for entry in entries), ""] if entries else []
