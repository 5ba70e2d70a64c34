"""Loads compiled kernels and launches them, with programmatic dependent launch where there is."""

import ctypes
import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import nvrtc

WARP = 32  # threads
ELEMENT_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}  # as the kernels' macros have them
PROGRAMMATIC_LAUNCH = 90  # the first architecture that has it


class Device(NamedTuple):
    """A GPU as a kernel sees it: ordinal, architecture such as 90, multiprocessors."""

    ordinal: int
    architecture: int
    multiprocessors: int


def current_device() -> Device:
    """The current GPU of torch's."""
    import torch

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    architecture = properties.major * 10 + properties.minor
    return Device(index, architecture, properties.multi_processor_count)


def check(result: tuple[Any, ...]) -> Any:
    """The value of a call of the driver's.

    Raises:
        UnsupportedError: the driver reports an error.
    """
    status, *values = result
    if int(status) != 0:
        raise UnsupportedError(f"CUDA reports {status!r}")
    return values[0] if values else None


@dataclass
class Function:
    """A loaded kernel with its launch configuration.

    Attributes:
        driver: the driver's bindings.
        function: the kernel's handle.
        config: launch configuration; its grid and stream are set for each launch.
        lock: held from setting the configuration to the launch.
    """

    driver: Any
    function: Any
    config: Any
    lock: threading.Lock

    def launch(self, arguments: ctypes.Structure, num_blocks: int, stream: int) -> None:
        """Launch that many blocks; the kernel takes the structure as its one parameter.

        Raises:
            UnsupportedError: the driver refuses.
        """
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
    """Let this thread have a context, if it has none: torch gives it one only with its first work
    on the GPU, and an engine's worker may have done none yet."""
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

    Args:
        program: the kernel.
        macros: what it is compiled for.
        threads: of a block.
        device: the current GPU.
        programmatic: launch it before its predecessor has ended, where the GPU can; for a kernel
            that waits for that itself.

    Raises:
        UnsupportedError: the GPU is too old, or what `nvrtc.Program.load_or_compile` raises.
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
