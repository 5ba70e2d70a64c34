"""Samples as a table, and as JSON."""

import dataclasses
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pages
from machine import load_average, machine

from kv_connector.samples import OURS, VLLM, Sample

COLUMNS = ("ours", "vLLM")


@dataclass(frozen=True)
class Row:
    """Both variants' values in one case; the other's are empty where it has no such case."""

    part: str
    case: str
    unit: str
    values: dict[str, list[float]]
    columns: tuple[str, str] = COLUMNS

    def median(self, variant: str) -> float:
        return statistics.median(self.values[variant])

    @property
    def ratio(self) -> float:
        """The other's median over ours, 0 where there is no other."""
        if not self.values[VLLM]:
            return 0.0
        return self.median(VLLM) / max(self.median(OURS), 1e-12)


def rows_of(part: str, samples: Sequence[Sample], columns: tuple[str, str] = COLUMNS) -> list[Row]:
    """Cases in the order in which they were measured first."""
    return [
        Row(
            part,
            case,
            unit,
            {
                name: [s.value for s in samples if (s.case, s.variant) == (case, name)]
                for name in (OURS, VLLM)
            },
            columns,
        )
        for case, unit in dict.fromkeys((sample.case, sample.unit) for sample in samples)
    ]


def _about() -> dict[str, str]:
    command = shlex.join(["python", "benchmarks/nixl_connector.py", *sys.argv[1:]])
    return {
        "machine": machine("nixl", "numpy"),
        "load average at the end": load_average(),
        "command": command,
    }


def markdown(rows: Sequence[Row]) -> list[str]:
    lines = pages.head("The NIXL connector, measured", _about())
    lines += ["Median (smallest) over rounds in which both take turns; less is better."]
    for part in dict.fromkeys(row.part for row in rows):
        those = [row for row in rows if row.part == part]
        ours, other = those[0].columns
        heads = ("case", "unit", ours, other, f"{other} / {ours}")
        lines += ["", f"## {part}", "", *pages.table(heads, map(_cells, those))]
    return lines


def _cells(row: Row) -> list[str]:
    figures = [
        f"{row.median(name):.4g} ({min(row.values[name]):.4g})" if row.values[name] else ""
        for name in (OURS, VLLM)
    ]
    return [row.case, row.unit, *figures, f"{row.ratio:.3g}" if row.ratio else ""]


def write(rows: Sequence[Row], out: Path) -> None:
    """OUT.md and OUT.json."""
    found = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
    pages.write(out.parent, out.name, {**_about(), "rows": found}, markdown(rows))
