"""Loads compiled kernels and launches them, with programmatic dependent launch where there is."""

import ctypes
import importlib
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_commext.errors import UnsupportedError
from vllm_commext.reduce_rms import build, variants
from vllm_commext.reduce_rms.variants import Shape, Tiling

PROGRAMMATIC_LAUNCH = 90  # the first architecture that has it


class Arguments(ctypes.Structure):
    """``Args`` of the kernel, field by field."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("q_weight", ctypes.c_uint64),
        ("k_weight", ctypes.c_uint64),
        ("q_out", ctypes.c_uint64),
        ("k_out", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("states", ctypes.c_uint64),
        ("rank", ctypes.c_uint64),
        ("q_stride", ctypes.c_uint64),
        ("k_stride", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint32),
        ("q_scale", ctypes.c_float),
        ("k_scale", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class Device(NamedTuple):
    """A GPU as the kernel sees it: ordinal, architecture such as 90, multiprocessors."""

    ordinal: int
    architecture: int
    multiprocessors: int


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
class Kernel:
    """A loaded kernel with its launch configuration.

    Attributes:
        driver: the driver's bindings.
        function: the kernel's handle.
        config: launch configuration; its grid and stream are set for each launch.
        block_teams: tokens a block.
        lock: held from setting the configuration to the launch.
    """

    driver: Any
    function: Any
    config: Any
    block_teams: int
    lock: threading.Lock

    def launch(self, arguments: Arguments, stream: int) -> None:
        """Launch for ``arguments.num_tokens`` tokens.

        Raises:
            UnsupportedError: the driver refuses.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with self.lock:
            self.config.gridDimX = -(-arguments.num_tokens // self.block_teams)
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


def load(shape: Shape, tiling: Tiling, device: Device) -> Kernel:
    """Compile, or take from the cache on disk, and load into the current context.

    Raises:
        UnsupportedError: the GPU is too old, or what `build.compile_cubin` raises.
    """
    driver = importlib.import_module("cuda.bindings.driver")
    if device.architecture < build.OLDEST_ARCHITECTURE:
        raise UnsupportedError(
            f"expected compute capability 8.0 or newer, got sm_{device.architecture}"
        )
    cubin = build.load_or_compile(variants.macros(shape, tiling), device.architecture)
    module = check(driver.cuModuleLoadData(cubin))
    function = check(driver.cuModuleGetFunction(module, build.KERNEL))
    check(driver.cuFuncLoad(function))  # else it might be loaded while a graph is captured
    config = _configuration(driver, tiling.threads, device.architecture >= PROGRAMMATIC_LAUNCH)
    return Kernel(driver, function, config, tiling.block_teams, threading.Lock())


class Kernels:
    """The loaded kernels of this process, by GPU, shape and tiling."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[int, Shape], dict[Tiling, Kernel]] = {}
        self._lock = threading.Lock()

    def get(self, shape: Shape, num_tokens: int, device: Device) -> Kernel:
        """The kernel for a call.

        All forms of a shape are loaded at its first call, for a later one may come while a CUDA
        graph is captured, when nothing can be loaded.
        """
        forms = self._loaded.get((device.ordinal, shape)) or self._load_all(shape, device)
        return forms[variants.choose(shape, num_tokens, device.multiprocessors)]

    def _load_all(self, shape: Shape, device: Device) -> dict[Tiling, Kernel]:
        with self._lock:
            key = (device.ordinal, shape)
            if key not in self._loaded:
                variants.check_shape(shape)
                forms = {tiling: load(shape, tiling, device) for tiling in variants.tilings(shape)}
                self._loaded[key] = forms
            return self._loaded[key]
