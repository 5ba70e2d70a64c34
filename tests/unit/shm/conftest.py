"""Children for the ring's tests, and a look at what is left in /dev/shm."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("child.py")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a function of child.py in a process of its own; all are killed at the end."""
    children: list[subprocess.Popen[str]] = []

    def begin(command: str, *arguments: object) -> "subprocess.Popen[str]":
        words = [sys.executable, str(CHILD), command, pickle.dumps(arguments).hex()]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate(timeout=60)


@pytest.fixture
def said() -> Callable[["subprocess.Popen[str]"], str]:
    """The next line that a child prints."""

    def next_line(child: "subprocess.Popen[str]") -> str:
        assert child.stdout is not None
        return child.stdout.readline().strip()

    return next_line
