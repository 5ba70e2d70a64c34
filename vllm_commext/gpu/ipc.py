"""Device memory that other processes of the same host map, by CUDA's IPC handles, and pinned host
memory.

What calls CUDA raises `UnsupportedError` where CUDA reports an error or its bindings are missing.
"""

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_commext.anonymous_memory import host_identity
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import launch
from vllm_commext.gpu.launch import Program, arguments_type, bindings, check

HANDLE_BYTES = 64
FILL_BYTES = 8 << 20
ALIGNMENT = 2 << 20  # bytes; CUDA maps memory between processes in pieces of this size
PEER_CHECK = "peer_check"
PEER_CHECK_ARGUMENTS = f"{PEER_CHECK}.cu"
EMPTY = 0xFFFFFFFF  # a word that no peer has written
TIMEOUT_SECONDS = 2.0  # all ranks have met right before
ANSWER_BYTES = 4
EXCHANGED_BYTES = 8 * 16  # a pack from each of eight ranks


def round_up(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is not below `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def cuda_runtime() -> Any:
    return bindings("runtime")


def forget_error() -> None:
    """Clear the error that a refused call of this thread has left with CUDA."""
    with contextlib.suppress(UnsupportedError):
        cuda_runtime().cudaGetLastError()


def export_handle(address: int) -> bytes:
    runtime = cuda_runtime()
    handle = check(runtime.cudaIpcGetMemHandle(address), "exporting device memory")
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def open_handle(handle_bytes: bytes, whose: str) -> int:
    """Map another process's allocation here, as often as it was opened, and return its address.

    *whose*: what the message calls the memory.
    """
    runtime = cuda_runtime()
    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), handle_bytes, HANDLE_BYTES)
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    return int(
        check(
            runtime.cudaIpcOpenMemHandle(handle, flags),
            f"mapping the memory of {whose} (this GPU may have no peer access to its GPU)",
        )
    )


def close_handle(address: int) -> None:
    """Undo one ``open_handle``, as far as CUDA lets."""
    with contextlib.suppress(UnsupportedError):
        check(cuda_runtime().cudaIpcCloseMemHandle(address), "unmapping")


def allocate(num_bytes: int, fill: int = 0) -> int:
    """Allocate device memory, filled with a 32-bit word, and return its address.

    It is CUDA's own: no allocator of torch's takes it away, also not while vLLM sleeps."""
    runtime = cuda_runtime()
    address = int(check(runtime.cudaMalloc(num_bytes), f"allocating {num_bytes} bytes"))
    words = fill.to_bytes(4, "little") * (min(num_bytes, FILL_BYTES) // 4)
    try:
        for offset in range(0, num_bytes, FILL_BYTES):
            write(address + offset, words[: num_bytes - offset])
        check(runtime.cudaDeviceSynchronize(), "filling the memory")
    except UnsupportedError:
        free(address)
        raise
    return address


def write(address: int, content: bytes) -> None:
    runtime = cuda_runtime()
    source = (ctypes.c_char * len(content)).from_buffer_copy(content)
    kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
    copied = runtime.cudaMemcpy(address, ctypes.addressof(source), len(content), kind)
    check(copied, "writing to device memory")


def read(address: int, num_bytes: int) -> bytes:
    """Copy device memory to the host, once all that was launched before has ended."""
    runtime = cuda_runtime()
    target = (ctypes.c_char * num_bytes)()
    check(runtime.cudaDeviceSynchronize(), "waiting for the GPU")
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
    copied = runtime.cudaMemcpy(ctypes.addressof(target), address, num_bytes, kind)
    check(copied, "reading device memory")
    return bytes(target)


def free(address: int) -> None:
    with contextlib.suppress(UnsupportedError):
        check(cuda_runtime().cudaFree(address), "freeing")


class IpcBuffer:
    """Device memory of a rank, mapped by all ranks; it is there on all of them, or all raise
    UnsupportedError.

    Args:
        size: bytes, rounded up to 2 MiB.
        fill: a 32-bit word that the memory is filled with before any peer can see it.

    Attributes:
        local_ptr: address of this rank's memory; 0 once it is cleaned up.
        peer_ptrs: address of each rank's memory in this process, this rank's own among them.
    """

    def __init__(self, collective: Collective, size: int, fill: int = 0) -> None:
        self.rank, self.world_size = collective.rank, collective.world_size
        self.size = round_up(size)
        self._collective = collective
        self.local_ptr = 0
        self.peer_ptrs = [0] * self.world_size
        try:
            offers = collective.run(lambda: self._allocate(fill))
            collective.agree(lambda: self._map(offers))
        except Exception:
            self.cleanup()
            raise

    def _allocate(self, fill: int) -> tuple[str, bytes]:
        self.local_ptr = self.peer_ptrs[self.rank] = allocate(self.size, fill)
        return host_identity(), export_handle(self.local_ptr)

    def _map(self, offers: list[tuple[str, bytes]]) -> None:
        if len({host for host, _ in offers}) > 1:
            raise UnsupportedError("expected all ranks on one host, got several hosts")
        for rank, (_, handle) in enumerate(offers):
            if rank != self.rank:
                self.peer_ptrs[rank] = open_handle(handle, f"rank {rank}")

    def cleanup(self, seconds: float = 0) -> None:
        """Unmap the peers' memory and free the local one; a second call does nothing.

        Args:
            seconds: how long to wait, between the two, for the peers to unmap this rank's memory.
        """
        for rank, address in enumerate(self.peer_ptrs):
            if rank != self.rank and address:
                close_handle(address)
                self.peer_ptrs[rank] = 0
        if not self.local_ptr:
            return
        if seconds > 0:
            self._collective.await_others(seconds)
        free(self.local_ptr)
        self.local_ptr = self.peer_ptrs[self.rank] = 0


def allocation_of(address: int) -> tuple[int, int]:
    """Address and bytes of the allocation that device memory is part of."""
    base, num_bytes = check(bindings("driver").cuMemGetAddressRange(address))
    return int(base), int(num_bytes)


class PinnedMemory:
    """Host memory that stays where it is, at an address for the host and for the current GPU."""

    def __init__(self, num_bytes: int) -> None:
        runtime = cuda_runtime()
        flags = runtime.cudaHostAllocPortable | runtime.cudaHostAllocMapped
        self.address = int(
            check(runtime.cudaHostAlloc(num_bytes, flags), f"pinning {num_bytes} bytes")
        )
        view = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.content: npt.NDArray[np.uint8] = np.ctypeslib.as_array(view)

    def close(self) -> None:
        check(cuda_runtime().cudaFreeHost(self.address), "freeing pinned memory")


def silent_peers(answer: int, rank: int, world_size: int) -> list[int]:
    return [peer for peer in range(world_size) if peer != rank and not answer >> peer & 1]


def check_delivery(addresses: Sequence[int], collective: Collective) -> None:
    """Let every rank store into every peer's memory, and look whether it came; collective. All
    raise UnsupportedError where something did not. See ``csrc/cuda/peer_check.cu``.

    *addresses*: each rank's memory in this process, a pack of 16 bytes for each rank or more, full
    of `EMPTY` before and afterwards.
    """
    rank, world_size = collective.rank, collective.world_size
    macros = {"WORLD_SIZE": world_size, "RANK": rank}
    function = collective.agree(
        lambda: launch.load(
            *(Program(PEER_CHECK), macros, launch.WARP, launch.current_device()), programmatic=False
        )
    )
    collective.agree(lambda: _look(function, addresses, rank, world_size))


def _look(function: launch.Function, addresses: Sequence[int], rank: int, world_size: int) -> None:
    made = arguments_type(PEER_CHECK_ARGUMENTS, WORLD_SIZE=world_size)()
    made.answer = allocate(ANSWER_BYTES)
    made.timeout_ns = int(TIMEOUT_SECONDS * 1e9)
    made.memory[:] = addresses
    try:
        function.launch(made, 1, 0)
        answer = int.from_bytes(read(made.answer, ANSWER_BYTES), "little")
    finally:
        free(made.answer)
    if silent := silent_peers(answer, rank, world_size):
        raise UnsupportedError(
            f"expected a store from each peer within {TIMEOUT_SECONDS:.0f} s, got none from ranks "
            f"{silent}: this machine maps the memory of peers and does not deliver to it"
        )
