"""Launches the kernel that copies pieces of mapped memory; see ``csrc/cuda/gather_pieces.cu``.

Each launch is one of the handles that a ``Posting`` takes, and ``Gatherer`` does with them what
NIXL's agent does with its own.
"""

import contextlib
import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.ipc import PinnedMemory
from vllm_commext.gpu.launch import arguments_type
from vllm_commext.gpu.nvrtc import Program
from vllm_commext.nixl.mapped.pieces import CHUNK_BYTES, MAX_PIECES, MAX_RUNS, Batch
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS

NAME = "gather_pieces"
NUM_THREADS = 512
WARPS = NUM_THREADS // launch.WARP
NUM_BLOCKS = 16
"""Multiprocessors that a read takes at most from what the engine computes meanwhile; on an H100
more of them are not faster."""
DEPTH = 8
SCRATCH_BYTES = 1 << 10
PLACES_BYTES = 16 * MAX_PIECES
NUM_SLABS = 4
"""That are there from the start: pinning memory takes a while."""


def macros() -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "THREADS": NUM_THREADS,
        "CHUNK_BYTES": CHUNK_BYTES,
        "DEPTH": DEPTH,
        "MAX_RUNS": MAX_RUNS,
    }


def make_arguments() -> ctypes.Structure:
    """Return the kernel's ``Args``, all 0."""
    return arguments_type(f"{NAME}.cu", MAX_RUNS=MAX_RUNS)()


class Slab(Protocol):
    """Host memory of one launch, which the GPU reads and writes.

    Attributes:
        address: of its first byte, for both.
        content: ``[PLACES_BYTES + SCRATCH_BYTES]``, places first.
    """

    address: int
    content: npt.NDArray[np.uint8]


class Device(Protocol):
    """The GPU of this worker, as far as reads through mappings need it; owned by one thread."""

    def enter(self) -> None:
        """Let the calling thread use it."""

    def make_slab(self) -> Slab:
        """New memory for a launch."""
        ...

    def launch(self, arguments: ctypes.Structure, slab: Slab) -> None:
        """Begin with a copy behind those that were begun before; raises where it cannot."""

    def is_done(self, slab: Slab) -> bool:
        """Whether the copy with this slab has ended; raises where it has failed."""
        ...

    def open(self, handle: bytes) -> int:
        """Where a peer's allocation is mapped; raises ``UnsupportedError`` where it is not."""
        ...

    def unmap(self, address: int) -> None:
        """Undo ``open``; nothing may read there any more."""

    def close(self) -> None:
        """Give everything back; nothing may be under way."""


class CudaSlab(PinnedMemory):
    """A slab, and the event behind the launch that uses it."""

    def __init__(self) -> None:
        super().__init__(PLACES_BYTES + SCRATCH_BYTES)
        runtime = ipc.cuda_runtime()
        created = runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming)
        self.event = ipc.check(created, "making an event")


class CudaDevice:
    """A GPU of NVIDIA's: the current one of torch's.

    Launches are on a stream of their own, beside what the engine computes.

    Args:
        num_blocks: of a launch at most.

    Raises:
        UnsupportedError: the kernel cannot be compiled or loaded, or CUDA reports an error.
    """

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self._num_blocks = num_blocks
        self._device = launch.current_device()
        self._function = launch.load(
            Program(NAME), macros(), NUM_THREADS, self._device, programmatic=False
        )
        self._runtime = ipc.cuda_runtime()
        flags = self._runtime.cudaStreamNonBlocking
        created = self._runtime.cudaStreamCreateWithFlags(flags)
        self._stream = int(ipc.check(created, "making a stream"))
        self._slabs: list[CudaSlab] = []

    def enter(self) -> None:
        """See ``Device``.  Graphs that other threads capture meanwhile stay as they are."""
        launch.enter_context(self._function.driver, self._device.ordinal)
        relaxed = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        changed = self._runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
        ipc.check(changed, "letting other threads capture graphs")

    def make_slab(self) -> CudaSlab:
        """See ``Device``."""
        self._slabs.append(CudaSlab())
        return self._slabs[-1]

    def launch(self, arguments: ctypes.Structure, slab: Slab) -> None:
        """See ``Device``."""
        num_blocks = min(self._num_blocks, -(-arguments.num_chunks // WARPS))
        self._function.launch(arguments, num_blocks, self._stream)
        recorded = self._runtime.cudaEventRecord(self._event(slab), self._stream)
        ipc.check(recorded, "recording an event")

    def is_done(self, slab: Slab) -> bool:
        """See ``Device``."""
        (status,) = self._runtime.cudaEventQuery(self._event(slab))
        if status == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        ipc.check((status,), "copying from the mapped memory")
        return True

    def open(self, handle: bytes) -> int:
        """See ``Device``."""
        return ipc.open_handle(handle, "the prefill worker")

    def unmap(self, address: int) -> None:
        """See ``Device``."""
        ipc.close_handle(address)

    def close(self) -> None:
        """See ``Device``."""
        with contextlib.suppress(UnsupportedError):  # at a process's end CUDA may have gone before
            while self._slabs:
                slab = self._slabs.pop()
                ipc.check(self._runtime.cudaEventDestroy(slab.event), "giving back an event")
                slab.close()
            ipc.check(self._runtime.cudaStreamDestroy(self._stream), "giving back the stream")

    @staticmethod
    def _event(slab: Slab) -> Any:
        assert isinstance(slab, CudaSlab)  # made by ``make_slab``
        return slab.event


class Gather:
    """One launch: what it copies, and what it holds meanwhile."""

    def __init__(self, batch: Batch, slab: Slab) -> None:
        self.batch = batch
        self.slab = slab
        self.is_launched = self.has_ended = False


class Gatherer:
    """Posts and watches launches.  Owned by one thread.

    Args:
        device: where they run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free = [device.make_slab() for _ in range(NUM_SLABS)]

    def make(self, batch: Batch, slab: Slab | None = None) -> Gather:
        """A launch that is still to be posted; with a slab of its own or one that is free."""
        if slab is None:
            slab = self.take_slab()
        return Gather(batch, slab)

    def take_slab(self) -> Slab:
        """A slab that nothing uses."""
        return self._free.pop() if self._free else self._device.make_slab()

    def post(self, gather: Gather) -> str:
        """Begin to copy; returns the state.

        Raises:
            RuntimeError: the GPU refuses: not the request's fault, as other errors of ours would
                say, but the connection's.
        """
        batch, slab = gather.batch, gather.slab
        content = batch.places.view(np.uint8).ravel()
        slab.content[: len(content)] = content
        made = make_arguments()
        made.places, made.num_chunks = slab.address, batch.num_chunks
        made.num_runs = len(batch.runs)
        for number, run in enumerate(batch.runs):
            made.runs[number] = run
        gather.is_launched = True
        try:
            self._device.launch(made, slab)
        except UnsupportedError as error:
            raise RuntimeError(str(error)) from error
        return IN_PROGRESS

    def state(self, gather: Gather) -> str:
        """``DONE`` or ``IN_PROGRESS``.

        Raises:
            UnsupportedError: the copy has failed.
        """
        gather.has_ended = gather.has_ended or self._device.is_done(gather.slab)
        return DONE if gather.has_ended else IN_PROGRESS

    def num_merged(self, gather: Gather) -> int:
        """Pieces that it has copied."""
        return len(gather.batch.places)

    def release_read(self, gather: Gather) -> None:
        """Keep the slab for another launch, unless this one may still use it."""
        if gather.has_ended or not gather.is_launched:
            self._free.append(gather.slab)
