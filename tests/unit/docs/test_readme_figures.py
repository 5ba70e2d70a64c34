"""The README's tables and its picture are what the result files say."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllm_commext.compat.monkey_patch import INVENTORY

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"


@pytest.fixture(scope="module")
def rows() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        yield importlib.import_module("readme_rows")


def test_the_tables_and_the_picture_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "readme_figures.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"run python tools/readme_figures.py: {done.stdout}{done.stderr}"


def test_no_line_of_the_readme_is_too_long() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 120] == []


def test_a_loss_is_shown_as_one(rows: ModuleType) -> None:
    results = {
        "rows": [
            {"tokens": 8000, "at once": 1, "engine": "vLLM's", "TPOT": 4.0},
            {"tokens": 8000, "at once": 1, "engine": "ours", "TPOT": 5.0},
            {"tokens": 8000, "at once": 8, "engine": "ours", "TPOT": 1.0},
        ]
    }
    row = rows.Row("x", "file", "here", "ms", rows.handover("TPOT", (8000,)))
    assert row.cells(results) == ("4.00 ms", "5.00 ms", "0.80x")


def test_the_speedup_of_servers_is_that_of_the_rounds(rows: ModuleType) -> None:
    one = {"cell": "a", "figure": "throughput", "off": 1000.0, "on": 1100.0, "ratios": [0.97]}
    row = rows.Row("x", "file", "here", "", rows.serve("throughput", "a"))
    assert row.cells({"rows": [one]}) == ("1,000", "1,100", "0.97x")


def test_queue_rows_take_medians_of_one_reader_alone(rows: ModuleType) -> None:
    def cell(who: str, value: float, n_readers: int = 1) -> dict[str, object]:
        shared = {"case": "x", "placement": "free", "unit": "us p50"}
        return {**shared, "variant": who, "value": value, "n_readers": n_readers}

    cells = [cell("vllm", 30.0), cell("vllm", 20.0), cell("vllm", 10.0), cell("ours", 10.0)]
    cells.append(cell("ours", 1000.0, n_readers=4))
    row = rows.Row("x", "file", "here", "us", rows.queue("x"))
    assert row.cells({"cells": cells}) == ("20.0 us", "10.0 us", "2.00x")


def test_the_speedup_of_collectives_is_that_of_the_rounds(rows: ModuleType) -> None:
    figures = {"gloo": (10.0, 20.0, 90.0), "ours": (10.0, 10.0, 30.0)}
    cells = [
        {"num_ranks": 2, "num_bytes": 8, "number": n, "variant": who, "median_us": value}
        for who, values in figures.items()
        for n, value in enumerate(values)
    ]
    row = rows.Row("x", "file", "here", "us", rows.collectives(2, 8))
    assert row.cells({"cells": cells}) == ("20.0 us", "10.0 us", "2.00x")
    figures["ours"] = (10.0, 40.0, 30.0)
    for cell in cells[3:]:
        cell["median_us"] = figures["ours"][cell["number"]]
    assert row.cells({"cells": cells}) == ("20.0 us", "30.0 us", "1.00x")


def test_the_readme_counts_the_monkey_patched_symbols() -> None:
    assert all(row.symbol.startswith("vllm.") for row in INVENTORY)
    assert f"monkey-patch {len(INVENTORY)} symbols of vLLM" in " ".join(
        (ROOT / "README.md").read_text().split()
    )
