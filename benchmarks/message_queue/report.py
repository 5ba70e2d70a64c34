"""Cells as a table with ratios, and as JSON."""

import json
import shlex
import statistics
import sys
from pathlib import Path

from machine import load_average, machine

from .cases import Cell

Key = tuple[str, int, str, str]
OURS, VLLM = "ours", "vllm"
HIGHER_IS_BETTER = "messages/s"


Steps = dict[str, dict[str, float]]
"""Microseconds of encoding steps alone, by each way: what no queue can be faster than."""


def medians(cells: list[Cell]) -> dict[Key, dict[str, float]]:
    values: dict[Key, dict[str, list[float]]] = {}
    for cell in cells:
        key = (cell.placement, cell.n_readers, cell.case, cell.unit)
        values.setdefault(key, {}).setdefault(cell.variant, []).append(cell.value)
    return {
        key: {name: statistics.median(found) for name, found in row.items()}
        for key, row in values.items()
    }


def advantage(row: dict[str, float], unit: str) -> float | None:
    """By what factor ours is better than vLLM's."""
    if not {OURS, VLLM} <= row.keys():
        return None
    better, worse = (VLLM, OURS) if unit == HIGHER_IS_BETTER else (OURS, VLLM)
    return row[worse] / max(row[better], 1e-3)


def _machine(rounds: int) -> str:
    ends = f"load average {load_average()} at the end"
    return f"{machine()}, {ends}; medians of {rounds} rounds in which all take turns"


def markdown(cells: list[Cell], alone: Steps, rounds: int, names: list[str]) -> str:
    lines = ["# The message queue", "", _machine(rounds), "", "    " + shlex.join(sys.argv), ""]
    for case, ways in alone.items():
        shown = ", ".join(f"{found:.1f} us by {way}" for way, found in ways.items())
        lines += ["", f"Encoding and decoding a {case} there and back, alone: {shown}."]
    lines += ["", f"| placement | readers | case | unit | {' | '.join(names)} | speedup |"]
    lines.append("|" + "---|" * (len(names) + 5))
    for (placement, n_readers, case, unit), row in medians(cells).items():
        figures = " | ".join(f"{row[name]:.4g}" if name in row else "" for name in names)
        factor = advantage(row, unit)
        shown = "" if factor is None else f"{factor:.2f}"
        lines.append(f"| {placement} | {n_readers} | {case} | {unit} | {figures} | {shown} |")
    return "\n".join(lines) + "\n"


def save(cells: list[Cell], alone: Steps, rounds: int, names: list[str], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(cells, alone, rounds, names))
    rows = {
        "machine": _machine(rounds),
        "steps": alone,
        "cells": [cell._asdict() for cell in cells],
    }
    out.with_suffix(".json").write_text(json.dumps(rows) + "\n")
