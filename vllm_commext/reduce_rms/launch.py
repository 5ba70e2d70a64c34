"""The forms of the kernel, loaded at a shape's first call."""

import ctypes
import threading
from dataclasses import dataclass

from vllm_commext.gpu import launch
from vllm_commext.gpu.launch import Device
from vllm_commext.reduce_rms import variants
from vllm_commext.reduce_rms.build import PROGRAM
from vllm_commext.reduce_rms.variants import Shape, Tiling


@dataclass(frozen=True)
class Kernel:
    """A loaded form of the kernel."""

    function: launch.Function
    block_teams: int

    def launch(self, arguments: ctypes.Structure, stream: int) -> None:
        """Launch for ``arguments.num_tokens`` tokens.

        Raises:
            UnsupportedError: the driver refuses.
        """
        self.function.launch(arguments, -(-arguments.num_tokens // self.block_teams), stream)


def load(shape: Shape, tiling: Tiling, device: Device) -> Kernel:
    """One form, compiled if need be and loaded into the current context.

    Raises:
        UnsupportedError: as `launch.load`.
    """
    macros = variants.macros(shape, tiling)
    function = launch.load(PROGRAM, macros, tiling.threads, device, programmatic=True)
    return Kernel(function, tiling.block_teams)


class Kernels:
    """The loaded kernels of this process, by GPU, shape and tiling."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[int, Shape], dict[Tiling, Kernel]] = {}
        self._lock = threading.Lock()

    def get(
        self, shape: Shape, num_tokens: int, device: Device, batch_invariant: bool = False
    ) -> Kernel:
        """The kernel for a call of a shape that is loaded."""
        forms = self._loaded[device.ordinal, shape]
        tiling = variants.choose(shape, num_tokens, device.multiprocessors, batch_invariant)
        return forms[tiling]

    def load(self, shape: Shape, device: Device) -> None:
        """Load all forms of a shape, for a later call may come while a CUDA graph is captured,
        when nothing can be loaded.

        Raises:
            UnsupportedError: as `launch.load`.
        """
        with self._lock:
            key = (device.ordinal, shape)
            if key not in self._loaded:
                variants.check_shape(shape)
                forms = {tiling: load(shape, tiling, device) for tiling in variants.tilings(shape)}
                self._loaded[key] = forms
