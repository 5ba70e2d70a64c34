"""Reads of prefill workers' memory through a mapping, and this worker's offer of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from vllm_commext.anonymous_memory import host_identity
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc
from vllm_commext.gpu.ipc import allocation_of
from vllm_commext.nixl.config import AUTO, ConnectorConfig
from vllm_commext.nixl.geometry.layout import strided_row
from vllm_commext.nixl.geometry.plan import Pairs, ReadPlan
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.transport.gather import (
    PLACES_BYTES,
    Batch,
    CudaDevice,
    Gatherer,
    Places,
    Region,
    Run,
    batches,
    mapped_rows,
    num_runs,
)
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.wire.description import MappedOffer, MappedRegion

LARGE_BYTES = 8 << 20
"""Of pieces as long as these the copy engines behind NIXL move more a second than a kernel loads,
by about as much as NIXL takes for a piece: 3.5 us on an H100."""
CHECK_SECONDS = 2.0
CHECK_WAIT_SECONDS = 50e-6
NAMESPACE = Path("/proc/self/ns/ipc")


def place_of_process() -> str:
    """The same for processes that can open each other's handles, as far as can be told before: of
    one running kernel and one IPC namespace."""
    return f"{host_identity()} {NAMESPACE.readlink()}"


class Mapper:
    """Opens peers' memory.  Owned by one thread."""

    def __init__(self, device: CudaDevice, place: str) -> None:
        self._device = device
        self._place = place
        self._gatherer = Gatherer(device)

    def open(self, offer: MappedOffer | None, plan: ReadPlan) -> MappedReader:
        """Map a worker's memory, and see that it is the worker's; raises UnsupportedError."""
        if offer is None:
            raise UnsupportedError(
                "it offers no mapped memory: mapped_reads is off or unsupported there, or it is "
                "older"
            )
        if offer.place != self._place:
            raise UnsupportedError("it is on another host, or in another IPC namespace of this one")
        self._device.enter()
        opened: list[Region] = []
        try:
            for region in offer.regions:
                address = self._device.open(region.handle)
                opened.append(Region(region.address, region.num_bytes, address))
            self._check(offer, opened)
            remote = Places.of(mapped_rows(plan.remote_rows, opened))
        except _UnfinishedError:
            raise  # what is mapped may still be read
        except Exception:
            self._unmap(opened)
            raise
        return MappedReader(
            self._gatherer, Places.of(plan.local_rows), remote, lambda: self._unmap(opened)
        )

    def close(self) -> None:
        self._device.close()

    def _unmap(self, regions: list[Region]) -> None:
        while regions:
            self._device.unmap(regions.pop().mapped)

    def _check(self, offer: MappedOffer, opened: list[Region]) -> None:
        size = len(offer.token)
        rows = strided_row(address=offer.token_address, num_bytes=size, count=1)
        source = int(mapped_rows(rows, opened)[0, 0])
        slab = self._gatherer.take_slab()
        scratch = slab.content[PLACES_BYTES : PLACES_BYTES + size]
        scratch[:] = 0
        places = np.array([[source, slab.address + PLACES_BYTES]], dtype=np.int64)
        gather = self._gatherer.make(Batch(places, (Run(1, 0, 1, size),)), slab)
        posting = Posting(self._gatherer, [gather])
        deadline = time.monotonic() + CHECK_SECONDS
        while (error := posting.look()) is None:
            if time.monotonic() >= deadline:
                raise _UnfinishedError(
                    f"expected {size} bytes of its memory within {CHECK_SECONDS:g} s, got none"
                )
            time.sleep(CHECK_WAIT_SECONDS)
        if error:
            raise UnsupportedError(error)
        if scratch.tobytes() != offer.token:
            raise UnsupportedError(
                "data mismatch in the self-test of mapped memory: this machine maps "
                "the memory of peers and does not deliver from it"
            )


class _UnfinishedError(UnsupportedError):
    """A read has not ended, and may still go on."""


class MappedReader:
    """Reads one prefill worker's cache; see ``Reader``."""

    name = "a mapped read"
    is_mapped = True

    def __init__(
        self, gatherer: Gatherer, local: Places, remote: Places, unmap: Callable[[], None]
    ) -> None:
        self._gatherer = gatherer
        self._local = local
        self._remote = remote
        self._unmap = unmap

    def suits(self, pairs: Pairs) -> bool:
        return pairs.num_bytes < LARGE_BYTES * num_runs(self._local, self._remote, pairs)

    def post(self, pairs: Pairs) -> Posting:
        found = batches(self._local, self._remote, pairs)
        return Posting(self._gatherer, (self._gatherer.make(batch) for batch in found))

    def close(self) -> None:
        self._unmap()


TOKEN_BYTES = 256
OTHERWISE = "reads go through NIXL"


class Mapped:
    """One worker's mapper and offer, None where the configuration or the machine has none."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._is_wanted = config.mapped_reads == AUTO
        self._token_address = 0
        self.mapper: Mapper | None = None
        self.offer: MappedOffer | None = None

    def prepare(self, ranges: Sequence[tuple[int, int]], *, is_on_gpu: bool) -> None:
        """Make mapper and offer for ``(address, num_bytes)`` ranges, or log why there is none."""
        if not self._is_wanted:
            return
        if not is_on_gpu:
            logger.debug("mapped_reads: the KV cache is in host memory; %s", OTHERWISE)
            return
        try:
            self.mapper = Mapper(CudaDevice(), place_of_process())
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            logger.warning("mapped_reads unavailable on this worker: %s; %s", error, OTHERWISE)
        try:
            self.offer = self._make_offer(ranges)
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            self.close()
            ipc.forget_error()
            logger.warning("mapped_reads: others cannot map this worker's cache: %s", error)

    def close(self) -> None:
        address, self._token_address = self._token_address, 0
        self.offer = None
        if address:
            ipc.free(address)

    def _make_offer(self, ranges: Sequence[tuple[int, int]]) -> MappedOffer:
        token = os.urandom(TOKEN_BYTES)
        # Whole pieces of memory: smaller ones are shared together with their neighbours.
        self._token_address = ipc.allocate(ipc.round_up(TOKEN_BYTES))
        ipc.write(self._token_address, token)
        addresses = [self._token_address, *(address for address, _ in ranges)]
        found = dict(map(allocation_of, addresses))
        return MappedOffer(
            place=place_of_process(),
            regions=[
                MappedRegion(address=base, num_bytes=size, handle=ipc.export_handle(base))
                for base, size in found.items()
            ],
            token_address=self._token_address,
            token=token,
        )
