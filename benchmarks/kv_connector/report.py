"""Samples as a table with targets and verdicts, and as JSON."""

import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from machine import load_average, machine

from kv_connector.samples import OURS, VLLM, Sample

COLUMNS = ("ours", "vLLM")


@dataclass(frozen=True)
class Target:
    """What a case has to reach: ours at most ``share`` of the other's, or at most ``most`` in the
    case's unit where there is no other; ``text`` says it in words."""

    text: str
    share: float = 0.0
    most: float = 0.0


@dataclass(frozen=True)
class Row:
    part: str
    case: str
    unit: str
    values: dict[str, list[float]]
    target: Target | None
    columns: tuple[str, str] = COLUMNS

    def median(self, variant: str) -> float:
        return statistics.median(self.values[variant])

    @property
    def ratio(self) -> float:
        """The other's median over ours, 0 where there is no other."""
        if not self.values[VLLM]:
            return 0.0
        return self.median(VLLM) / max(self.median(OURS), 1e-12)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        if self.values[VLLM]:
            is_met = 1 / self.ratio <= self.target.share
        else:
            is_met = self.median(OURS) <= self.target.most
        return "met" if is_met else "**missed**"


def rows_of(
    part: str,
    samples: Sequence[Sample],
    targets: dict[str, Target],
    columns: tuple[str, str] = COLUMNS,
) -> list[Row]:
    """Cases in the order in which they were measured first."""
    cases = dict.fromkeys((sample.case, sample.unit) for sample in samples)
    return [
        Row(
            part,
            case,
            unit,
            {
                name: [s.value for s in samples if (s.case, s.variant) == (case, name)]
                for name in (OURS, VLLM)
            },
            targets.get(case),
            columns,
        )
        for case, unit in cases
    ]


def _machine() -> str:
    return f"{machine('nixl', 'numpy')}, load average {load_average()} at the end"


def markdown(rows: Sequence[Row]) -> str:
    command = shlex.join(["python", "benchmarks/nixl_connector.py", *sys.argv[1:]])
    lines = ["# The NIXL connector, measured", "", _machine(), "", f"    {command}", ""]
    lines += ["Median (smallest) over rounds in which both take turns; less is better."]
    for part in dict.fromkeys(row.part for row in rows):
        lines += ["", f"## {part}", ""]
        those = [row for row in rows if row.part == part]
        ours, other = those[0].columns
        heads = f"| case | unit | {ours} | {other} | {other} / {ours} | target | |"
        lines += [heads, "|" + "---|" * 7, *map(_line, those)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    figures = [
        f"{row.median(name):.4g} ({min(row.values[name]):.4g})" if row.values[name] else ""
        for name in (OURS, VLLM)
    ]
    target = row.target.text if row.target else ""
    ratio = f"{row.ratio:.3g}" if row.ratio else ""
    cells = [row.case, row.unit, *figures, ratio, target, row.verdict]
    return f"| {' | '.join(cells)} |"


def as_json(rows: Sequence[Row]) -> str:
    found = [dataclasses.asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in rows]
    return json.dumps({"machine": _machine(), "command": sys.argv, "rows": found}, indent=1) + "\n"
