"""Reads between engines of unequal tensor-parallel sizes by the connector's own workers: in pieces
through NIXL, in parts that the prefill workers pack, and through a mapping of their memory.

    python benchmarks/gathered.py --out OUT [--seconds 85] [--device cuda]

Two prefill workers, the ranks of TP 2, are processes on GPU 1; a decode worker, TP 1, is this
process on GPU 0. A time is from handing a load to the decode worker's thread to its end, fence
included; medians, beside one plain copy of the same bytes. Every way has to bring the same bytes.
The 8B-shaped model has 32 layers, 8 KV heads and blocks of 16 tokens; the hybrid 36 layers with
states of 1.5 MiB and four with attention.  With ``--device cpu`` everything is small and only shown
to run.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.gathered import read
from vllm_commext.nixl.gathered.staging import CudaCopies, Gathering
from vllm_commext.nixl.geometry.layout import (
    FULL,
    STATE,
    TOKENS,
    AttentionGeometry,
    CacheLayout,
    Family,
    Group,
    StateGeometry,
    StatePart,
)
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.mapped.reader import Mapped
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.prefill.fence import first_nonces
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.requests import Hold, Load, RemoteRequest
from vllm_commext.nixl.tables import WorkerTables
from vllm_commext.nixl.transfer_thread import TransferThread
from vllm_commext.nixl.transport.agent import NixlAgent, ucx_log
from vllm_commext.nixl.wire.description import WorkerDescription, encode_description

HOST, KEY = "127.0.0.1", bytes(32)
P_TP = 2
MAX_LOADS = 64
"""Of one way of reading one shape."""
MAX_SECONDS = 20.0
ROUNDS = 7
X_PART, B_PART, SSM_PART = 18 << 10, 768, 3 << 19
"""Bytes of a state's parts in the whole model: 48 heads; one group; 48 heads."""
NUM_HEADS, STATE_HEADS, TOKEN_BYTES = 8, 48, 512
Settings = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What a load reads.

    Attributes:
        layers: with attention, side by side in a block.
        states: layers with a state, each apart.
        blocks: attention blocks of one load.
        block_tokens: of a block.
        loads: at a time.
    """

    name: str
    layers: int
    states: int
    blocks: int
    block_tokens: int
    loads: int = 1

    def attention_bytes(self, tp_size: int) -> int:
        """Of a layer of a block in one rank."""
        return NUM_HEADS // tp_size * self.block_tokens * TOKEN_BYTES

    def state_bytes(self, tp_size: int) -> int:
        return -(-(X_PART // tp_size + B_PART + SSM_PART // tp_size) // 512) * 512

    def num_blocks(self) -> int:
        return self.blocks * self.loads

    def sizes(self, tp_size: int) -> tuple[int, int]:
        """Bytes of all attention layers and of one layer's states in one rank."""
        blocks = self.num_blocks()
        return (
            blocks * self.layers * self.attention_bytes(tp_size),
            blocks * self.state_bytes(tp_size) if self.states else 0,
        )

    def num_bytes(self, tp_size: int) -> int:
        attention, states = self.sizes(tp_size)
        return attention + self.states * states

    def layout(self, address: int, tp_size: int, tp_rank: int) -> CacheLayout:
        """The cache of one rank at this address: attention, then each layer's states."""
        size = self.attention_bytes(tp_size)
        attention = AttentionGeometry(
            num_rows=self.num_blocks(),
            rows_per_block=1,
            row_stride=self.layers * size,
            row_tokens=self.block_tokens,
            num_heads=NUM_HEADS,
            replicated=False,
            num_planes=1,
            head_stride=self.block_tokens * TOKEN_BYTES,
            token_stride=TOKEN_BYTES,
            token_bytes=TOKEN_BYTES,
            content=TOKENS,
            dtype="bfloat16",
        )
        names = [f"a{layer:02}" for layer in range(self.layers)]
        bases = [address + layer * size for layer in range(self.layers)]
        groups, families = [Group(FULL, self.block_tokens)], [Family(0, names, bases, attention)]
        if self.states:
            x, heads = X_PART // tp_size, STATE_HEADS
            parts = (
                StatePart("x", "bfloat16", 0, heads, False, X_PART // heads),
                StatePart("B", "bfloat16", x, 1, True, B_PART),
                StatePart("ssm", "float32", x + B_PART, heads, False, SSM_PART // heads),
            )
            states = StateGeometry(self.num_blocks(), self.state_bytes(tp_size), parts)
            first, apart = self.sizes(tp_size)
            names = [f"s{layer:02}" for layer in range(self.states)]
            bases = [address + first + layer * apart for layer in range(self.states)]
            groups.append(Group(STATE, 1 << 30))
            families.append(Family(1, names, bases, states))
        return CacheLayout(tp_size, tp_rank, self.num_blocks(), groups, families)

    def block_ids(self, load: int, seed: int) -> list[list[int]]:
        """A load's blocks, a list a group, scattered over the cache."""
        order = torch.randperm(
            self.num_blocks(), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        mine = order[load * self.blocks : (load + 1) * self.blocks]
        return [mine, mine[:1]] if self.states else [mine]


SHAPES = {
    "cuda": (
        Shape("8B, TP 2 to TP 1, 8,000 tokens", 32, 0, 500, 16),
        Shape("8B, TP 2 to TP 1, 4,000 tokens", 32, 0, 250, 16),
        Shape("8B, TP 2 to TP 1, 4 x 2,000 tokens", 32, 0, 125, 16, loads=4),
        Shape("8B, TP 2 to TP 1, 64 tokens", 32, 0, 4, 16),
        Shape("hybrid, TP 2 to TP 1, 20 blocks", 4, 36, 20, 384),
        Shape("hybrid, TP 2 to TP 1, 4 x 20 blocks", 4, 36, 20, 384, loads=4),
    ),
    "cpu": (
        Shape("tiny, TP 2 to TP 1", 4, 0, 40, 16),
        Shape("tiny hybrid, TP 2 to TP 1", 8, 26, 2, 16, loads=2),
    ),
}
MIB = 1 << 20
PIECES: Settings = {"mapped_reads": "never"}


def gathered(slots: int, slot_mib: int) -> Settings:
    sizes = {"gather_slots": slots, "gather_slot_bytes": slot_mib * MIB}
    return {"mapped_reads": "never", "gathered_reads": True, **sizes}


WAYS: dict[str, dict[str, Settings]] = {
    "cuda": {
        "pieces": PIECES,
        "gathered, 4 x 64 MiB": gathered(4, 64),
        "mapped, kernel": {"mapped_reads": "auto"},
        "gathered, 4 x 32 MiB": gathered(4, 32),
        "gathered, 8 x 32 MiB": gathered(8, 32),
        "gathered, 8 x 16 MiB": gathered(8, 16),
        "gathered, 8 x 64 MiB": gathered(8, 64),
        "gathered, 4 x 64 MiB, 32 thread blocks": {**gathered(4, 64), "thread_blocks": 32},
    },
    "cpu": {
        "pieces": PIECES,
        "gathered, 4 x 1 MiB": {**gathered(4, 1), "gather_min_pieces": 1},
    },
}
FIRST_WAYS = 3
"""That are measured of all shapes before the others are of any."""


class Worker:
    """A worker of the connector's on memory of one device.

    Args:
        device: where it is.
        memory: its cache.
        layout: what the cache looks like.
        settings: the connector's, and ``thread_blocks`` of the kernel that packs and unpacks.
    """

    def __init__(
        self,
        engine_id: str,
        device: torch.device,
        memory: torch.Tensor,
        layout: CacheLayout,
        settings: Settings,
    ) -> None:
        settings = dict(settings)
        kernel = {"num_blocks": blocks} if (blocks := settings.pop("thread_blocks", 0)) else {}
        self._config = config = ConnectorConfig(HOST, 1, stream_chunks=False, **settings)
        self._agent = NixlAgent(config)
        self._mapped = Mapped(config)
        tables = WorkerTables()
        tables.fences.arm(KEY)
        ranges = [(memory.data_ptr(), memory.nbytes)]
        is_on_gpu = device.type == "cuda"
        self._mapped.prepare(ranges, is_on_gpu=is_on_gpu)
        kind, index = ("VRAM", device.index or 0) if is_on_gpu else ("DRAM", 0)
        self._agent.register(ranges, kind, index)
        gathering: Gathering | None = None
        if config.gathered_reads:
            copies = CudaCopies(**kernel) if is_on_gpu else None
            gathering = Gathering(config, device, copies)
            gathering.prepare(self._agent, ranges)
            tables.add(gathering.table)
        tables.register(self._agent)
        local = LocalWorker(
            engine_id,
            {},
            layout,
            memory_type=kind,
            device_id=index,
            mapper=self._mapped.mapper,
            tables=tables,
            gathering=gathering,
        )
        self.description = encode_description(
            WorkerDescription(
                engine_id=engine_id,
                facts={},
                agent_metadata=self._agent.metadata(),
                memory_type=kind,
                device_id=index,
                layout=layout,
                lease_seconds=config.kv_lease_duration,
                mapped=self._mapped.offer,
                staging=None if gathering is None else gathering.offer,
                **tables.described(),
            )
        )
        self.recorder = TransferRecorder()

        def select() -> None:
            if is_on_gpu:
                torch.accelerator.set_device_index(index)

        self.thread = TransferThread(self._agent, config, local, self.recorder, select)
        self.thread.start()

    def close(self) -> None:
        self.thread.stop()
        self._mapped.close()


def device_of(kind: str, number: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def memory_on(device: torch.device, shapes: Sequence[Shape], tp_size: int) -> torch.Tensor:
    num_bytes = max(shape.num_bytes(tp_size) for shape in shapes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def serve(kind: str, tp_rank: int, pipe: Connection) -> None:
    """A prefill rank: for each shape and settings that it is told, a worker that holds prefills."""
    device, shapes = device_of(kind, 1), SHAPES[kind]
    memory = memory_on(device, shapes, P_TP)
    torch.manual_seed(tp_rank)
    memory.random_(0, 256)
    if kind == "cuda":
        torch.cuda.synchronize()
    nonces = first_nonces(KEY)
    worker: Worker | None = None
    while (told := pipe.recv()) is not None:
        if worker is not None:
            worker.close()
        shape, settings = shapes[told[0]], told[1]
        layout = shape.layout(memory.data_ptr(), P_TP, tp_rank)
        worker = Worker("p", device, memory, layout, settings)
        for number in range(MAX_LOADS):
            blocks = shape.block_ids(number % shape.loads, 1)
            block_ids = tuple(block for group in blocks for block in group)
            nonce = int(nonces[number])
            worker.thread.submit(Hold(f"x{number}", 600.0, number, nonce, block_ids=block_ids))
        pipe.send(worker.description)
    os._exit(0)


class Decode:
    """The decode worker, and what it reads from.

    Attributes: ``recorder``: of the worker.
    """

    def __init__(
        self,
        kind: str,
        shape: Shape,
        memory: torch.Tensor,
        settings: Settings,
        descriptions: dict[int, bytes],
    ) -> None:
        self._shape = shape
        # A port of the system's choice would have to be known before the server is there.
        self._port = 20000 + os.getpid() % 20000
        self._server = SideChannelServer("p", "one", HOST, self._port, descriptions)
        layout = shape.layout(memory.data_ptr(), 1, 0)
        self._worker = Worker("d", device_of(kind, 0), memory, layout, settings)
        self._has_news = threading.Event()
        self._worker.thread.outcomes.on_first = self._has_news.set
        self._nonces = first_nonces(KEY)
        self._number = 0

    def close(self) -> None:
        self._worker.close()
        self._server.close()

    def _load(self, load: int) -> Load:
        shape, number = self._shape, self._number
        self._number += 1
        num_tokens = shape.blocks * shape.block_tokens
        remote = RemoteRequest(
            engine_id="p",
            incarnation="one",
            host=HOST,
            port=self._port,
            tp_size=P_TP,
            request_id=f"x{number}",
            block_ids=tuple(map(tuple, shape.block_ids(load, 1))),
            num_tokens=num_tokens,
            fence_slot=number,
            fence_nonce=int(self._nonces[number]),
        )
        blocks = tuple(Blocks(0, ids) for ids in shape.block_ids(load, 2))
        return Load(f"r{number}", remote, blocks, num_tokens)

    def run(self) -> tuple[float, dict[str, Any]]:
        """Seconds from the first load to the end of the last, and what was counted."""
        while self._number % self._shape.loads:  # which of the blocks are held
            self._number += 1
        loads = [self._load(number) for number in range(self._shape.loads)]
        missing = {load.request_id for load in loads}
        started = time.perf_counter()
        for load in loads:
            self._worker.thread.submit(load)
        while missing:
            assert self._has_news.wait(MAX_SECONDS), "a load does not end"
            self._has_news.clear()
            outcomes = self._worker.thread.outcomes.take()
            assert not outcomes.failed, f"loads failed: {outcomes.failed}"
            missing -= outcomes.received
        seconds = time.perf_counter() - started
        return seconds, self._worker.recorder.take() or {}


def copy_seconds(kind: str, num_bytes: int) -> float:
    """Of one copy between the two devices."""
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device_of(kind, 0))
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:1" if kind == "cuda" else "cpu")
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        synchronize(kind)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(kind)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def synchronize(kind: str) -> None:
    if kind == "cuda":
        for number in range(2):
            torch.cuda.synchronize(number)


HEADER = "| shape | way | MB | ms | of it reading | GB/s | of one copy | gathered |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEADER, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['shape']} | {row['way']} | {row['bytes'] / 1e6:.0f} | {row['ms']:.2f} | "
            f"{row['read_ms']:.2f} | {row['gb_s']:.1f} | {row['of_one_copy']:.2f} | "
            f"{row['gathered_share']:.2f} |"
        )
    return "\n".join(lines)


class Bench:
    """All measurements; what is there is written after each.

    Args:
        kind: of device.
        deadline: begin nothing after this ``time.monotonic``.
    """

    def __init__(self, kind: str, out: Path, deadline: float) -> None:
        self._kind = kind
        self._out = out
        self._deadline = deadline
        self._rows: list[dict[str, Any]] = []
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        for rank in range(P_TP):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(kind, rank, theirs), daemon=True).start()
            self._pipes.append(ours)
        self._memory = memory_on(device_of(kind, 0), SHAPES[kind], 1)
        self._right: dict[int, torch.Tensor] = {}
        self._one_copy: dict[int, float] = {}

    def run(self) -> None:
        shapes, ways = SHAPES[self._kind], list(WAYS[self._kind].items())
        for number, shape in enumerate(shapes):
            num_bytes = shape.num_bytes(1)
            self._one_copy[number] = seconds = copy_seconds(self._kind, num_bytes)
            self._keep(number, "one copy", num_bytes, [seconds], {})
        for some in (ways[:FIRST_WAYS], ways[FIRST_WAYS:]):
            for number, shape in enumerate(shapes):
                for way, settings in some:
                    if time.monotonic() > self._deadline:
                        print(f"{shape.name}, {way}: no time left", flush=True)
                    else:
                        self._try(number, way, settings)
        for pipe in self._pipes:
            pipe.send(None)
        self._rows.sort(key=lambda row: row["number"])
        print(table(self._rows), flush=True)

    def _try(self, number: int, way: str, settings: Settings) -> None:
        try:
            self._measure(number, way, settings)
        except Exception:  # noqa: BLE001 the other ways are still to be measured
            print(
                f"{SHAPES[self._kind][number].name}, {way}:\n{traceback.format_exc()}", flush=True
            )

    def _measure(self, number: int, way: str, settings: Settings) -> None:
        shape = SHAPES[self._kind][number]
        for pipe in self._pipes:
            pipe.send((number, settings))
        descriptions = {rank: pipe.recv() for rank, pipe in enumerate(self._pipes)}
        self._memory.zero_()
        synchronize(self._kind)
        decode = Decode(self._kind, shape, self._memory, settings, descriptions)
        try:
            decode.run()  # with the handshake
            self._check(number, way)
            rounds = min(ROUNDS, MAX_LOADS // shape.loads - 3)
            if way == "pieces":
                rounds = min(rounds, 5)
            decode.run()
            found = [decode.run() for _ in range(rounds)]
        finally:
            decode.close()
        counted = found[-1][1]
        reads = [max(one["transfer_seconds"]) for _, one in found]
        counted["read_ms"] = 1e3 * statistics.median(reads)
        self._keep(number, way, counted["bytes"], [one for one, _ in found], counted)

    def _check(self, number: int, way: str) -> None:
        """All ways bring the same bytes."""
        content = self._memory[: SHAPES[self._kind][number].num_bytes(1)]
        if number not in self._right:
            self._right[number] = content.clone()
            assert bool(content.any()), "nothing was read"
        elif not torch.equal(content, self._right[number]):
            raise AssertionError(f"{way} brings other bytes than pieces")

    def _keep(
        self,
        number: int,
        way: str,
        num_bytes: int,
        seconds: list[float],
        counted: dict[str, Any],
    ) -> None:
        shape, median = SHAPES[self._kind][number], statistics.median(seconds)
        row = {
            "number": number,
            "shape": shape.name,
            "way": way,
            "bytes": num_bytes,
            "ms": median * 1e3,
            "all_ms": [one * 1e3 for one in seconds],
            "read_ms": counted.get("read_ms", 0.0),
            "gb_s": num_bytes / median / 1e9,
            # Of the bytes that were read, which may be less than the cache has.
            "of_one_copy": self._one_copy[number] * num_bytes / shape.num_bytes(1) / median,
            "gathered_share": counted.get("gathered_bytes", 0) / num_bytes,
            "descriptors": counted.get("descriptors", 0),
            "merged": counted.get("merged_descriptors", 0),
        }
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        about = {
            "device": torch.cuda.get_device_name(0) if self._kind == "cuda" else "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "transports": ucx_log.transports(),
        }
        found = json.dumps({"about": about, "rows": self._rows}, indent=1)
        (self._out / "gathered.json").write_text(found)
        (self._out / "gathered.md").write_text(f"{table(self._rows)}\n\n{json.dumps(about)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin nothing after so long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "cpu":
        read.PATIENCE_SECONDS = MAX_SECONDS
    Bench(args.device, args.out, time.monotonic() + args.seconds).run()
    os._exit(0)


if __name__ == "__main__":
    main()
