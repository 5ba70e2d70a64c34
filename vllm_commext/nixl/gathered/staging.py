"""Staging memory of a worker: the slots that it packs for others, those that it reads others' into,
and what copies pieces to and from them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_commext.nixl.config import MAX_SLOTS, OFF, ConnectorConfig
from vllm_commext.nixl.geometry.layout import Int32Array, UInt64Array, strided_row
from vllm_commext.nixl.geometry.plan import Int64Array
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.mapped.gather import Batch, CudaDevice, Gatherer, batches_of
from vllm_commext.nixl.transport.agent import DONE, NixlAgent
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.transport.tables import Table
from vllm_commext.nixl.wire.description import SLOTS, StagingOffer

GRAIN_BYTES, FINE_BYTES = 1 << 20, 1 << 13
"""In which NIXL's lists have a slot, once in each: neighbours are merged, so a part is read as one
descriptor or two and little more than it has."""
THREAD_BLOCKS = 32
"""Of a copy to or from a slot: 671 GB/s on an H100, 457 with the 16 of a copy between GPUs."""
NUM_CELLS = 256
"""Looks at peers' slots that one worker can have under way."""


def copies_of(sources: Int64Array, targets: Int64Array, lengths: Int64Array) -> list[Batch]:
    """What is to be launched to copy pieces from where each is to where it belongs."""
    places = np.empty((len(lengths), 2), dtype=np.int64)
    places[:, 0], places[:, 1] = sources, targets
    return list(batches_of(places, lengths))


class HostCopies:
    """Copies pieces on a CPU; takes the place of a ``Gatherer``, and has copied when it is asked
    to."""

    def enter(self) -> None:
        """Nothing is to be entered."""

    def make(self, batch: Batch) -> Batch:
        return batch

    def post(self, batch: Batch) -> str:
        """Copy; returns the state."""
        stops = [run.first for run in batch.runs[1:]] + [len(batch.places)]
        for run, stop in zip(batch.runs, stops, strict=True):
            for source, target in batch.places[run.first : stop].tolist():
                ctypes.memmove(target, source, run.num_bytes)
        return DONE

    def state(self, _: Batch) -> str:
        return DONE

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """What torch does inside is done at its end."""
        return contextlib.nullcontext()

    def num_merged(self, batch: Batch) -> int:
        return len(batch.places)

    def release_read(self, _: Batch) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class CudaCopies(Gatherer):
    """Copies pieces by the kernel, on a stream of its own.

    Args:
        num_slots: that are packed or unpacked at a time; host memory is pinned for all of them
            now, for it takes a while.

    Raises:
        UnsupportedError: this GPU has no such kernel.
    """

    def __init__(self, num_slots: int, num_blocks: int = THREAD_BLOCKS) -> None:
        self._cuda = CudaDevice(num_blocks)
        super().__init__(self._cuda, num_slots)

    def enter(self) -> None:
        """Let the calling thread use it."""
        self._cuda.enter()

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """What torch does inside is behind the copies so far, and done at its end."""
        stream = torch.cuda.ExternalStream(self._cuda.stream)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        self._cuda.close()


_FINE_PER_GRAIN = GRAIN_BYTES // FINE_BYTES


@dataclass(frozen=True)
class Place:
    """Memory of slots, one behind the other."""

    address: int
    slot_bytes: int
    num_slots: int

    @property
    def grains_per_slot(self) -> int:
        return self.slot_bytes // GRAIN_BYTES

    def slot(self, number: int) -> int:
        """Address of a slot."""
        return self.address + number * self.slot_bytes

    def rows(self, device_id: int) -> UInt64Array:
        """Descriptors of all of it, in grains, then in fine ones."""
        count = self.num_slots * self.grains_per_slot
        rows = [
            strided_row(address=self.address, num_bytes=size, count=number, device_id=device_id)
            for size, number in ((GRAIN_BYTES, count), (FINE_BYTES, count * _FINE_PER_GRAIN))
        ]
        return np.concatenate(rows)

    def grains(self, number: int, num_bytes: int) -> Int32Array:
        """Indices of the descriptors of a slot's first bytes."""
        first, (whole, rest) = number * self.grains_per_slot, divmod(num_bytes, GRAIN_BYTES)
        fine = self.num_slots * self.grains_per_slot + (first + whole) * _FINE_PER_GRAIN
        grains = np.arange(first, first + whole, dtype=np.int32)
        return np.append(grains, np.arange(fine, fine - -rest // FINE_BYTES, dtype=np.int32))


class Scratch:
    """A slot's worth of memory on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._is_taken = False

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def taken(self) -> Generator[bool]:
        """Wait until nobody uses it."""
        while self._is_taken:
            yield True
        self._is_taken = True

    def give_back(self) -> None:
        self._is_taken = False


class Incoming:
    """Slots that others' are read into.

    Attributes: ``place``: where they are.  ``prepared``: NIXL's list of them.
    """

    def __init__(self, agent: NixlAgent, place: Place, memory_type: str, device_id: int) -> None:
        self.place = place
        agent.register(
            [(place.address, place.num_slots * place.slot_bytes)], memory_type, device_id
        )
        self.prepared = agent.prepare("", place.rows(device_id), memory_type)
        self._free = list(range(place.num_slots))

    def take(self) -> int | None:
        """A slot that nothing uses, None while there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Nothing is read into a slot any more, or out of it."""
        self._free.append(slot)


class Gathering:
    """One worker's side of gathered reads, where the configuration has them.

    Attributes:
        copies: copies pieces.
        table: ``words`` for peers; it has the cells to read others'.
        offer: this worker's slots, None where it packs nothing.
        min_pieces: of a read that is gathered.
        words: what is in them, see ``gathered.slots``.
        regions: this worker's cache, ``(address, num_bytes)`` of each allocation.
        scratch: where parts are compressed from, None where none are.

    Args:
        device: the cache's.
        copies: by default what the device has.

    Raises:
        UnsupportedError: pieces cannot be copied on this device.
    """

    def __init__(self, config: ConnectorConfig, device: torch.device, copies: Any = None) -> None:
        on_gpu = device.type == "cuda"
        self.copies = copies or (CudaCopies(2 * config.gather_slots) if on_gpu else HostCopies())
        self.words = np.zeros((1, MAX_SLOTS), dtype=np.uint64)
        self.table = Table(SLOTS, self.words, NUM_CELLS)
        self.offer: StagingOffer | None = None
        self.regions: Sequence[tuple[int, int]] = ()
        self.min_pieces = config.gather_min_pieces
        self.scratch: Scratch | None = None
        if config.wire_compression != OFF:
            self.scratch = Scratch(config.gather_slot_bytes, device)
        self._config = config
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._incoming: Incoming | None = None
        self._has_entered = False

    @property
    def _kind(self) -> tuple[str, int]:
        return "DRAM" if self._device.type == "cpu" else "VRAM", self._device.index or 0

    def prepare(self, agent: NixlAgent, ranges: Sequence[tuple[int, int]]) -> None:
        """Offer slots for pieces of these ``(address, num_bytes)``, this worker's cache."""
        place = self._allocate()
        num_bytes = place.num_slots * place.slot_bytes
        agent.register([(place.address, num_bytes)], *self._kind)
        self.regions = ranges
        self.offer = StagingOffer(
            address=place.address,
            slot_bytes=place.slot_bytes,
            num_slots=place.num_slots,
            compresses=self.scratch is not None,
        )

    def enter(self) -> None:
        """Let the calling thread copy; safe to repeat."""
        if not self._has_entered:
            self.copies.enter()
            self._has_entered = True

    def incoming(self, agent: NixlAgent) -> Incoming:
        """Slots that others' are read into, made at the first call."""
        if self._incoming is None:
            self.enter()  # or to allocate would disturb graphs that others capture
            self._incoming = Incoming(agent, self._allocate(), *self._kind)
            logger.info("gathered reads: %s", self._incoming.place)
        return self._incoming

    def copy(self, sources: Int64Array, targets: Int64Array, lengths: Int64Array) -> Posting:
        """Begin to copy pieces from where each is to where it belongs; see ``Posting``."""
        return self.start(copies_of(sources, targets, lengths))

    def start(self, batches: Sequence[Batch], base: int = 0) -> Posting:
        """The same, worked out before; once.

        Args:
            base: address that the sources count from.
        """
        for batch in batches:
            batch.places[:, 0] += base
        return Posting(self.copies, map(self.copies.make, batches))

    def slot(self, place: Place, number: int) -> torch.Tensor:
        """The memory of a slot, ``[slot_bytes]`` uint8."""
        memory = next(one for one in self._memory if one.data_ptr() == place.address)
        return memory.view(place.num_slots, -1)[number]

    def close(self, agent: NixlAgent) -> None:
        """Give back what nothing uses any more."""
        if self._incoming is not None:
            agent.release_list(self._incoming.prepared)
            self._incoming = None
        self.copies.close()

    def _allocate(self) -> Place:
        config = self._config
        num_bytes = config.gather_slots * config.gather_slot_bytes
        self._memory.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return Place(self._memory[-1].data_ptr(), config.gather_slot_bytes, config.gather_slots)


def gathering_of(config: ConnectorConfig, device: torch.device) -> Gathering | None:
    """What a worker packs and unpacks with, None where that is not wanted or cannot be had."""
    if not config.gathered_reads:
        return None
    try:
        return Gathering(config, device)
    except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
        logger.warning("gathered_reads unavailable on this worker: %s; pieces are read", error)
        return None
