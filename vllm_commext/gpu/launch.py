"""Compiles kernels with NVRTC for what a call needs, keeps them on disk, and launches them, with
programmatic dependent launch where there is.

Neither a compiler nor CUDA's headers are needed, and to compile no GPU: only the `cuda-bindings`
package and the NVRTC library that it finds."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_commext import private_files
from vllm_commext.errors import UnsupportedError

OLDEST_ARCHITECTURE = 80
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = _PACKAGE / "csrc" / "cuda"
# A wheel carries the sources inside the package; a checkout has them beside it.
SOURCES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "csrc" / "cuda"
WARP = 32  # threads
ELEMENT_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}  # as the kernels' macros have them
PROGRAMMATIC_LAUNCH = 90  # the first architecture that has it
_POINTER = ctypes.c_uint64
_TYPES: dict[str, Any] = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "float": ctypes.c_float}
_MEMBER = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)\])?;")


def bindings(name: str) -> Any:
    """Import a module of cuda-bindings; UnsupportedError where it is not installed."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"kernels and peers' memory need cuda-bindings, which cannot be imported ({error}); "
            "`pip install cuda-bindings nvidia-cuda-nvrtc` brings all of it"
        ) from error


def check(result: tuple[Any, ...], what: str = "") -> Any:
    """The values of a call into CUDA, the value where it has one; UnsupportedError, with *what* was
    tried, where it reports an error."""
    status, *values = result
    if int(status) != 0:
        raise UnsupportedError(f"{what}: CUDA reports {status!r}".removeprefix(": "))
    return values[0] if len(values) == 1 else values


def _call(function: Any, *args: Any) -> Any:
    try:
        result = function(*args)
    except RuntimeError as error:  # the bindings found no library to load
        raise UnsupportedError(f"NVRTC cannot be loaded ({error})") from error
    return check(result, function.__name__)


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC library, such as ``13.0``."""
    major, minor = _call(bindings("nvrtc").nvrtcVersion)
    return f"{major}.{minor}"


def options(macros: Mapping[str, int], architecture: int) -> list[bytes]:
    """NVRTC's options; an architecture is written like 90 for compute capability 9.0."""
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    return [text.encode() for text in (f"-arch=sm_{architecture}", "-std=c++17", *defines)]


def _log(nvrtc: Any, program: Any) -> str:
    text = bytes(_call(nvrtc.nvrtcGetProgramLogSize, program))
    _call(nvrtc.nvrtcGetProgramLog, program, text)
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
        nvrtc = bindings("nvrtc")
        main, headers = self.sources()
        names = [path.name.encode() for path in self.headers]
        program = _call(
            *(nvrtc.nvrtcCreateProgram, main, self.main.name.encode()),
            *(len(names), list(headers), names),
        )
        try:
            chosen = options(macros, architecture)
            (status,) = nvrtc.nvrtcCompileProgram(program, len(chosen), chosen)
            if int(status) != 0:
                log = _log(nvrtc, program)
                raise UnsupportedError(f"NVRTC {nvrtc_version()}: {status!r}\n{log}")
            cubin = bytes(_call(nvrtc.nvrtcGetCUBINSize, program))
            _call(nvrtc.nvrtcGetCUBIN, program, cubin)
            return cubin
        finally:
            nvrtc.nvrtcDestroyProgram(program)

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


class Device(NamedTuple):
    """A GPU as a kernel sees it: ordinal, architecture such as 90, multiprocessors."""

    ordinal: int
    architecture: int
    multiprocessors: int


def current_device() -> Device:
    import torch

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    architecture = properties.major * 10 + properties.minor
    return Device(index, architecture, properties.multi_processor_count)


@dataclass
class Function:
    driver: Any  # bindings
    function: Any  # handle
    config: Any  # its grid and stream are set for each launch
    lock: threading.Lock  # held from setting the configuration to the launch

    def launch(self, arguments: ctypes.Structure, num_blocks: int, stream: int) -> None:
        """Launch that many blocks; the kernel takes the structure as its one parameter."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with self.lock:
            self.config.gridDimX = num_blocks
            self.config.hStream = stream
            check(
                self.driver.cuLaunchKernelEx(
                    self.config, self.function, ctypes.addressof(parameters), 0
                )
            )


def _configuration(driver: Any, threads: int, programmatic: bool) -> Any:
    ids = driver.CUlaunchAttributeID
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = 0
    if programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def enter_context(driver: Any, ordinal: int) -> None:
    """Give this thread a context, if it has none: torch does only with its first work on the GPU,
    and an engine's worker may have done none yet."""
    if int(check(driver.cuCtxGetCurrent())) == 0:
        context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(ordinal))))
        check(driver.cuCtxSetCurrent(context))


def load(
    program: Program, macros: Mapping[str, int], threads: int, device: Device, *, programmatic: bool
) -> Function:
    """Compile, or take from the cache on disk, and load into the GPU's context.

    *threads*: of a block. *programmatic*: launch it before its predecessor has ended, where the GPU
    can; for a kernel that waits for that itself. UnsupportedError where the GPU is too old, and as
    `Program.compile_cubin`.
    """
    driver = bindings("driver")
    if device.architecture < OLDEST_ARCHITECTURE:
        raise UnsupportedError(
            f"expected compute capability 8.0 or newer, got sm_{device.architecture}"
        )
    cubin = program.load_or_compile(macros, device.architecture)
    enter_context(driver, device.ordinal)
    module = check(driver.cuModuleLoadData(cubin))
    function = check(driver.cuModuleGetFunction(module, program.name.encode()))
    check(driver.cuFuncLoad(function))  # else it might be loaded while a graph is captured
    early = programmatic and device.architecture >= PROGRAMMATIC_LAUNCH
    config = _configuration(driver, threads, early)
    return Function(driver, function, config, threading.Lock())


@functools.cache
def arguments_type(source: str, **macros: int) -> type[ctypes.Structure]:
    """Return ``struct Args`` of a file in `SOURCES` as a ctypes structure; a pointer is an
    address of 64 bits.

    *macros*: those that array lengths name. UnsupportedError where the file has no such structure,
    or a member of another form.
    """
    return _structure(source, (SOURCES / source).read_text(), "Args", macros)


def _structure(source: str, text: str, name: str, macros: dict[str, int]) -> type[Any]:
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise UnsupportedError(f"expected `struct {name}` in {source}, found none")
    fields = []
    for line in found[1].splitlines():
        member = _MEMBER.match(line.strip())
        if member is None:
            raise UnsupportedError(f"expected a member of `struct {name}` in {source}, got {line}")
        kind, pointer, field, length = member.groups()
        made: Any = _POINTER if pointer else _TYPES.get(kind)
        made = made or _structure(source, text, kind, macros)
        fields.append((field, made * macros[length] if length else made))
    return type(name, (ctypes.Structure,), {"_fields_": fields})
