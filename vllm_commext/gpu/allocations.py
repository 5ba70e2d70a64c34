"""Which allocation of CUDA's an address belongs to, and host memory that a GPU reads directly."""

import ctypes
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_commext.gpu import launch
from vllm_commext.gpu.ipc import check, cuda_runtime


def allocation_of(address: int) -> tuple[int, int]:
    """Address and bytes of the allocation that device memory is part of.

    Raises:
        UnsupportedError: there is none.
    """
    driver: Any = importlib.import_module("cuda.bindings.driver")
    status, base, num_bytes = driver.cuMemGetAddressRange(address)
    launch.check((status,))
    return int(base), int(num_bytes)


class PinnedMemory:
    """Host memory that stays where it is and that the current GPU reads and writes.

    Attributes:
        address: for the host and for the GPU.
        content: the same as bytes.

    Raises:
        UnsupportedError: there is none left.
    """

    def __init__(self, num_bytes: int) -> None:
        runtime = cuda_runtime()
        flags = runtime.cudaHostAllocPortable | runtime.cudaHostAllocMapped
        self.address = int(
            check(runtime.cudaHostAlloc(num_bytes, flags), f"pinning {num_bytes} bytes")
        )
        view = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.content: npt.NDArray[np.uint8] = np.ctypeslib.as_array(view)

    def close(self) -> None:
        """Give it back; nothing may use it any more."""
        check(cuda_runtime().cudaFreeHost(self.address), "freeing pinned memory")
