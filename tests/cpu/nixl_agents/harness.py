"""Workers made of the real NIXL agent, transfer thread and side channel, on numpy memory.

Run as a program it is a prefill worker in a process of its own: it prints its process id and its
description as one line (NIXL prints others), serves it where it is given a port, and goes on until
it is ended. It has begun with a prompt where it is told how many of its blocks are computed."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.descriptors import one_plane
from tests.kit.servers import free_port
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.geometry.layout import FULL, AttentionGeometry, CacheLayout, Family, Group
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.mapped import Mapper
from vllm_commext.nixl.prefill.fence import GenerationTable
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.recorder import TransferRecorder, empty_data, merge
from vllm_commext.nixl.requests import Load, Outcomes, RemoteRequest
from vllm_commext.nixl.stream.progress import ProgressTable, Publisher, WorkerTables
from vllm_commext.nixl.transfer_thread import TransferThread
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent
from vllm_commext.nixl.wire.description import MappedOffer, WorkerDescription, encode_description

HOST = "127.0.0.1"
BOUND_SECONDS = 60.0
PATIENCE_SECONDS = 10 * BOUND_SECONDS
"""For handshakes, of which none is to be late where the machine stands still for a minute."""
DESCRIPTION = "description: "
BLOCK_SIZE = 16
NUM_HEADS = 2
HEAD_BYTES = 48
GAP_BYTES = 32
BLOCK_BYTES = NUM_HEADS * HEAD_BYTES
STRIDE_BYTES = BLOCK_BYTES + GAP_BYTES
FACTS = {"model": "m", "dtype": "uint8"}
ALONE = Rank(1, 0)
STREAM = {
    "fence_slot": 3,
    "fence_nonce": 77,
    "stream_row": 2,
    "stream_tag": 77,
    "stream_regions": (0,),
}
"""Where the program's prompt is."""

Bytes = npt.NDArray[np.uint8]


def random_bytes(num_bytes: int, seed: int) -> Bytes:
    """Bytes in which every block differs from every other."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def wait_until(look: Callable[[], bool], what: str) -> None:
    """Wait for a condition; the bound only catches hangs.

    A pause of the whole machine counts as one look: afterwards everybody else needs time, too."""
    waited, before = 0.0, time.monotonic()
    while not look():
        assert waited < BOUND_SECONDS, f"waited {BOUND_SECONDS:g} s for {what}"
        time.sleep(0.002)
        now = time.monotonic()
        waited += min(now - before, 1.0)
        before = now


def num_sockets() -> int:
    """Sockets that this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one).startswith("socket:") for one in links if os.path.lexists(one))


def memory_of(seed: int, num_layers: int, num_blocks: int, stride_bytes: int) -> list[Bytes]:
    """A row of bytes for each layer's cache; the same for the same arguments in every process."""
    return [
        random_bytes(num_blocks * stride_bytes, 1000 * seed + layer) for layer in range(num_layers)
    ]


def counted(ended: Outcomes) -> dict[str, Any]:
    """What an engine of this one rank counts of requests that did not end as they should."""
    return {
        "failures": Counter(one.reason for one in ended.failed.values()),
        "num_read": {name: one.num_read for name, one in ended.failed.items()},
        "expired_requests": len(ended.expired),
    }


class Worker:
    """A worker's agent and its thread, on rows of memory. ``mapper`` opens the memory of others,
    ``offer`` makes what they open of its own."""

    def __init__(
        self,
        engine_id: str,
        memory: Sequence[Bytes],
        layout: CacheLayout,
        config: ConnectorConfig,
        *,
        progress: ProgressTable | None = None,
        generations: GenerationTable | None = None,
        facts: dict[str, str] = FACTS,
        offer: Callable[[Sequence[Bytes]], MappedOffer] | None = None,
        **local: Any,
    ) -> None:
        self.engine_id, self.memory, self.layout, self.config = engine_id, memory, layout, config
        self.agent, self.tables = NixlAgent(config), WorkerTables(progress, generations)
        self.agent.register([(row.ctypes.data, row.nbytes) for row in memory], "DRAM", 0)
        self.tables.register(self.agent)
        self.offer = None if offer is None else offer(memory)
        self.description = encode_description(
            WorkerDescription(
                engine_id=engine_id,
                facts=facts,
                agent_metadata=self.agent.metadata(),
                memory_type="DRAM",
                device_id=0,
                layout=layout,
                lease_seconds=config.kv_lease_duration,
                mapped=self.offer,
                tables=self.tables.places,
            )
        )
        self.recorder, self.outcomes = TransferRecorder(), Outcomes()
        self.outcomes.failed = set()  # names alone
        self.recorded = {**empty_data(), "num_read": {}}
        self.publisher = (
            Publisher(progress, self.tables.fences, is_on_device=False) if progress else None
        )
        own = LocalWorker(engine_id, facts, layout, tables=self.tables, **local)
        self.thread = TransferThread(
            self.agent, config, own, self.recorder, publisher=self.publisher
        )
        self.thread.start()

    def collect(self) -> Outcomes:
        """Everything that has ended so far; what is reported twice is an error."""
        new = self.thread.outcomes.take()
        for name in ("sent", "received", "failed", "late", "settled"):
            seen, more = getattr(self.outcomes, name), set(getattr(new, name))
            assert not seen & more, f"{name} reported twice: {seen & more}"
            seen |= more
        merge(self.recorded, self.recorder.take() or {})
        merge(self.recorded, counted(new))
        return self.outcomes


class Engine(Worker):
    """One engine with one worker, or one of the workers of an engine: ``memory`` is a row of bytes
    for each layer's cache, ``rank`` its place among ``rank.size`` workers."""

    def __init__(
        self,
        engine_id: str,
        *,
        seed: int = 0,
        num_layers: int = 3,
        num_blocks: int = 24,
        rank: Rank = ALONE,
        num_heads: int = NUM_HEADS,
        block_bytes: int = 0,
        stride_bytes: int = 0,
        facts: dict[str, str] | None = None,
        serve: bool = False,
        port: int = 0,
        incarnation: str = "",
        mapper: Mapper | None = None,
        offer: Callable[[Sequence[Bytes]], MappedOffer] | None = None,
        **settings: Any,
    ) -> None:
        self.incarnation = incarnation or uuid.uuid4().hex
        self.port = port or free_port()
        self.rank = rank
        num_held = num_heads // rank.size
        block_bytes = block_bytes or num_held * HEAD_BYTES
        stride_bytes = stride_bytes or block_bytes + GAP_BYTES
        memory = memory_of(seed, num_layers, num_blocks, stride_bytes)
        names = [f"layer{number}" for number in range(num_layers)]
        head = block_bytes // num_held
        geometry = one_plane(
            num_blocks, stride_bytes, BLOCK_SIZE, num_heads, head, head // BLOCK_SIZE
        )
        config = config_of(self.port, **settings)
        super().__init__(
            engine_id,
            memory,
            _layout(memory, names, rank, geometry),
            config,
            progress=ProgressTable(1, num_rows=4) if config.stream_chunks else None,
            generations=GenerationTable(num_blocks, 64) if config.reuse_blocks else None,
            facts=FACTS if facts is None else facts,
            offer=offer,
            mapper=mapper,
        )
        self.server: SideChannelServer | None = None
        if serve:
            self.serve(self.description)

    def serve(self, description: bytes, drains: Callable[[], bool] | None = None) -> None:
        """Answer on the side channel with this description; ``drains`` says whether it drains."""
        self.server = SideChannelServer(
            self.engine_id,
            self.incarnation,
            HOST,
            self.port,
            {self.rank.index: description},
            drains=drains,
        )

    def remote(self, request_id: str, block_ids: Sequence[int], **changes: Any) -> RemoteRequest:
        """A request that this engine has prefilled."""
        values: dict[str, Any] = {
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "host": HOST,
            "port": self.port,
            "tp_size": self.rank.size,
            "request_id": request_id,
            "block_ids": (tuple(block_ids),),
            "num_tokens": BLOCK_SIZE * len(block_ids),
        }
        return RemoteRequest(**{**values, **changes})

    def load(self, *loads: Load) -> Outcomes:
        """Submit loads and wait until each is received."""
        for load in loads:
            self.thread.submit(load)
        return self.wait(lambda: {load.request_id for load in loads} <= self.collect().received)

    def wait(self, look: Callable[[], bool]) -> Outcomes:
        wait_until(look, f"outcomes of engine {self.engine_id}, so far {self.outcomes}")
        return self.outcomes

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        self.thread.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layout(
    memory: Sequence[Bytes], names: Sequence[str], rank: Rank, geometry: AttentionGeometry
) -> CacheLayout:
    """Of a worker that holds a row of memory for each of these layers."""
    addresses = {name: row.ctypes.data for name, row in zip(names, memory, strict=True)}
    held = Family(0, sorted(addresses), [addresses[n] for n in sorted(addresses)], geometry)
    groups = [Group(FULL, BLOCK_SIZE)]
    return CacheLayout(rank.size, rank.index, geometry.num_rows, groups, families=[held])


def config_of(port: int, **settings: Any) -> ConnectorConfig:
    """With a side channel at *port*, the rest by default or as in *settings*."""
    defaults = {"backend_params": {"num_threads": "1"}, "handshake_timeout": PATIENCE_SECONDS}
    places = {"side_channel_host": HOST, "side_channel_port": port}
    return ConnectorConfig(**places, **{**defaults, **settings})


def load_of(
    request_id: str,
    remote: RemoteRequest | None,
    block_ids: Sequence[int] = (),
    first: int = 0,
    **settings: Any,
) -> Load:
    """A load into these blocks, from the position ``first`` on."""
    num_tokens = BLOCK_SIZE * (first + len(block_ids))
    return Load(request_id, remote, (Blocks(first, list(block_ids)),), num_tokens, **settings)


def expected_after(
    before: Sequence[Bytes],
    source: Sequence[Bytes],
    pairs: Sequence[tuple[int, int]],
    *,
    block_bytes: int = BLOCK_BYTES,
    stride_bytes: int = STRIDE_BYTES,
) -> list[Bytes]:
    """The destination after a copy of (local, remote) blocks, byte by byte apart from NIXL."""
    after = [row.copy() for row in before]
    for row, source_row in zip(after, source, strict=True):
        for local, remote in pairs:
            for byte in range(block_bytes):
                row[local * stride_bytes + byte] = source_row[remote * stride_bytes + byte]
    return after


def same(found: Sequence[Bytes], expected: Sequence[Bytes]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_fails(decode: Any, load: Load, reason: str, lines: Any, *words: str) -> None:
    """The load fails for one reason, with one line that has the words, and no byte moves."""
    before = [row.copy() for row in decode.memory]
    lines.clear()
    decode.load(load)
    assert load.request_id in decode.outcomes.failed
    assert same(decode.memory, before)
    about_it = [line for line in lines.messages if "KV cache not loaded" in line]
    assert len(about_it) == 1
    for word in (load.request_id, "'d'", *words):
        assert word in about_it[0]
    assert decode.recorded["failures"].pop(reason) == 1
    assert decode.recorded["failures"] == {}


def assert_works(decode: Any, prefill: Any, request_id: str = "works") -> None:
    """A load of blocks 3 and 1 into 0 and 2 moves the right bytes."""
    expected = expected_after(decode.memory, prefill.memory, [(0, 3), (2, 1)])
    decode.load(load_of(request_id, prefill.remote(f"p-{request_id}", [3, 1]), [0, 2]))
    assert request_id not in decode.outcomes.failed
    assert same(decode.memory, expected)


def states(decode: Any) -> dict[str, int]:
    """Peers by state, without the states that none is in."""
    counts = decode.thread._loader._peers.count_states()
    return {state: count for state, count in counts.items() if count}


def wait_for_back_off(decode: Any) -> None:
    """Wait until every peer that could not be asked may be asked again."""
    peers = decode.thread._loader._peers._peers
    wait_until(
        lambda: all(peer.channel.retry_at <= time.monotonic() for peer in list(peers.values())),
        "the back-off to end",
    )


class SlowReads:
    """NIXL as on a slow network: its reads are real, and their ends are told when ``end`` is
    called."""

    def __init__(self, agent: Any, patch: Any) -> None:
        self.has_arrived = False
        self._is_over = False
        self._state = agent.state
        patch.setattr(agent, "state", self._look)

    def _look(self, read: Any) -> str:
        state = self._state(read)
        self.has_arrived = self.has_arrived or state == DONE
        return state if self._is_over else IN_PROGRESS

    def end(self) -> None:
        self._is_over = True
