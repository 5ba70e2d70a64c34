"""The benchmark of streams that leave their engine, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("roles", [["prefill", "decode", "decode"], ["both", "both"]], ids=len)
def test_the_benchmark_of_moves_loses_nothing(tmp_path: Path, roles: list[str]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "moves.py"), "--roles", *roles]
    subprocess.run([*command, "--out", str(tmp_path / "found")], check=True, timeout=600)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [one["fault"] for one in rows] == ["drain", "kill"]
    for one in rows:
        assert (one["errors"], one["wrong"]) == ([], 0)
        assert one["moved"] == one["streams"] == 4
        assert one["judged"] == 4 * 600
        assert one["results"] == {"resumed": 4}
