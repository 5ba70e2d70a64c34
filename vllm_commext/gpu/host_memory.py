"""Host memory that all ranks of one host have mapped, and that each rank's GPU reads and writes."""

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_commext.anonymous_memory import AnonymousMemory, Offer
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu.ipc import cuda_runtime
from vllm_commext.gpu.launch import check

if TYPE_CHECKING:
    from vllm_commext.collective import Collective

NAME = "vllm-commext-allreduce"
BUS_ID_BYTES = 16
PCI_DEVICES, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")


def parse_cpus(text: str) -> set[int]:
    """Parse a list of Linux's, such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cpus_near(bus_id: str, devices: Path = PCI_DEVICES, nodes: Path = NODES) -> set[int]:
    """The CPUs of the NUMA node that a PCI device belongs to; empty where the machine names none.

    Args:
        bus_id: as CUDA has it, such as ``0000:1B:00.0``.
    """
    with contextlib.suppress(OSError, ValueError):
        node = int((devices / bus_id.lower() / "numa_node").read_text())
        if node >= 0:
            return parse_cpus((nodes / f"node{node}" / "cpulist").read_text())
    return set()


def bus_id_of_current_gpu() -> str:
    """The PCI address of the current GPU; UnsupportedError where CUDA reports an error."""
    runtime = cuda_runtime()
    device = check(runtime.cudaGetDevice(), "asking for the current GPU")
    text = check(runtime.cudaDeviceGetPCIBusId(BUS_ID_BYTES, device), "asking for its PCI address")
    return bytes(text).split(b"\0")[0].decode()


@contextlib.contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """Keep this thread on these CPUs, as far as it may run there, and afterwards where it was."""
    before = os.sched_getaffinity(0)
    wanted = before.intersection(cpus)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, wanted or before)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


class Segment(AnonymousMemory):
    """One rank's piece, mapped into this process and into its GPU's address space.

    Attributes:
        address: in this process; `device` is the GPU's address, 0 before `register`.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.num_bytes, self.device = len(self.map), 0
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def fill(self, byte: int, num_bytes: int, cpus: Collection[int]) -> None:
        """Fill the beginning, the rest with zeros, on one of these CPUs, whose node has it then."""
        with running_on(cpus):
            ctypes.memset(self.address, 0, self.num_bytes)
            ctypes.memset(self.address, byte, num_bytes)

    def register(self) -> None:
        """Let the current GPU use it; UnsupportedError where CUDA refuses."""
        runtime = cuda_runtime()
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        check(
            runtime.cudaHostRegister(self.address, self.num_bytes, flags),
            f"registering {self.num_bytes} bytes of host memory with the GPU",
        )
        try:
            self.device = int(
                check(runtime.cudaHostGetDevicePointer(self.address, 0), "mapping host memory")
            )
        except UnsupportedError:
            self._unregister()
            raise

    def _unregister(self) -> None:
        self.device = 0
        with contextlib.suppress(UnsupportedError):
            check(cuda_runtime().cudaHostUnregister(self.address), "unregistering host memory")

    def close(self) -> None:
        """Unmap it; a second call changes nothing."""
        if self.device:
            self._unregister()
        self.forget_file()
        self.map.close()


class HostMemory:
    """A segment of each rank, all mapped by all ranks and their GPUs; collective to create.

    Args:
        num_bytes: size of each rank's segment.
        marked: bytes at the beginning that are all ones, where the others are zero.

    Attributes:
        addresses: each rank's segment for the current GPU, in the order of ranks.

    Raises:
        UnsupportedError: it cannot be had or not be mapped, on any rank; all ranks raise it.
    """

    def __init__(self, num_bytes: int, collective: "Collective", marked: int = 0) -> None:
        self._segments: list[Segment] = []
        try:
            offers = collective.run(lambda: self._offer(num_bytes, marked))
            collective.agree(lambda: self._map(offers, collective.rank))
        except Exception:
            self.close()
            raise
        self.addresses = [segment.device for segment in self._segments]

    def _offer(self, num_bytes: int, marked: int) -> Offer:
        cpus = cpus_near(bus_id_of_current_gpu())
        segment = Segment.create(NAME, num_bytes)
        self._segments.append(segment)
        segment.fill(0xFF, marked, cpus)
        return segment.offer

    def _map(self, offers: list[Offer], mine: int) -> None:
        (own,) = self._segments
        self._segments = []
        try:
            for rank, offer in enumerate(offers):
                self._segments.append(own if rank == mine else Segment.open(offer))
        except UnsupportedError:
            if own not in self._segments:
                self._segments.append(own)
            raise
        for segment in self._segments:
            segment.register()

    def forget_files(self) -> None:
        """Close what others needed until all had mapped it."""
        for segment in self._segments:
            segment.forget_file()

    def close(self) -> None:
        """Unmap everything; a second call changes nothing."""
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()
