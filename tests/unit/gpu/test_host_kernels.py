"""What compiles kernels for CPUs, without a compiler."""

import ctypes
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.forked import FOLDER
from tests.kit.host_kernels import compile_kernel
from tests.kit.threads import together
from vllm_commext.gpu.ipc import PEER_CHECK
from vllm_commext.gpu.nvrtc import Program

THREADS = 8
SECONDS = 0.05  # that each file takes, so that all threads come while it is made


def test_threads_that_compile_at_the_same_time_make_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(path: Path, _: str = "") -> None:
        made.append(path)
        path.touch()
        time.sleep(SECONDS)

    def compiler(command: Sequence[str], **_: object) -> None:
        make(Path(command[-1]))

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(Path, "write_text", make)
    monkeypatch.setattr(subprocess, "run", compiler)
    monkeypatch.setattr(ctypes, "CDLL", str)
    found = together(lambda _: compile_kernel(Program(PEER_CHECK), {}), THREADS)
    assert len(set(found)) == 1
    assert len(made) == len(["the headers", "the same compiled", "the runtime", "the kernel"])
