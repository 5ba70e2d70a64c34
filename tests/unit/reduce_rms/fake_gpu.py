"""GPUs that are not there: CUDA's memory calls and launches, for ranks that are threads.

Memory is this process's own, an IPC handle holds its address, and a launch runs the kernel's source
on the CPU. All of the package between the op and the driver is the real thing."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.host_kernels import run_calls
from tests.kit.threads import outcomes, swap_among
from tests.unit.reduce_rms.emulation import library
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc
from vllm_commext.gpu.launch import Device
from vllm_commext.reduce_rms import kernel, ops, workspace
from vllm_commext.reduce_rms.kernel import Shape

OK, OUT_OF_MEMORY, NOT_PERMITTED = 0, 2, 217
GPU = Device(0, 90, 132)


class Handle:
    """An IPC handle: 64 bytes, the first eight of which are an address."""

    def __init__(self) -> None:
        self.raw = (ctypes.c_char * 64)()

    def getPtr(self) -> int:  # noqa: N802 - as the bindings call it
        return ctypes.addressof(self.raw)

    @property
    def address(self) -> int:
        return ctypes.c_uint64.from_buffer(self.raw).value


class Runtime:
    """The part of ``cuda.bindings.runtime`` that `ipc` uses. `opened` has an address once for each
    mapping; what is stored into another's memory may be lost."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1)  # noqa: N815
    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    cudaIpcMemHandle_t = Handle  # noqa: N815

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.opened: list[int] = []
        self.refuse_mapping = self.loses_stores = self.refuse_second_block = False
        self.lock = threading.Lock()

    def cudaMalloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        block = (ctypes.c_char * size)()
        with self.lock:
            if self.refuse_second_block and self.memory:
                return OUT_OF_MEMORY, 0
            self.memory[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        with self.lock:
            del self.memory[address]
        return (OK,)

    def cudaMemcpy(self, to: int, source: int, size: int, _: int) -> tuple[int]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (OK,)

    def cudaDeviceSynchronize(self) -> tuple[int]:  # noqa: N802
        return (OK,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, Handle]:  # noqa: N802
        handle = Handle()
        ctypes.c_uint64.from_buffer(handle.raw).value = address
        return OK, handle

    def cudaIpcOpenMemHandle(self, handle: Handle, _: int) -> tuple[int, int]:  # noqa: N802
        if self.refuse_mapping:
            return NOT_PERMITTED, 0
        with self.lock:
            self.opened.append(handle.address)
        return OK, handle.address

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:  # noqa: N802
        with self.lock:
            self.opened.remove(address)
        return (OK,)

    def check_delivery(self, addresses: Any, collective: Collective) -> None:
        assert len(addresses) == collective.world_size

        def look() -> None:
            if self.loses_stores and collective.rank == 1:
                raise UnsupportedError("expected a store from each peer")

        collective.agree(look)


class Group:
    """Ranks that are threads; `over` is what `Collective.over` is to processes."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self._here = world_size, threading.local()

    def over(self, _: Any) -> Collective:
        return Collective(self._here.rank, self.world_size, self._here.swap)

    def run(self, rank_body: Callable[[int], Any]) -> list[Any]:
        swap_of = swap_among(self.world_size)

        def start(rank: int) -> Any:
            self._here.rank, self._here.swap = rank, swap_of(rank)
            return rank_body(rank)

        return outcomes(start, self.world_size)


class HostKernels:
    """In place of `launch.Kernels`; `launches` tells the tokens of each launch."""

    def __init__(self) -> None:
        self.launches: list[int] = []
        self._compiling = threading.Lock()

    def load(self, shape: Shape, device: Device) -> None:
        """What is compiled here is compiled by `get`."""

    def get(
        self, shape: Shape, num_tokens: int, device: Device, batch_invariant: bool = False
    ) -> "HostKernel":
        tiling = kernel.choose(shape, num_tokens, device.multiprocessors, batch_invariant)
        with self._compiling:
            return HostKernel(library(shape, tiling), tiling.block_teams, self.launches)


class HostKernel:
    def __init__(self, loaded: ctypes.CDLL, block_teams: int, launches: list[int]) -> None:
        self.loaded, self.block_teams, self.launches = loaded, block_teams, launches

    def launch(self, arguments: ctypes.Structure, _: int) -> None:
        self.launches.append(arguments.num_tokens)
        blocks = -(-arguments.num_tokens // self.block_teams)
        run_calls(self.loaded, ctypes.byref(arguments), [blocks], 2, seed=0)


@contextlib.contextmanager
def fake_gpus(world_size: int) -> Iterator[tuple[Runtime, Group, HostKernels]]:
    """Everything below the package is fake until the end."""
    runtime, group, kernels = Runtime(), Group(world_size), HostKernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "cuda_runtime", lambda: runtime)
        patch.setattr(workspace.Collective, "over", group.over)
        patch.setattr(workspace, "check_delivery", runtime.check_delivery)
        patch.setattr(workspace, "DEVICE", "cpu")
        patch.setattr(workspace, "_pinned_word", lambda: torch.zeros(1, dtype=torch.int64))
        patch.setattr(workspace, "current_device", lambda: GPU)
        patch.setattr(ops, "_kernels", kernels)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        try:
            yield runtime, group, kernels
        finally:  # no workspace may outlive the memory that it thinks it has
            for made in list(workspace._by_handle.values()):
                made.cleanup()
