"""Mapped reads without a GPU: the kernel's own source on this CPU, and host memory in place of
that of GPUs."""

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kit.host_kernels import compile_kernel, run_calls
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu.launch import Program
from vllm_commext.nixl.transport import gather
from vllm_commext.nixl.transport.gather import PLACES_BYTES, SCRATCH_BYTES, make_arguments
from vllm_commext.nixl.wire.description import HANDLE_BYTES, MappedOffer, MappedRegion

APART = 1 << 45
"""From where memory is to where a peer has it mapped: no address of the one is one of the other."""
NUM_THREADS, DEPTH = 64, 2
TOKEN = bytes(range(1, 200))


@functools.cache
def kernel() -> ctypes.CDLL:
    loaded = compile_kernel(
        Program(gather.NAME), {**gather.macros(), "THREADS": NUM_THREADS, "DEPTH": DEPTH}
    )
    assert loaded.args_bytes() == ctypes.sizeof(make_arguments())
    return loaded


def run_kernel(
    arguments: ctypes.Structure, num_blocks: int, num_workers: int = 2, seed: int = 0
) -> None:
    run_calls(kernel(), ctypes.byref(arguments), [num_blocks], num_workers, seed)


class HostSlab:
    def __init__(self) -> None:
        self.content = np.full(PLACES_BYTES + SCRATCH_BYTES, 0xAA, dtype=np.uint8)
        self.address: int = self.content.ctypes.data


class HostDevice:
    """Stands in for a ``gather.CudaDevice``; launches are run when somebody looks for their end,
    none while it ``is_held``. They end with ``error`` and handles open with ``refusal`` where those
    are set, and ``num_refused`` launches are still to be refused."""

    def __init__(self) -> None:
        self.opened: Counter[int] = Counter()
        self.is_held = self.is_closed = False
        self.error = self.refusal = ""
        self.num_launches = self.num_refused = 0
        self._waiting: dict[int, ctypes.Structure] = {}

    def enter(self) -> None: ...

    def make_slab(self) -> HostSlab:
        return HostSlab()

    def launch(self, arguments: ctypes.Structure, slab: HostSlab) -> None:
        assert slab.address == arguments.places
        assert slab.address not in self._waiting, "a slab is used twice"
        if self.num_refused:
            self.num_refused -= 1
            raise UnsupportedError("no launch now")
        self._waiting[slab.address] = arguments

    def is_done(self, slab: HostSlab) -> bool:
        if self.is_held:
            return False
        arguments = self._waiting.pop(slab.address)
        if self.error:
            raise UnsupportedError(self.error)
        self._translate(arguments, slab)
        run_kernel(arguments, 2)
        self.num_launches += 1
        return True

    def _translate(self, arguments: ctypes.Structure, slab: HostSlab) -> None:
        num_pieces = max(
            run.first + (run.end - begin) // run.parts
            for run, begin in zip(
                arguments.runs[: arguments.num_runs],
                [0, *(run.end for run in arguments.runs)],
                strict=False,
            )
        )
        places = slab.content[:PLACES_BYTES].view(np.int64).reshape(-1, 2)[:num_pieces]
        assert +self.opened, "a read of what is not mapped"
        assert (places[:, 0] >= min(+self.opened)).all()
        places[:, 0] -= APART

    def open(self, handle: bytes) -> int:
        """A handle is the address, as text."""
        if self.refusal:
            raise UnsupportedError(self.refusal)
        address = int(handle) + APART
        self.opened[address] += 1
        return address

    def unmap(self, address: int) -> None:
        assert self.opened[address] > 0
        self.opened[address] -= 1

    def forget(self) -> None:
        self._waiting.clear()

    def close(self) -> None:
        assert not self._waiting
        assert not +self.opened
        self.is_closed = True


class HostOffer:
    def __init__(self, rows: Sequence[Any], place: str) -> None:
        self._token = np.frombuffer(TOKEN, dtype=np.uint8).copy()
        regions = [
            MappedRegion(
                address=row.ctypes.data,
                num_bytes=row.nbytes,
                handle=str(row.ctypes.data).zfill(HANDLE_BYTES).encode(),
            )
            for row in (self._token, *rows)
        ]
        self.offer = MappedOffer(
            place=place, regions=regions, token_address=self._token.ctypes.data, token=TOKEN
        )

    def spoil(self) -> None:
        self._token[7] ^= 1
