"""Figures as a page, and as JSON."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pages

from serving.figures import Row, Sample, rows_of

Notes = dict[str, Any]


def markdown(samples: Sequence[Sample], notes: Notes) -> Iterator[str]:
    """A table for each cell."""
    command = shlex.join(["python", "benchmarks/serve.py", *sys.argv[1:]])
    about = {"machine": notes["machine"], "command": command}
    yield from pages.head("Serving, with everything of ours off and on", about)
    yield (
        "Both sets of servers are up all the time and take turns, the other one stopped meanwhile; "
        f"medians over {notes['rounds']} rounds. `speedup`: off / on (throughput: on / off), "
        "median (smallest to largest) over the rounds' own ratios."
    )
    rows = rows_of(samples)
    for cell in dict.fromkeys(row.cell for row in rows):
        yield from ("", f"## {cell}", "")
        of_cell = [_cells(row) for row in rows if row.cell == cell]
        yield from pages.table(("figure", "unit", "off", "on", "speedup"), of_cell)
        yield from ("", *(f"- {key}: {text}" for key, text in notes["cells"].get(cell, {}).items()))


def _cells(row: Row) -> list[str]:
    middle, least, most = (_short(ratio) for ratio in row.ratios)
    speedup = f"{middle} ({least} to {most})"
    return [row.figure, row.unit, _short(row.off), _short(row.on), speedup]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def save(samples: Sequence[Sample], notes: Notes, out: Path) -> None:
    rows = [row._asdict() for row in rows_of(samples)]
    found = {**notes, "command": sys.argv, "rows": rows, "samples": [s._asdict() for s in samples]}
    pages.write(out.parent, out.name, found, [*markdown(samples, notes)])
