"""From descriptors of a read to launches of the kernel that copies pieces of mapped memory; see
``csrc/cuda/gather_pieces.cu``.

Each launch is one of the handles that a ``Posting`` takes from ``Gatherer``."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.ipc import PinnedMemory
from vllm_commext.gpu.launch import Program, arguments_type
from vllm_commext.nixl.geometry.layout import Int32Array, UInt64Array
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS
from vllm_commext.nixl.transport.posting import in_pieces

Int64Array = npt.NDArray[np.int64]
MAX_PIECES = 8192
"""Of a launch: the first one is under way while the next one's addresses are worked out."""
MAX_RUNS = 16  # of a launch
CHUNK_BYTES = 16 << 10  # of a piece, that one warp copies at a time
MAX_PIECE_BYTES = 1 << 31


class Region(NamedTuple):
    """Memory of a peer: address there, bytes, address here."""

    address: int
    num_bytes: int
    mapped: int


class Run(NamedTuple):
    """Neighbouring pieces of one length: ``end`` is the first chunk behind it, ``first`` its first
    piece, ``parts`` the chunks of a piece."""

    end: int
    first: int
    parts: int
    num_bytes: int


@dataclass(frozen=True)
class Batch:
    """What one launch copies.

    Attributes:
        places: ``[n, 2]``, of each piece the address where it is and the one where it belongs.
    """

    places: Int64Array
    runs: tuple[Run, ...]

    @property
    def num_chunks(self) -> int:
        return self.runs[-1].end


@dataclass(frozen=True)
class Places:
    """Places of a list's descriptors, by row.

    Attributes:
        starts: number of each row's first descriptor.
        strides: bytes between neighbours in the row.
        row_size: descriptors of each row, 0 where rows differ.
    """

    starts: Int64Array
    addresses: Int64Array
    lengths: Int64Array
    strides: Int64Array
    row_size: int

    @classmethod
    def of(cls, rows: UInt64Array) -> Places:
        address, length, _, stride, count = rows.astype(np.int64).T
        row_size = int(count[0]) if len(count) and count.min() == count.max() else 0
        return cls(np.cumsum(count) - count, address, length, stride, row_size)

    @property
    def has_gaps(self) -> bool:
        return bool((self.strides != self.lengths).all())

    def at(self, indices: Int32Array) -> tuple[Int64Array, Int64Array]:
        numbers = indices.astype(np.int64)
        if self.row_size:
            row = numbers // self.row_size
            number = numbers - row * self.row_size
        else:
            row = self.starts.searchsorted(numbers, side="right") - 1
            number = numbers - self.starts[row]
        return self.addresses[row] + number * self.strides[row], self.lengths[row]


def mapped_rows(rows: UInt64Array, regions: Sequence[Region]) -> UInt64Array:
    """``[n, 5]`` strided descriptors of a peer at the addresses where their memory is mapped here;
    raises UnsupportedError."""
    found = rows.copy()
    known = sorted(regions)
    bases = [region.address for region in known]
    for number, row in enumerate(rows.tolist()):  # numbers of any size: they came from a peer
        address, length, _, stride, count = row
        region = known[max(0, bisect.bisect_right(bases, address) - 1)] if known else None
        end = address + (count - 1) * stride + length
        if region is None or not region.address <= address < end <= sum(region[:2]):
            raise UnsupportedError(
                f"expected all of the KV cache in the memory that is offered, got bytes {address} "
                f"to {end} outside of it"
            )
        if length > MAX_PIECE_BYTES:
            raise UnsupportedError(
                f"expected pieces of at most {MAX_PIECE_BYTES} bytes, got {length}"
            )
        found[number, 0] = address - region.address + region.mapped
    return found


def num_runs(local: Places, remote: Places, pairs: Pairs) -> int:
    if local.has_gaps or remote.has_gaps:
        return len(pairs.local)
    breaks = (np.diff(pairs.local) != 1) | (np.diff(pairs.remote) != 1)
    return int(np.count_nonzero(breaks)) + min(1, len(pairs.local))


def batches(local: Places, remote: Places, pairs: Pairs) -> Iterator[Batch]:
    for part in in_pieces(len(pairs.local), MAX_PIECES):
        target, lengths = local.at(pairs.local[part])
        source, _ = remote.at(pairs.remote[part])
        yield from batches_of(np.stack((source, target), axis=1), lengths)


def batches_of(places: Int64Array, lengths: Int64Array) -> Iterator[Batch]:
    """Pieces of one length side by side, and as many lengths in each batch as a launch takes."""
    ends = [len(lengths)]
    if lengths.min() < lengths.max():
        order = np.argsort(lengths, kind="stable")
        places, lengths = places[order], lengths[order]
        ends = [*(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for number in range(0, len(ends), MAX_RUNS):
        stops = ends[number : number + MAX_RUNS]
        first = ends[number - 1] if number else 0
        yield Batch(places[first : stops[-1]], _runs(lengths, first, stops))


def _runs(lengths: Int64Array, first: int, stops: Sequence[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    begin, chunk = first, 0
    for stop in stops:
        num_bytes = int(lengths[begin])
        parts = -(-num_bytes // CHUNK_BYTES)
        chunk += (stop - begin) * parts
        runs.append(Run(chunk, begin - first, parts, num_bytes))
        begin = stop
    return tuple(runs)


NAME = "gather_pieces"
NUM_THREADS = 512
WARPS = NUM_THREADS // launch.WARP
NUM_BLOCKS = 16
"""Multiprocessors that a read takes at most from what the engine computes meanwhile; on an H100
more of them are not faster."""
DEPTH = 8
SCRATCH_BYTES = 1 << 10
PLACES_BYTES = 16 * MAX_PIECES
NUM_SLABS = 4  # that are there from the start: pinning memory takes a while


def macros() -> dict[str, int]:
    return {
        "THREADS": NUM_THREADS,
        "CHUNK_BYTES": CHUNK_BYTES,
        "DEPTH": DEPTH,
        "MAX_RUNS": MAX_RUNS,
    }


def make_arguments() -> ctypes.Structure:
    return arguments_type(f"{NAME}.cu", MAX_RUNS=MAX_RUNS)()


class CudaSlab(PinnedMemory):
    """Host memory of one launch, which the GPU reads and writes, places first; and the event behind
    the launch."""

    def __init__(self) -> None:
        super().__init__(PLACES_BYTES + SCRATCH_BYTES)
        runtime = ipc.cuda_runtime()
        created = runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming)
        self.event = launch.check(created, "making an event")


class CudaDevice:
    """The current GPU of torch's.  Owned by one thread; launches have a stream of their own.

    Raises:
        UnsupportedError: the kernel cannot be compiled or loaded, or CUDA reports an error.
    """

    def __init__(self) -> None:
        self._device = launch.current_device()
        self._function = launch.load(
            Program(NAME), macros(), NUM_THREADS, self._device, programmatic=False
        )
        self._runtime = ipc.cuda_runtime()
        flags = self._runtime.cudaStreamNonBlocking
        created = self._runtime.cudaStreamCreateWithFlags(flags)
        self.stream = int(launch.check(created, "making a stream"))
        self._slabs: list[CudaSlab] = []

    def enter(self) -> None:
        launch.enter_context(self._function.driver, self._device.ordinal)
        relaxed = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        changed = self._runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
        launch.check(changed, "letting other threads capture graphs")

    def make_slab(self) -> CudaSlab:
        self._slabs.append(CudaSlab())
        return self._slabs[-1]

    def launch(self, arguments: ctypes.Structure, slab: CudaSlab) -> None:
        num_blocks = min(NUM_BLOCKS, -(-arguments.num_chunks // WARPS))
        self._function.launch(arguments, num_blocks, self.stream)
        recorded = self._runtime.cudaEventRecord(slab.event, self.stream)
        launch.check(recorded, "recording an event")

    def is_done(self, slab: CudaSlab) -> bool:
        (status,) = self._runtime.cudaEventQuery(slab.event)
        if status == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        launch.check((status,), "copying from the mapped memory")
        return True

    def open(self, handle: bytes) -> int:
        """Where a peer's allocation is mapped; raises ``UnsupportedError`` where it is not."""
        return ipc.open_handle(handle, "the prefill worker")

    def unmap(self, address: int) -> None:
        ipc.close_handle(address)

    def close(self) -> None:
        with contextlib.suppress(UnsupportedError):  # at a process's end CUDA may have gone before
            while self._slabs:
                slab = self._slabs.pop()
                launch.check(self._runtime.cudaEventDestroy(slab.event), "giving back an event")
                slab.close()
            launch.check(self._runtime.cudaStreamDestroy(self.stream), "giving back the stream")


class Gather:
    def __init__(self, batch: Batch, slab: CudaSlab) -> None:
        self.batch = batch
        self.slab = slab
        self.is_launched = self.has_ended = False


class Gatherer:
    """Posts and watches launches.  Owned by one thread."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free = [device.make_slab() for _ in range(NUM_SLABS)]

    def make(self, batch: Batch, slab: CudaSlab | None = None) -> Gather:
        if slab is None:
            slab = self.take_slab()
        return Gather(batch, slab)

    def take_slab(self) -> CudaSlab:
        return self._free.pop() if self._free else self._device.make_slab()

    def post(self, gather: Gather) -> str:
        """Begin to copy; returns the state; raises RuntimeError."""
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
        gather.has_ended = gather.has_ended or self._device.is_done(gather.slab)
        return DONE if gather.has_ended else IN_PROGRESS

    def release_read(self, gather: Gather) -> None:
        """Keep the slab for another launch, unless this one may still use it."""
        if gather.has_ended or not gather.is_launched:
            self._free.append(gather.slab)
