"""Compiles kernels with NVRTC for what a call needs; the results are kept on disk.

Neither a compiler nor CUDA's headers are needed, nor a GPU: only the `cuda-bindings` package and
the NVRTC library that it finds.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_commext import private_files
from vllm_commext.errors import UnsupportedError

OLDEST_ARCHITECTURE = 80
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = _PACKAGE / "csrc" / "cuda"
# A wheel carries the sources inside the package; a checkout has them beside it.
SOURCES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "csrc" / "cuda"


def nvrtc() -> Any:
    """Import the bindings of NVRTC; UnsupportedError where they are not installed."""
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise UnsupportedError(
            f"the kernel is compiled by NVRTC, and cuda-bindings cannot be imported ({error}); "
            "`pip install cuda-bindings nvidia-cuda-nvrtc` brings both"
        ) from error


def _call(function: Any, *args: Any) -> Any:
    try:
        status, *values = function(*args)
    except RuntimeError as error:  # the bindings found no library to load
        raise UnsupportedError(f"NVRTC cannot be loaded ({error})") from error
    if int(status) != 0:
        raise UnsupportedError(f"{function.__name__} failed with {status!r}")
    return values[0] if len(values) == 1 else values


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC library, such as ``13.0``."""
    major, minor = _call(nvrtc().nvrtcVersion)
    return f"{major}.{minor}"


def options(macros: Mapping[str, int], architecture: int) -> list[bytes]:
    """NVRTC's options; an architecture is written like 90 for compute capability 9.0."""
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    return [text.encode() for text in (f"-arch=sm_{architecture}", "-std=c++17", *defines)]


def _log(bindings: Any, program: Any) -> str:
    text = bytes(_call(bindings.nvrtcGetProgramLogSize, program))
    _call(bindings.nvrtcGetProgramLog, program, text)
    return text.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True)
class Program:
    """A kernel's source, to be compiled for one set of macros at a time."""

    name: str  # of the kernel, of its file without ``.cu``, and of its folder in the cache

    @property
    def main(self) -> Path:
        return SOURCES / f"{self.name}.cu"

    @property
    def headers(self) -> tuple[Path, ...]:
        return tuple(sorted(SOURCES.glob("*.h")))

    def sources(self) -> tuple[bytes, tuple[bytes, ...]]:
        return self.main.read_bytes(), tuple(path.read_bytes() for path in self.headers)

    def compile_cubin(self, macros: Mapping[str, int], architecture: int) -> bytes:
        """Compile to machine code. UnsupportedError where NVRTC is missing, too old for the
        architecture, or refuses the source; its log is in the message."""
        bindings = nvrtc()
        main, headers = self.sources()
        names = [path.name.encode() for path in self.headers]
        program = _call(
            *(bindings.nvrtcCreateProgram, main, self.main.name.encode()),
            *(len(names), list(headers), names),
        )
        try:
            chosen = options(macros, architecture)
            (status,) = bindings.nvrtcCompileProgram(program, len(chosen), chosen)
            if int(status) != 0:
                log = _log(bindings, program)
                raise UnsupportedError(f"NVRTC {nvrtc_version()}: {status!r}\n{log}")
            cubin = bytes(_call(bindings.nvrtcGetCUBINSize, program))
            _call(bindings.nvrtcGetCUBIN, program, cubin)
            return cubin
        finally:
            bindings.nvrtcDestroyProgram(program)

    def cache_key(self, macros: Mapping[str, int], architecture: int) -> str:
        main, headers = self.sources()
        parts = (main, *headers, *options(macros, architecture), nvrtc_version().encode())
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:32]

    def load_or_compile(self, macros: Mapping[str, int], architecture: int) -> bytes:
        """As `compile_cubin`, from the cache on disk where it is there; one that cannot be written
        is done without."""
        where = private_files.cache_folder(self.name)
        if where is None:
            return self.compile_cubin(macros, architecture)
        path = where / f"{self.cache_key(macros, architecture)}.cubin"
        try:
            with private_files.opened(where, make=True) as folder, _locked(folder, path.stem):
                cubin = private_files.read(path)
                if cubin is None:
                    cubin = self.compile_cubin(macros, architecture)
                    private_files.write(path, cubin)
                return cubin
        except OSError as error:
            private_files.say(f"compiled kernels are not kept: {error}")
            return self.compile_cubin(macros, architecture)


@contextlib.contextmanager
def _locked(folder: int, name: str) -> Iterator[None]:
    """Let one process in at a time; the lock goes with the process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(f"{name}.lock", flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
