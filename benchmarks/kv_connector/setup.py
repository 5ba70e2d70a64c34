"""Making a new peer ready: from its decoded description to the prepared NIXL lists.

Not counted on either side: the exchange on the side channel and NIXL's loading of the peer's
metadata, which is the same call for both.  Our time holds the plan, the list of the local blocks,
the list of the peer's blocks and the one of its fences.  vLLM's holds what ``add_remote_agent``
does, and where local blocks are listed, ``register_local_xfer_handler`` or the split for several
ranks with its lists.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_connector import in_tree
from kv_connector.samples import OURS, VLLM, Sample, cpu_milliseconds
from kv_connector.shapes import (
    Shape,
    as_bytes,
    kv_cache_config,
    make_caches,
    memory_ranges,
    our_layout,
)
from tests.kit.servers import LOOPBACK
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.plan import Blocks, ReadPlan, plan_read
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.transport.agent import DONE, NixlAgent

FIRST_PEER = "a new peer, local and remote list"
NEXT_PEER = "each of three further peers, remote list"
NUM_FURTHER = 3
SPLIT = "local lists for a peer of 4 ranks"
NUM_RANKS = 4
LOCAL_BLOCK, REMOTE_BLOCK = 3, 7


class Bench:
    """A decode worker of each connector on the same tensors, and the memory of a prefill engine of
    one rank and of one of four, all registered with one agent."""

    def __init__(self, model: Path, shape: Shape) -> None:
        self.shape = shape
        self.caches = make_caches(shape)
        self.sources = {
            tp_size: [make_caches(shape, tp_size) for _ in range(tp_size)]
            for tp_size in (1, NUM_RANKS)
        }
        self.prefill, self.agent = _new_agent(), _new_agent()
        everything = [one for group in self.sources.values() for one in group]
        self.prefill.register([r for one in everything for r in memory_ranges(one)], "DRAM", 0)
        self.agent.register(memory_ranges(self.caches), "DRAM", 0)
        self.fences, theirs = FenceTable().table, FenceTable().table
        self.fences.register(self.agent)
        theirs.register(self.prefill)
        self.place = theirs.place
        self.name = self.agent.add_peer(self.prefill.metadata())
        self.agent.connect(self.name)
        self.layout = our_layout(shape, self.caches, Rank(1, 0))
        self.layouts = {
            tp_size: [our_layout(shape, one, Rank(tp_size, r)) for r, one in enumerate(ranks)]
            for tp_size, ranks in self.sources.items()
        }
        self.worker = in_tree.make_worker(model, self.caches, kv_cache_config(shape))
        self.worker.nixl_wrapper.add_remote_agent(self.prefill.metadata())

    def plan(self, tp_size: int, rank: int) -> ReadPlan:
        source = self.layouts[tp_size][rank]
        return plan_read(self.layout, source, local_device=0, remote_device=0)

    def metadata(self, engine_id: str, tp_size: int, rank: int) -> Any:
        addresses = [cache.data_ptr() for cache in self.sources[tp_size][rank].values()]
        metadata = self.prefill.metadata()
        found = in_tree.peer_metadata(self.worker, self.shape, addresses, metadata, tp_size)
        found.engine_id = engine_id
        return found


def _new_agent() -> NixlAgent:
    return NixlAgent(ConnectorConfig(side_channel_host=LOOPBACK, side_channel_port=1))


def our_peer(bench: Bench, *, is_first: bool) -> list[Any]:
    """The lists of a peer: local, remote, fences."""
    agent = bench.agent
    plan = bench.plan(1, 0)
    lists = [agent.prepare("", plan.local_rows, "DRAM")] if is_first else []
    lists += [agent.prepare(bench.name, plan.remote_rows, "DRAM")]
    return [*lists, bench.fences.of_peer(agent, bench.name, bench.place).prepared]


def vllm_peer(worker: Any, metadata: Any, *, is_first: bool) -> list[Any]:
    """The local list; the worker itself keeps the peer's."""
    lists = [worker.register_local_xfer_handler(worker.block_size)[0]] if is_first else []
    worker.add_remote_agent(metadata)
    return lists


def our_split(bench: Bench) -> tuple[float, list[Any]]:
    """CPU milliseconds of four plans and the local lists, and these."""

    def split() -> list[Any]:
        plans = [bench.plan(NUM_RANKS, rank) for rank in range(NUM_RANKS)]
        return [bench.agent.prepare("", plan.local_rows, "DRAM") for plan in plans]

    return cpu_milliseconds(split)


def vllm_split(bench: Bench, tp_mapping: Any) -> tuple[float, list[Any]]:
    """CPU milliseconds of the worker's own split and of its lists, and these."""
    worker, wrapper = bench.worker, bench.worker.nixl_wrapper

    def split() -> list[Any]:
        parts = worker._build_local_splits_from_plan(
            tp_mapping, worker.src_blocks_data, worker.num_descs
        )
        return [
            wrapper.prep_xfer_dlist("NIXL_INIT_AGENT", wrapper.get_xfer_descs(part, "DRAM"))
            for part in parts
        ]

    return cpu_milliseconds(split)


def measure_setup(model: Path, shape: Shape, rounds: int) -> list[Sample]:
    """Both variants in turn, after a check that the lists of both read the right bytes."""
    bench = Bench(model, shape)
    tp_mapping = check(bench)
    samples: list[Sample] = []
    for number in range(rounds):
        samples += _peer_round(bench, f"{number}")
        samples += _split_round(bench, tp_mapping)
    return samples


def _peer_round(bench: Bench, number: str) -> Iterator[Sample]:
    for case, count in ((FIRST_PEER, 1), (NEXT_PEER, NUM_FURTHER)):
        is_first = case == FIRST_PEER
        yield Sample(case, "ms of CPU", OURS, _our_peers(bench, count, is_first=is_first))
        engine_ids = [f"{case} {number} {place}" for place in range(count)]
        yield Sample(case, "ms of CPU", VLLM, _vllm_peers(bench, engine_ids, is_first=is_first))


def _our_peers(bench: Bench, count: int, *, is_first: bool) -> float:
    cost, lists = cpu_milliseconds(
        lambda: [our_peer(bench, is_first=is_first) for _ in range(count)]
    )
    _release(bench.agent, [one for peer in lists for one in peer])
    return cost / count


def _vllm_peers(bench: Bench, engine_ids: Sequence[str], *, is_first: bool) -> float:
    worker, told = bench.worker, [bench.metadata(name, 1, 0) for name in engine_ids]
    with in_tree.known_agent(worker, bench.name):
        cost, lists = cpu_milliseconds(
            lambda: [vllm_peer(worker, metadata, is_first=is_first) for metadata in told]
        )
    for name in engine_ids:
        in_tree.forget(worker, name)
    for handle in (one for peer in lists for one in peer):
        worker.nixl_wrapper.release_dlist_handle(handle)
    return cost / len(told)


def _split_round(bench: Bench, tp_mapping: Any) -> Iterator[Sample]:
    cost, lists = our_split(bench)
    _release(bench.agent, lists)
    yield Sample(SPLIT, "ms of CPU", OURS, cost)
    cost, lists = vllm_split(bench, tp_mapping)
    for one in lists:
        bench.worker.nixl_wrapper.release_dlist_handle(one)
    yield Sample(SPLIT, "ms of CPU", VLLM, cost)


def _release(agent: NixlAgent, lists: Sequence[Any]) -> None:
    for one in lists:
        agent.release_list(one)


def check(bench: Bench) -> Any:
    """Read a block from four ranks by the lists of each; returns vLLM's mapping to four ranks.

    Raises:
        RuntimeError: a variant's lists read the wrong bytes.
    """
    names = bench.shape.layer_names
    for name in (names[0], names[-1]):
        for rank in bench.sources[NUM_RANKS]:
            content = np.random.default_rng().integers(0, 256, bench.shape.block_bytes // NUM_RANKS)
            block = rank[name][REMOTE_BLOCK]
            as_bytes(block)[:] = torch.from_numpy(content.astype(np.uint8)).view_as(as_bytes(block))
    _read_ours(bench)
    _compare(bench, OURS)
    tp_mapping = _read_vllm(bench)
    _compare(bench, VLLM)
    return tp_mapping


def _read_ours(bench: Bench) -> None:
    for rank in range(NUM_RANKS):
        plan = bench.plan(NUM_RANKS, rank)
        local = bench.agent.prepare("", plan.local_rows, "DRAM")
        remote = bench.agent.prepare(bench.name, plan.remote_rows, "DRAM")
        blocks = [Blocks(0, [LOCAL_BLOCK])], [[REMOTE_BLOCK]]
        pairs = plan.pairs(*blocks, num_tokens=1, num_remote_tokens=1)
        read = bench.agent.make_read(local, pairs.local, remote, pairs.remote)
        bench.agent.post(read)
        while bench.agent.state(read) != DONE:
            os.sched_yield()
        bench.agent.release_read(read)
        _release(bench.agent, (local, remote))


def _read_vllm(bench: Bench) -> Any:
    """By the worker's own handshake and read."""
    worker, engine_id = bench.worker, "four ranks"
    with in_tree.known_agent(worker, bench.name):
        for rank in range(NUM_RANKS):
            metadata = bench.metadata(engine_id, NUM_RANKS, rank)
            in_tree.add_peer(worker, metadata, tp_rank=rank, tp_size=NUM_RANKS)
    tp_mapping = worker.tp_mappings[engine_id]
    worker.start_load_kv(in_tree.read_request("r", engine_id, [LOCAL_BLOCK], [REMOTE_BLOCK]))
    while "r" not in worker.get_finished()[1]:
        os.sched_yield()
    in_tree.forget(worker, engine_id)
    return tp_mapping


def _compare(bench: Bench, variant: str) -> None:
    """Each rank holds one head of a block; then spoil what was read."""
    names = bench.shape.layer_names
    for name in (names[0], names[-1]):
        own = bench.caches[name][LOCAL_BLOCK]
        heads = [rank[name][REMOTE_BLOCK][0] for rank in bench.sources[NUM_RANKS]]
        if not torch.equal(as_bytes(own), as_bytes(torch.stack(heads))):
            raise RuntimeError(f"the lists of {variant} read the wrong bytes in {name}")
        own.zero_()
