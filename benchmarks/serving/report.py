"""Figures as a table, and as JSON."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.figures import Row, Sample, rows_of

Notes = dict[str, Any]


def markdown(samples: Sequence[Sample], notes: Notes) -> str:
    """A table for each cell."""
    lines = ["# Serving, with everything of ours off and on", "", notes["machine"], ""]
    lines += ["    " + shlex.join(["python", "benchmarks/serve.py", *sys.argv[1:]]), ""]
    lines += [
        "Both sets of servers are up all the time and take turns, the other one stopped meanwhile; "
        f"medians over {notes['rounds']} rounds. `speedup`: off / on (throughput: on / off), "
        "median (smallest to largest) over the rounds' own ratios."
    ]
    rows = rows_of(samples)
    for cell in dict.fromkeys(row.cell for row in rows):
        lines += ["", f"## {cell}", "", "| figure | unit | off | on | speedup |"]
        lines += ["|" + "---|" * 5, *(_line(row) for row in rows if row.cell == cell)]
        lines += ["", *(f"- {name}: {text}" for name, text in notes["cells"].get(cell, {}).items())]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    middle, least, most = (_short(ratio) for ratio in row.ratios)
    return (
        f"| {row.figure} | {row.unit} | {_short(row.off)} | {_short(row.on)} | "
        f"{middle} ({least} to {most}) |"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def save(samples: Sequence[Sample], notes: Notes, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(samples, notes))
    rows = [row._asdict() for row in rows_of(samples)]
    text = json.dumps(
        {**notes, "command": sys.argv, "rows": rows, "samples": [s._asdict() for s in samples]}
    )
    out.with_suffix(".json").write_text(text + "\n")
