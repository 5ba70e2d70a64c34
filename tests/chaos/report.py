"""The run's report as plain data and as Markdown.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from tests.chaos.judge import ERROR, LATE, RIGHT, WRONG, Recovery
from tests.chaos.schedule import KINDS
from vllm_commext.proxy.resume import Resume

VERDICTS = (RIGHT, ERROR, LATE, WRONG)


@dataclass(frozen=True)
class FaultRecord:
    """What one fault did.

    Attributes:
        number: its place in the run.
        kind: its kind.
        seconds: from its beginning to the peer's return.
        recovery: the way back.
        problems: what should not have happened.
        started: when it began, in seconds of the clock of the requests.
        drain_seconds: from its beginning to the end of the last request that was under way then.
    """

    number: int
    kind: str
    seconds: float
    recovery: Recovery
    problems: tuple[str, ...] = ()
    started: float = 0.0
    drain_seconds: float = 0.0

    def with_drain(self, spans: Iterable[tuple[float, float]]) -> FaultRecord:
        """The same with ``drain_seconds`` of the requests' starts and ends."""
        under_way = [end for start, end in spans if start < self.started < end]
        return replace(self, drain_seconds=max(under_way, default=self.started) - self.started)


@dataclass
class RunRecord:
    """What a whole run did.

    Attributes:
        settings: seed, sizes, versions.
        faults: each fault.
        verdicts: requests of the load by verdict.
        errors: error answers of the load by what they said.
        resumes: streams whose decode engine was lost, by what became of them.
        moves: streams whose decode engine drained, the same.
        lost: streams of the load that had begun at a decode engine when it was killed, by how they
            ended.
        num_unequal: right answers that went on with another one of two equally likely tokens.
        samples: details of wrong and late answers.
        censuses: descriptors, threads and memory of each engine at both ends of its life.
        memory: KiB of private memory of each engine after each fault of its life.
        problems: what should not have happened outside of a fault.
        skipped: kinds that this machine does not permit, and why.
        seconds: length of the run.
    """

    settings: dict[str, Any]
    faults: list[FaultRecord] = field(default_factory=list[FaultRecord])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    resumes: Counter[str] = field(default_factory=Counter[str])
    moves: Counter[str] = field(default_factory=Counter[str])
    lost: Counter[str] = field(default_factory=Counter[str])
    num_unequal: int = 0
    samples: list[str] = field(default_factory=list[str])
    censuses: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    memory: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    problems: list[str] = field(default_factory=list[str])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


def failures(run: RunRecord, *, timed: bool = True) -> list[str]:
    """Everything for which the run has failed; empty where it has passed.

    ``timed`` counts a recovery that came late or at a later attempt; without it only one that did
    not come at all.
    """
    found = list(run.problems)
    if run.verdicts[WRONG]:
        found.append(f"{run.verdicts[WRONG]} answers with status 200 and wrong tokens")
    if run.verdicts[LATE]:
        found.append(f"{run.verdicts[LATE]} requests took longer than their bound")
    broken = run.resumes.total() - run.resumes[Resume.RESUMED]
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
    """One recovery in words."""
    how = "read from the prefill engine" if recovery.succeeded else "not back"
    why = f": {recovery.why}" if recovery.why else ""
    return f"{how} after {recovery.attempts} attempts and {recovery.seconds:.2f} s{why}"


def as_json(run: RunRecord) -> dict[str, Any]:
    """The whole record, with its failures."""
    counts = {
        name: dict(counted) for name, counted in vars(run).items() if isinstance(counted, Counter)
    }
    faults = [asdict(fault) for fault in run.faults]
    return {**vars(run), **counts, "faults": faults, "failures": failures(run)}


def as_markdown(run: RunRecord) -> str:
    """The report for people: the verdict, then a row a kind."""
    wrong = failures(run)
    lines = ["# Chaos run", "", "PASSED" if not wrong else "FAILED", ""]
    lines += [f"- {name}: {value}" for name, value in run.settings.items()]
    lines += [
        f"- {len(run.faults)} faults of {len({fault.kind for fault in run.faults})} kinds in "
        f"{run.seconds:.0f} s",
        f"- {run.verdicts.total()} requests: "
        + ", ".join(f"{run.verdicts[verdict]} {verdict}" for verdict in VERDICTS)
        + f"; {run.num_unequal} of the right ones unequal",
        f"- {run.lost.total()} streams ran at a decode engine that was killed: {_told(run.lost)}",
        f"- the proxy counts {run.resumes.total()} that lost theirs: {_told(run.resumes)}",
        f"- {run.moves.total()} streams had theirs drained: {_told(run.moves)}",
        "",
    ]
    lines += _table(
        (
            "kind",
            "what happens",
            "count",
            "max attempts",
            "median s",
            "max s",
            "max drain s",
            "problems",
        ),
        [_row(kind, run.faults) for kind in sorted({fault.kind for fault in run.faults})],
    )
    lines += [
        "",
        "Seconds are from the peer's return to the end of the first good request; the drain is "
        "from the fault's beginning to the end of the last request that was under way then.",
        "",
    ]
    lines += _section("Failures", wrong)
    lines += _section("Details", run.samples)
    lines += _section("Errors that clients saw", [f"{n} x {e}" for e, n in run.errors.items()])
    lines += _section("Left out", [f"{kind}: {why}" for kind, why in run.skipped.items()])
    if run.censuses:
        heads = tuple(run.censuses[0])
        rows = [tuple(str(census[head]) for head in heads) for census in run.censuses]
        lines += ["## Engines", "", *_table(heads, rows), ""]
    return "\n".join(lines)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _row(kind: str, faults: Sequence[FaultRecord]) -> tuple[str, ...]:
    own = [fault for fault in faults if fault.kind == kind]
    seconds = [fault.recovery.seconds for fault in own]
    return (
        kind,
        KINDS[kind].meaning,
        str(len(own)),
        str(max(fault.recovery.attempts for fault in own)),
        f"{median(seconds):.2f}",
        f"{max(seconds):.2f}",
        f"{max(fault.drain_seconds for fault in own):.2f}",
        str(sum(not fault.recovery.is_in_time or bool(fault.problems) for fault in own)),
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def _section(title: str, entries: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {entry}" for entry in entries), ""] if entries else []
