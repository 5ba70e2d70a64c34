"""How long the engine's thread stands still while a read of many descriptors is posted.

The engine's thread is a loop that looks at the clock, as tight as Python makes it.  It starts the
read as each connector's worker does when a step begins, and every few milliseconds it asks what has
ended, as at a step's end.  The longest time between two looks is what counts; where other programs
run, the time that the thread waited for a core is taken off in a second figure.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kv_connector import in_tree, peer
from kv_connector.samples import OURS, VLLM, Sample
from kv_connector.shapes import (
    BLOCK_SIZE,
    Caches,
    Shape,
    kv_cache_config,
    make_caches,
    memory_ranges,
    our_layout,
)
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import Load
from vllm_commext.nixl.transfer_thread import TransferThread
from vllm_commext.nixl.transport.agent import NixlAgent

STEP_SECONDS = 0.005
READ_SECONDS = 120.0
QUIET_SECONDS = 0.2
NUM_WARM_BLOCKS = 64
STALL = "longest stall of the engine's thread"
OWN_STALL = f"{STALL}, without waits for a core"
CPU = "CPU of the engine's thread to start the read"
WHOLE = "until the engine knows that it is read"
QUIET = "nothing is read: longest stall"

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Watched:
    """Milliseconds: the longest stall, the same without the waits for a core, CPU time to begin,
    time until the end."""

    stall: float
    own_stall: float
    cpu: float
    whole: float


class Clock:
    """Time of the thread that makes it, with and without what it spent waiting for a core."""

    def __init__(self) -> None:
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def look(self) -> tuple[float, float]:
        """Seconds, and seconds without the waiting."""
        waited = int(os.pread(self._schedstat, 80, 0).split()[1]) / 1e9
        now = time.perf_counter()
        return now, now - waited

    def close(self) -> None:
        os.close(self._schedstat)


def watch(begin: Callable[[], Any], ended: Callable[[], bool]) -> Watched:
    """Run the engine's loop from a read's beginning to its end."""
    clock = Clock()
    with contextlib.closing(clock):
        started, own = clock.look()
        cpu = time.thread_time()
        begin()
        cpu = time.thread_time() - cpu
        return _watch_end(clock, (started, own), cpu, ended)


def _watch_end(
    clock: Clock, started: tuple[float, float], cpu: float, ended: Callable[[], bool]
) -> Watched:
    stall, own_stall, last, step = 0.0, 0.0, started, started[0] + STEP_SECONDS
    while True:
        now = clock.look()
        stall, own_stall = max(stall, now[0] - last[0]), max(own_stall, now[1] - last[1])
        last = now
        if now[0] < step:
            continue
        step = now[0] + STEP_SECONDS
        if ended():
            return Watched(1e3 * stall, 1e3 * own_stall, 1e3 * cpu, 1e3 * (now[0] - started[0]))
        if now[0] - started[0] > READ_SECONDS:
            raise TimeoutError(f"a read has not ended within {READ_SECONDS:g} s")


class OurReader:
    """Our worker's transfer thread, with a prefill worker of ours."""

    def __init__(self, source: peer.Source, shape: Shape, caches: Caches) -> None:
        self._source, self._received = source, set[str]()
        agent, settings = NixlAgent(peer.config(1)), peer.config(1)
        agent.register(memory_ranges(caches), "DRAM", 0)
        local = LocalWorker(in_tree.DECODE, peer.FACTS, our_layout(shape, caches, Rank(1, 0)))
        local.tables.register(agent)
        self._thread = TransferThread(agent, settings, local, TransferRecorder())
        self._thread.start()

    def begin(self, request_id: str, local: Ids, remote: Ids) -> None:
        num_tokens = BLOCK_SIZE * len(local)
        request = self._source.request(request_id, remote.tolist(), num_tokens)
        self._load = Load(request_id, request, (Blocks(0, local.tolist()),), num_tokens)

    def post(self) -> None:
        self._thread.submit(self._load)

    def ended(self) -> bool:
        outcomes = self._thread.outcomes.take()
        if outcomes.failed:
            raise RuntimeError(f"our reads failed: {outcomes.failed}")
        return self._load.request_id in outcomes.received

    def close(self) -> None:
        self._thread.stop()


class VllmReader:
    """vLLM's worker, with an agent of a prefill worker of vLLM's."""

    def __init__(self, model: Path, source: peer.Source, shape: Shape, caches: Caches) -> None:
        self._worker = in_tree.make_worker(model, caches, kv_cache_config(shape))
        metadata = in_tree.peer_metadata(self._worker, shape, [source.address], source.metadata)
        metadata.engine_id = peer.PREFILL
        in_tree.add_peer(self._worker, metadata)

    def begin(self, request_id: str, local: Ids, remote: Ids) -> None:
        self._request_id = request_id
        self._metadata = in_tree.read_request(
            request_id, peer.PREFILL, local.tolist(), remote.tolist()
        )

    def post(self) -> None:
        self._worker.start_load_kv(self._metadata)

    def ended(self) -> bool:
        results = self._worker.get_transfer_results()
        if results.failed_recving:
            raise RuntimeError(f"vLLM's reads failed: {results.failed_recving}")
        return self._request_id in results.finished_recving

    def close(self) -> None:
        in_tree.close_worker(self._worker)


@contextlib.contextmanager
def reader(variant: str, model: Path, shape: Shape, caches: Caches) -> Iterator[Any]:
    """A variant's two sides; only one variant has any at a time, for vLLM's agents keep cores
    busy."""
    size = (shape.num_blocks, shape.block_bytes)
    if variant == OURS:
        layout = msgspec.msgpack.encode(our_layout(shape, caches, Rank(1, 0)))
        with peer.running(peer.serve_ours, *size, layout) as source:
            made = OurReader(source, shape, caches)
            yield made
            made.close()
    else:
        with peer.running(peer.serve_vllm, *size) as source:
            made = VllmReader(model, source, shape, caches)
            yield made
            made.close()


def measure_stall(
    transport: str, model: Path, num_blocks: int, num_reads: int, rounds: int
) -> list[Sample]:
    """Reads of ``num_reads`` blocks out of ``num_blocks``, drawn at random on both sides."""
    shape, dice = Shape(1, num_blocks), np.random.default_rng(0)
    caches = make_caches(shape)
    in_tree.engine_config(model)
    samples: list[Sample] = []
    for number in range(rounds):
        for variant in (OURS, VLLM) if number % 2 == 0 else (VLLM, OURS):
            with reader(variant, model, shape, caches) as one:
                found = _turn(one, caches, num_reads, dice)
            samples += _samples(transport, variant, found)
    return samples


def _turn(one: Any, caches: Caches, num_reads: int, dice: np.random.Generator) -> list[Watched]:
    """A short read, which connects; then nothing; then the reads that count."""
    (cache,) = caches.values()
    _read(one, "warm", cache, dice, NUM_WARM_BLOCKS)
    until = time.perf_counter() + QUIET_SECONDS
    quiet = watch(lambda: None, lambda: time.perf_counter() > until)
    return [quiet, *(_read(one, f"r{n}", cache, dice, num_reads) for n in range(3))]


def _read(one: Any, request_id: str, cache: Any, dice: np.random.Generator, count: int) -> Watched:
    """One read, checked afterwards.

    Raises:
        RuntimeError: the wrong bytes arrived.
    """
    cache.zero_()
    local, remote = (dice.permutation(len(cache) - 1)[:count] + 1 for _ in range(2))
    one.begin(request_id, local, remote)
    watched = watch(one.post, one.ended)
    words = cache.numpy().view(np.uint64).reshape(len(cache), -1)
    if (words[local] != remote[:, None].astype(np.uint64)).any():
        raise RuntimeError(f"the wrong bytes arrived in read {request_id}")
    return watched


def _samples(transport: str, variant: str, found: list[Watched]) -> Iterator[Sample]:
    quiet, *reads = found
    yield Sample(f"{transport}, {QUIET}", "ms", variant, quiet.stall)
    for one in reads:
        yield Sample(f"{transport}, {STALL}", "ms", variant, one.stall)
        yield Sample(f"{transport}, {OWN_STALL}", "ms", variant, one.own_stall)
        yield Sample(f"{transport}, {CPU}", "ms", variant, one.cpu)
        yield Sample(f"{transport}, {WHOLE}", "ms", variant, one.whole)
