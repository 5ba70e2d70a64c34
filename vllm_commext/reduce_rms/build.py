"""Compiles the kernel for one shape with NVRTC; the result is kept on disk.

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
from pathlib import Path
from typing import Any

from vllm_commext.errors import UnsupportedError

SOURCES = Path(__file__).parent / "cuda"
MAIN = "reduce_rms.cu"
HEADERS = ("device_primitives.h", "numeric.h")
KERNEL = b"reduce_rms"
OLDEST_ARCHITECTURE = 80


def nvrtc() -> Any:
    """The bindings of NVRTC.

    Raises:
        UnsupportedError: they are not installed.
    """
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
    return values[0] if values else None


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC library, such as ``13.0``."""
    bindings = nvrtc()
    try:
        status, major, minor = bindings.nvrtcVersion()
    except RuntimeError as error:
        raise UnsupportedError(f"NVRTC cannot be loaded ({error})") from error
    if int(status) != 0:
        raise UnsupportedError(f"nvrtcVersion failed with {status!r}")
    return f"{major}.{minor}"


@functools.cache
def sources() -> tuple[bytes, tuple[bytes, ...]]:
    """The kernel's file and the headers that it includes."""
    return (SOURCES / MAIN).read_bytes(), tuple((SOURCES / name).read_bytes() for name in HEADERS)


def options(macros: Mapping[str, int], architecture: int) -> list[bytes]:
    """NVRTC's options; an architecture is written like 90 for compute capability 9.0."""
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    return [text.encode() for text in (f"-arch=sm_{architecture}", "-std=c++17", *defines)]


def compile_cubin(macros: Mapping[str, int], architecture: int) -> bytes:
    """Compile the kernel to machine code.

    Raises:
        UnsupportedError: NVRTC is missing or too old for the architecture, or refuses the source;
            its log is in the message.
    """
    bindings = nvrtc()
    main, headers = sources()
    names = [name.encode() for name in HEADERS]
    program = _call(
        bindings.nvrtcCreateProgram, main, MAIN.encode(), len(names), list(headers), names
    )
    try:
        chosen = options(macros, architecture)
        (status,) = bindings.nvrtcCompileProgram(program, len(chosen), chosen)
        if int(status) != 0:
            raise UnsupportedError(f"NVRTC {nvrtc_version()}: {status!r}\n{_log(program)}")
        cubin = bytes(_call(bindings.nvrtcGetCUBINSize, program))
        _call(bindings.nvrtcGetCUBIN, program, cubin)
        return cubin
    finally:
        bindings.nvrtcDestroyProgram(program)


def _log(program: Any) -> str:
    bindings = nvrtc()
    text = bytes(_call(bindings.nvrtcGetProgramLogSize, program))
    _call(bindings.nvrtcGetProgramLog, program, text)
    return text.rstrip(b"\0").decode(errors="replace")


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vllm_commext/reduce_rms``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm_commext" / "reduce_rms"


def cache_key(macros: Mapping[str, int], architecture: int) -> str:
    """Digest of all that the machine code depends on."""
    main, headers = sources()
    parts = (main, *headers, *options(macros, architecture), nvrtc_version().encode())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, and a compilation takes a second."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load_or_compile(macros: Mapping[str, int], architecture: int) -> bytes:
    """The machine code, from the cache on disk where it is there.

    A cache that cannot be written is done without.

    Raises:
        UnsupportedError: as `compile_cubin`.
    """
    folder = cache_folder()
    path = folder / f"{cache_key(macros, architecture)}.cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _write(path, compile_cubin(macros, architecture))
            return path.read_bytes()
    except OSError:
        return compile_cubin(macros, architecture)


def _write(path: Path, data: bytes) -> None:
    """All of the file or nothing of it, also where the process ends midway."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
