"""The other processes of the tests. Without the extension only its source is tested."""

import contextlib
import importlib.util
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("child.py")
if importlib.util.find_spec("vllm_commext.shm._shm_ring") is None:
    others = ("test_memory_orders.py", "test_ring_native.py")
    tests = (path.name for path in CHILD.parent.glob("test_*.py"))
    collect_ignore = [name for name in tests if name not in others]


class Child:
    def __init__(self, command: str, *arguments: object, wrapper: tuple[str, ...] = ()) -> None:
        words = [*wrapper, sys.executable, str(CHILD), command, pickle.dumps(arguments).hex()]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def said(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # vLLM logs to the standard output
                return pickle.loads(bytes.fromhex(line.strip()))
        raise AssertionError("the child has ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


Start = Callable[..., Child]


def unshared(*options: str) -> tuple[str, ...]:
    """The words before a command that give it namespaces of its own."""
    words = ("unshare", *options)
    if not shutil.which("unshare") or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("this machine does not let us make namespaces")
    return words


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a function of child.py in a process of its own; all are killed at the end."""
    children: list[Child] = []

    def begin(*arguments: Any, **options: Any) -> Child:
        children.append(Child(*arguments, **options))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
