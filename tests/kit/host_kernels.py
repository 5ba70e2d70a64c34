"""Kernels for GPUs, compiled for this CPU, once for all processes of a test run.

What takes longest of a compilation are the system's headers and what runs the threads, so these are
compiled once as well."""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.kit import ROOT
from tests.kit.forked import FOLDER
from vllm_commext.gpu.launch import SOURCES, Program

COMPILER = shutil.which("g++")
EMULATION = ROOT / "tests" / "unit" / "gpu"
# Compiling takes longer than running does, and no longer so than with -O0.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-pthread", "-mf16c", "-Wall", "-Wextra", "-Werror")
FLAGS += ("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized")
# A GPU faults on what is not aligned to its size: here the test process ends.
FLAGS += ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
SECONDS = 250


def compile_kernel(source: Program, macros: Mapping[str, object]) -> ctypes.CDLL:
    """A kernel for this CPU, of whichever rank."""
    macros = {name: value for name, value in macros.items() if name != "RANK"}
    macros |= {"KERNEL_NAME": source.name, "KERNEL_FILE": f'"{source.main.name}"'}
    folders = (f"-I{EMULATION}", f"-I{SOURCES}")
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    headers = ("-include", str(_system_headers()))
    files = (str(EMULATION / "emulate.cpp"), str(_runtime()))
    arguments = [*FLAGS, "-shared", *folders, *defined, *headers, *files]
    return ctypes.CDLL(str(_compiled(arguments, _folder() / f"{_digest(arguments)}.so")))


def run_calls(
    kernel: ctypes.CDLL,
    calls: object,
    blocks: Sequence[int],
    workers: int,
    seed: int,
    rank: int = 0,
) -> None:
    """A rank's calls one after the other, each of so many blocks; `workers` of them at a time."""
    counts = (ctypes.c_uint32 * len(blocks))(*blocks)
    kernel.run_calls(calls, counts, len(blocks), workers, seed, rank)


def _runtime() -> Path:
    arguments = [*FLAGS, "-c", str(EMULATION / "host_emulation.cpp")]
    return _compiled(arguments, _folder() / f"runtime-{_digest(arguments)}.o")


def _system_headers() -> Path:
    text = (EMULATION / "host_emulation.h").read_text()
    wanted = re.findall(r"^#include <.*>$", text, re.MULTILINE)
    folder = _folder() / f"headers-{_digest([*FLAGS, *wanted])}"
    folder.mkdir(exist_ok=True)
    header = _made(folder / "system.h", lambda new: new.write_text("\n".join([*wanted, ""])))
    _compiled([*FLAGS, "-x", "c++-header", str(header)], folder / "system.h.gch")
    return header


def _compiled(arguments: Sequence[str], target: Path) -> Path:
    command = [str(COMPILER), *arguments, "-o"]
    return _made(
        target, lambda new: subprocess.run([*command, str(new)], check=True, timeout=SECONDS)
    )


def _made(target: Path, make: Callable[[Path], object]) -> Path:
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unnamed = target.with_name(f"new-{target.name}")
            make(unnamed)
            unnamed.rename(target)
    return target


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
