"""Reads as the planner says, on tags in numpy arrays, and what there is to say against them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.kit.descriptors import expand_rows
from tests.unit.nixl.cluster_cases import Case, Request
from tests.unit.nixl.reference_cache import Cache
from tests.unit.nixl.reference_layout import describe
from tests.unit.nixl.reference_meaning import Int64Array, differences
from vllm_commext.nixl.geometry.layout import CacheLayout, UInt64Array
from vllm_commext.nixl.geometry.plan import Blocks, Pairs, plan_read
from vllm_commext.nixl.geometry.topology import Rank, Sources, sources

LOCAL_ADDRESS, REMOTE_ADDRESS = 1 << 32, 1 << 20
Describe = Callable[[Cache, int, int], CacheLayout]


@dataclass(frozen=True)
class Arrived:
    """One decode rank and what it has read.

    Attributes:
        memory: its tags.
        num_writes: ``[bytes]`` how often each was written.
        num_bytes: what the planner says was read, a request at a time.
    """

    memory: Int64Array
    num_writes: Int64Array
    num_bytes: list[int]

    def read(
        self,
        requests: Sequence[Request],
        local: CacheLayout,
        remote: CacheLayout,
        theirs: Int64Array,
    ) -> None:
        """Read all requests from the memory of one prefill worker."""
        for number, request in enumerate(requests):
            pairs, lists = pairs_of(local, remote, request)
            own_rows, their_rows = lists[0][pairs.local], lists[1][pairs.remote]
            assert np.array_equal(own_rows[:, 1], their_rows[:, 1])
            own = offsets_of(own_rows, LOCAL_ADDRESS)
            self.memory[own] = theirs[offsets_of(their_rows, REMOTE_ADDRESS)]
            np.add.at(self.num_writes, own, 1)
            self.num_bytes[number] += pairs.num_bytes


def nothing_read(case: Case, rank: int) -> Arrived:
    memory = case.decode_memory(rank)
    return Arrived(memory, np.zeros(len(memory), dtype=np.int64), [0] * len(case.requests))


def pairs_of(
    local: CacheLayout, remote: CacheLayout, request: Request
) -> tuple[Pairs, list[UInt64Array]]:
    plan = plan_read(local, remote, local_device=0, remote_device=0)
    pairs = plan.pairs(
        [Blocks(table.first, table.block_ids) for table in request.local],
        [table.block_ids for table in request.remote],
        num_tokens=request.num_tokens,
        num_remote_tokens=request.num_remote_tokens,
    )
    return pairs, [expand_rows(plan.local_rows), expand_rows(plan.remote_rows)]


def offsets_of(rows: UInt64Array, address: int) -> Int64Array:
    """Offset of every byte of the descriptors, one after the other."""
    starts, lengths = rows[:, 0].astype(np.int64) - address, rows[:, 1].astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


def sources_of(case: Case, rank: int, describe: Describe = describe) -> Sources:
    """What a decode rank has to do with the prefill ranks."""
    splits = describe(case.decode, rank, LOCAL_ADDRESS).splits()
    num_sources = case.prefill.engine.tp_size
    return sources(splits, Rank(case.decode.engine.tp_size, rank), num_sources)


def read(case: Case, rank: int, describe: Describe = describe) -> Arrived:
    """All of the case's requests, as one decode rank reads them."""
    arrived = nothing_read(case, rank)
    local = describe(case.decode, rank, LOCAL_ADDRESS)
    for source in sources_of(case, rank, describe).read:
        remote = describe(case.prefill, source, REMOTE_ADDRESS)
        arrived.read(case.requests, local, remote, case.prefill_memory(source))
    return arrived


def faults(case: Case, describe: Describe = describe) -> list[str]:
    """What is wrong after all decode ranks have read all requests; nothing, one hopes."""
    found: list[str] = []
    for rank in range(case.decode.engine.tp_size):
        arrived = read(case, rank, describe)
        found += [f"decode rank {rank}: {fault}" for fault in faults_of_rank(case, rank, arrived)]
    return found + release_faults(
        [sources_of(case, rank, describe) for rank in range(case.decode.engine.tp_size)],
        case.prefill.engine.tp_size,
    )


def faults_of_rank(case: Case, rank: int, arrived: Arrived) -> list[str]:
    found: list[str] = []
    right = case.decode_memory(rank)
    allowed = np.concatenate([case.allowed(request) for request in case.requests])
    for request, num_bytes in zip(case.requests, arrived.num_bytes, strict=True):
        wanted = case.wanted(rank, request)
        right[wanted.offsets] = wanted.tags
        least, most = len(wanted.offsets), len(wanted.offsets) + len(case.allowed(request))
        if not least <= num_bytes <= most:
            found.append(f"{num_bytes} bytes are read, expected {least} to {most}")
    wrong = differences(right, arrived.memory, allowed)
    if len(wrong):
        found.append(f"{len(wrong)} bytes are wrong, first at offset {wrong[0]}")
    if arrived.num_writes.max() > 1:
        found.append("a byte is written twice")
    if arrived.num_writes.sum() != sum(arrived.num_bytes):
        found.append("not as many bytes are written as are counted")
    return found


def release_faults(readers: list[Sources], num_sources: int) -> list[str]:
    """Whether each prefill rank hears from exactly as many decode ranks as it is told to expect."""
    found: list[str] = []
    for source in range(num_sources):
        heard = [one for one in readers if source in one.num_consumers]
        expected = {one.num_consumers[source] for one in heard}
        if expected != {len(heard)}:
            found.append(f"prefill rank {source}: {len(heard)} releases, {expected} expected")
    return found
