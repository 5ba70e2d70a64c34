"""How fast a peer's cache can be read, measured once after the first peer of a process is reached.

Some fabrics quietly fall back to TCP; requests then take a hundred times as long and nothing says
so. The bytes go to memory of their own and are thrown away. No request waits for the measurement:
it goes on, one read at a time, while there is nothing else to do."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_commext.nixl.geometry.layout import CacheLayout, UInt64Array, strided_row
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent

PIECE_BYTES = 1 << 20
PROBE_BYTES = (1 << 21, 1 << 26)
"""A short read first; the long one only where the short one says that it will not take long."""
NUM_READS = 3  # the first one maps memory; the fastest counts
MAX_SECONDS = 0.05  # no read is begun that is expected to take longer
END_SECONDS = 0.5  # a read that has not ended by then is given up
SLOW_BYTES_PER_SECOND = 10e9
"""Below this, memory of a GPU is not read over NVLink, PCIe peer access or RDMA."""


@dataclass(frozen=True)
class Speed:
    num_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds


def longest_run(layout: CacheLayout) -> tuple[int, int]:
    runs = [
        (family.geometry.row_stride * family.geometry.num_rows, family.base_addresses[0])
        for family in layout.families
    ]
    # The last row may be shorter than the distance between rows.
    num_bytes, address = max(runs)
    rows = max(family.geometry.num_rows for family in layout.families)
    return address, num_bytes - num_bytes // rows


@dataclass(frozen=True)
class Memory:
    """A run of memory; ``owner`` keeps it alive."""

    address: int
    num_bytes: int
    memory_type: str
    device_id: int
    owner: object = None

    def pieces(self, count: int) -> UInt64Array:
        return strided_row(
            address=self.address, num_bytes=PIECE_BYTES, count=count, device_id=self.device_id
        )


def measure(
    agent: NixlAgent, peer: str, local: Memory, remote: Memory, end_seconds: float = END_SECONDS
) -> Generator[None, None, Speed | None]:
    """Read from a peer's memory, one read after each turn; nothing is under way during a turn.
    Returns None where the memory is too small or a read does not end in time.

    ``local`` is used by nothing else; both are registered.
    """
    speed: Speed | None = None
    for num_bytes in PROBE_BYTES:
        count = min(num_bytes, local.num_bytes, remote.num_bytes) // PIECE_BYTES
        if not count or (speed and num_bytes / speed.bytes_per_second > MAX_SECONDS):
            break
        own = agent.prepare("", local.pieces(count), local.memory_type)
        theirs = agent.prepare(peer, remote.pieces(count), remote.memory_type)
        indices = np.arange(count, dtype=np.int32)
        times: list[float] = []
        is_open = False
        try:
            for _ in range(NUM_READS):
                yield
                is_open = True
                read = agent.make_read(own, indices, theirs, indices)
                seconds = _time_read(agent, read, end_seconds)
                if seconds is None:
                    _kept.append(local)  # a read that NIXL was told to drop can still write
                    return None
                is_open = False
                times.append(seconds)
        finally:
            for prepared in () if is_open else (own, theirs):
                agent.release_list(prepared)
        speed = Speed(count * PIECE_BYTES, min(times))
    return speed


_kept: list[Memory] = []


def _time_read(agent: NixlAgent, read: object, end_seconds: float) -> float | None:
    started = time.perf_counter()
    state = agent.post(read)
    while state == IN_PROGRESS and time.perf_counter() - started < end_seconds:
        state = agent.state(read)
    seconds = time.perf_counter() - started
    if state != DONE:
        return None
    agent.release_read(read)
    return seconds


def describe(speed: Speed, transports: Sequence[str]) -> str:
    names = ", ".join(transports) or "a transport that UCX does not tell (UCX_LOG_LEVEL is set)"
    return (
        f"self-probe: {speed.num_bytes >> 20} MiB in {speed.seconds * 1e3:.3g} ms, "
        f"{speed.bytes_per_second / 1e9:.3g} GB/s, over {names}"
    )
