"""Loads compiled kernels and launches them, with programmatic dependent launch where there is."""

import ctypes
import functools
import importlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import nvrtc
from vllm_commext.gpu.nvrtc import SOURCES

WARP = 32  # threads
ELEMENT_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}  # as the kernels' macros have them
PROGRAMMATIC_LAUNCH = 90  # the first architecture that has it
_POINTER = ctypes.c_uint64
_TYPES: dict[str, Any] = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "float": ctypes.c_float}
_MEMBER = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)\])?;")


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


def check(result: tuple[Any, ...], what: str = "") -> Any:
    """The value of a call of the driver's or the runtime's, if it has one; UnsupportedError, with
    *what* was tried, where it reports an error."""
    status, *values = result
    if int(status) != 0:
        raise UnsupportedError(f"{what}: CUDA reports {status!r}".removeprefix(": "))
    return values[0] if values else None


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
    program: nvrtc.Program,
    macros: Mapping[str, int],
    threads: int,
    device: Device,
    *,
    programmatic: bool,
) -> Function:
    """Compile, or take from the cache on disk, and load into the GPU's context.

    *threads*: of a block. *programmatic*: launch it before its predecessor has ended, where the GPU
    can; for a kernel that waits for that itself. UnsupportedError where the GPU is too old, and as
    `nvrtc.Program.compile_cubin`.
    """
    driver = importlib.import_module("cuda.bindings.driver")
    if device.architecture < nvrtc.OLDEST_ARCHITECTURE:
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
    """Return ``struct Args`` of a file in `nvrtc.SOURCES` as a ctypes structure; a pointer is an
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
