"""Kernels for GPUs, compiled for this CPU, once for all processes of a test run.

What takes longest of a compilation are the system's headers, so these are compiled once as well.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit import ROOT
from tests.kit.forked import FOLDER

COMPILER = shutil.which("g++")
EMULATION = ROOT / "tests" / "unit" / "gpu"
# Compiling takes longer than running does, and no longer so than with -O0.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-pthread", "-mf16c", "-Wall", "-Wextra", "-Werror")
FLAGS += ("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized")
# A GPU faults on what is not aligned to its size: here the test process ends.
FLAGS += ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
SECONDS = 250


def compiled(source: Path, kernels: Path, macros: Mapping[str, object]) -> Path:
    """The library of a C++ file that includes files of the folder `kernels` and the emulation."""
    folders = (f"-I{EMULATION}", f"-I{kernels}")
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    headers = ("-include", str(_system_headers()))
    arguments = [*FLAGS, "-shared", *folders, *defined, *headers, str(source)]
    return _made(arguments, _folder() / f"{_digest(arguments)}.so")


def _system_headers() -> Path:
    """A header of all the system's headers that the emulation needs, compiled beside it."""
    text = (EMULATION / "host_emulation.h").read_text()
    wanted = re.findall(r"^#include <.*>$", text, re.MULTILINE)
    folder = _folder() / f"headers-{_digest([*FLAGS, *wanted])}"
    folder.mkdir(exist_ok=True)
    header = folder / "system.h"
    if not header.exists():
        unnamed = folder / f"system.h.{os.getpid()}"
        unnamed.write_text("\n".join([*wanted, ""]))
        unnamed.rename(header)
    _made([*FLAGS, "-x", "c++-header", str(header)], folder / "system.h.gch")
    return header


def _made(arguments: Sequence[str], target: Path) -> Path:
    """What the compiler makes of these arguments; whoever comes first makes it for all."""
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unnamed = target.with_name(f"new-{target.name}")
            command = [str(COMPILER), *arguments, "-o", str(unnamed)]
            subprocess.run(command, check=True, timeout=SECONDS)
            unnamed.rename(target)
    return target


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
