"""What the fence costs: our reads with and without it, interleaved, by the connector's own clock.

The time of a read is what the connector's transfer histogram takes: from posting it to knowing that
it has ended, the transfer thread's pauses included.  A pair of reads goes over the same blocks.
Beside that, the fence's own calls are timed without a thread: describe it, post it, see that it has
arrived, take it, give it back.
"""

import time
from collections.abc import Iterator

import msgspec
import numpy as np

from kv_connector import peer
from kv_connector.samples import OURS, VLLM, Sample
from kv_connector.shapes import BLOCK_SIZE, Shape, make_caches, memory_ranges, our_layout
from tests.kit.inquiry import ask
from tests.kit.servers import LOOPBACK
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import Load
from vllm_commext.nixl.transfer_thread import TransferThread
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import (
    FENCES,
    WorkerDescription,
    open_description,
)

COLUMNS = ("with", "without")
WITH, WITHOUT = OURS, VLLM
SHAPE = Shape(num_regions=1, num_blocks=1200, head_size=128)
NUM_LARGE, NUM_SMALL = 1000, 1
SMALL, LARGE = "a read of 1 block of 64 KiB", "a read of 1000 scattered blocks of 64 KiB"
ALONE = "the fence's calls alone"
COST = "1 block: with fence less without, pair by pair"
SHARE_OF_PAIRS = 5
READ_SECONDS = 60.0
LOOK_SECONDS = 0.0005


def case(transport: str, name: str) -> str:
    return f"{transport}, {name}"


class Reader:
    """Our worker's transfer thread, with a prefill worker of ours in a process of its own."""

    def __init__(self, source: peer.Source) -> None:
        self._source = source
        self._caches = make_caches(SHAPE)
        (self._cache,) = self._caches.values()
        config = ConnectorConfig(LOOPBACK, 1, transport_probe=False)
        agent, layout = NixlAgent(config), our_layout(SHAPE, self._caches, Rank(1, 0))
        agent.register(memory_ranges(self._caches), "DRAM", 0)
        local = LocalWorker("decode", peer.FACTS, layout)
        local.tables.register(agent)
        self._recorder = TransferRecorder()
        self._thread = TransferThread(agent, config, local, self._recorder)
        self._thread.start()
        self._count = 0

    def read(self, local: list[int], remote: list[int], *, fenced: bool) -> float:
        """Seconds of one read.

        Raises:
            RuntimeError: it failed, or brought the wrong bytes.
        """
        self._count += 1
        request = self._source.request(
            str(self._count), remote, BLOCK_SIZE * len(local), 0 if fenced else -1
        )
        load = Load(f"r{self._count}", request, (Blocks(0, local),), request.num_tokens)
        self._cache[local[-1]].zero_()
        self._thread.submit(load)
        self._wait(load.request_id)
        words = self._cache[local[-1]].numpy().view(np.uint64)
        if (words != remote[-1]).any():
            raise RuntimeError(f"the wrong bytes arrived in read {load.request_id}")
        record = self._recorder.take()
        assert record is not None
        (seconds,) = record["transfer_seconds"]
        return seconds

    def _wait(self, request_id: str) -> None:
        deadline = time.monotonic() + READ_SECONDS
        while time.monotonic() < deadline:
            outcomes = self._thread.outcomes.take()
            if outcomes.failed:
                raise RuntimeError(f"the read {request_id} failed")
            if request_id in outcomes.received:
                return
            time.sleep(LOOK_SECONDS)
        raise TimeoutError(f"the read {request_id} has not ended within {READ_SECONDS:g} s")

    def close(self) -> None:
        self._thread.stop()


def measure_fence(transport: str, num_pairs: int) -> list[Sample]:
    """Pairs of small reads, and a fifth as many of large ones."""
    layout = msgspec.msgpack.encode(our_layout(SHAPE, make_caches(SHAPE), Rank(1, 0)))
    with peer.running(peer.serve_ours, SHAPE.num_blocks, SHAPE.block_bytes, layout) as source:
        reader = Reader(source)
        samples = [
            *_alone(source, transport, num_pairs),
            *_pairs(reader, transport, SMALL, NUM_SMALL, num_pairs),
            *_pairs(reader, transport, LARGE, NUM_LARGE, max(num_pairs // SHARE_OF_PAIRS, 2)),
        ]
        reader.close()
    return samples


def _alone(source: peer.Source, transport: str, count: int) -> Iterator[Sample]:
    """The fence's calls, in this thread."""
    described = _describe(source)
    agent, scratch = NixlAgent(peer.config(1)), np.zeros(1 << 16, dtype=np.uint8)
    agent.register([(scratch.ctypes.data, scratch.nbytes)], "DRAM", 0)
    name = agent.add_peer(described.agent_metadata)
    agent.connect(name)
    own = FenceTable().table
    own.register(agent)
    fences = own.of_peer(agent, name, described.tables[FENCES])
    for number in range(-2, count):
        started = time.perf_counter()
        cells = own.take()
        assert cells is not None
        posting = Posting(agent, [fences.make_read(cells, [number % fences.num_records])])
        while (error := posting.look()) is None:
            pass
        own.give_back(cells)
        seconds = time.perf_counter() - started
        if error:
            raise RuntimeError(f"a fence was not read: {error}")
        if number >= 0:
            yield Sample(case(transport, ALONE), "us", WITH, 1e6 * seconds)
    agent.release_list(fences.prepared)
    agent.remove_peer(name)
    agent.close()


def _describe(source: peer.Source) -> WorkerDescription:
    request = wire.DescribeRequest(engine_id=peer.PREFILL, tp_rank=0)
    return open_description(ask(LOOPBACK, source.port, request))


def _pairs(
    reader: Reader, transport: str, name: str, num_blocks: int, count: int
) -> Iterator[Sample]:
    dice = np.random.default_rng(0)
    for number in range(-2, count):
        local, remote = (dice.permutation(SHAPE.num_blocks)[:num_blocks].tolist() for _ in range(2))
        found: dict[str, float] = {}
        for side in (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH):
            found[side] = 1e6 * reader.read(local, remote, fenced=side == WITH)
        if number < 0:
            continue  # the first reads connect and touch the memory
        for side, microseconds in found.items():
            yield Sample(case(transport, name), "us", side, microseconds)
        if name == SMALL:
            cost = found[WITH] - found[WITHOUT]
            yield Sample(case(transport, COST), "us", WITH, cost)
