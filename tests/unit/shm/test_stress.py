"""The stress programs in short; `make stress-shm` runs them for long."""

import sys
from pathlib import Path

import pytest

from tests.kit.processes import run


@pytest.mark.timeout(600)  # seconds on a machine at rest, minutes on a very busy one
@pytest.mark.parametrize(
    "words",
    [
        ("stress_traffic.py", "--messages", "20000"),
        ("stress_traffic.py", "--messages", "4000", "--torment", "40"),
        ("stress_deaths.py", "--rounds", "8"),
    ],
    ids=["traffic", "torment", "deaths"],
)
def test_in_short(words: tuple[str, ...]) -> None:
    script, *arguments = words
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = run(command, seconds=550)
    assert done.returncode == 0, done.stdout + done.stderr
