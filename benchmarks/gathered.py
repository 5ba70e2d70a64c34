"""Reads between engines of unequal tensor-parallel sizes by the connector's own workers: in pieces
through NIXL, in parts that the prefill workers pack, and through a mapping of their memory.

    python benchmarks/gathered.py --out OUT [--seconds 80] [--p-gpus 1 2] [--thread-blocks 32 64]
        [--slots 8x64 4x128] [--set nixl.decode.loader.BUSY_SECONDS=1e-3]

Two prefill workers, the ranks of TP 2, are processes on GPU 1, or on GPUs of their own with
``--p-gpus 1 2``; a decode worker, TP 1, is this process on GPU 0. A time is from handing a load to
the decode worker's thread to its end, fence included; medians, beside one plain copy of the same
bytes. Every way has to bring the same bytes. Of the last gathered load of each way, a table says
when each part was asked for, packed, read and unpacked. ``--thread-blocks`` has the kernel take so
many multiprocessors, too, alone on one GPU and in gathered reads; ``--slots`` has gathered reads
with so many slots of so many MiB, too. ``--set`` gives constants of the package other values, in
all processes.
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
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gathers import timeline
from gathers.shapes import SHAPES
from gathers.workers import (
    MAX_LOADS,
    MAX_SECONDS,
    P_TP,
    Decode,
    Settings,
    device_of,
    memory_on,
    serve,
    set_constants,
)

from vllm_commext.nixl.gathered import read
from vllm_commext.nixl.gathered.staging import CudaCopies
from vllm_commext.nixl.mapped.gather import NUM_BLOCKS, batches_of
from vllm_commext.nixl.transport.agent import ucx_log
from vllm_commext.nixl.transport.posting import Posting

ROUNDS = 7
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
    },
    "cpu": {
        "pieces": PIECES,
        "gathered, 4 x 1 MiB": {**gathered(4, 1), "gather_min_pieces": 1},
    },
}
FIRST_WAYS = 3
"""That are measured of all shapes before the others are of any."""


def copy_seconds(kind: str, p_gpu: int, num_bytes: int) -> float:
    """Of one copy between two devices."""
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device_of(kind, 0))
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device_of(kind, p_gpu))
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
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def packing(thread_blocks: int) -> dict[str, Any]:
    """How fast one GPU packs a slot's pieces, when it does nothing else."""
    num_bytes, count = 32 << 10, 2048
    device = device_of("cuda", 0)
    cache = torch.zeros(8 * count * num_bytes, dtype=torch.uint8, device=device)
    slot = torch.zeros(count * num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    copies = CudaCopies(4, num_blocks=thread_blocks)
    copies.enter()
    order = torch.randperm(8 * count)[:count].numpy() * num_bytes
    targets = np.arange(count, dtype=np.int64) * num_bytes
    places = np.stack((cache.data_ptr() + order, slot.data_ptr() + targets), axis=1)
    times: list[float] = []
    for _ in range(4 * ROUNDS):
        started = time.perf_counter()
        batches = batches_of(places, np.full(count, num_bytes))
        posting = Posting(copies, map(copies.make, batches))
        while posting.look() is None:
            pass
        times.append(time.perf_counter() - started)
    copies.close()
    seconds = statistics.median(times)
    gb_s = slot.nbytes / seconds / 1e9
    print(
        f"packing 64 MiB alone, {thread_blocks} thread blocks: {1e3 * seconds:.2f} ms, "
        f"{gb_s:.0f} GB/s"
    )
    return {"thread_blocks": thread_blocks, "ms": 1e3 * seconds, "gb_s": gb_s}


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
        p_gpus: of the prefill ranks, in turns.
        ways: settings by name.
        only: what the names of shapes have to contain.
        constants: see ``set_constants``.
        deadline: begin nothing after this ``time.monotonic``.
    """

    def __init__(
        self,
        kind: str,
        p_gpus: Sequence[int],
        ways: dict[str, Settings],
        only: str,
        constants: Sequence[str],
        out: Path,
        deadline: float,
    ) -> None:
        self._kind = kind
        self._p_gpus = p_gpus
        self._ways = list(ways.items())
        self._only = only
        self._out = out
        self._deadline = deadline
        self._rows: list[dict[str, Any]] = []
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        for rank in range(P_TP):
            ours, theirs = context.Pipe()
            told = kind, p_gpus[rank % len(p_gpus)], rank, constants, theirs
            context.Process(target=serve, args=told, daemon=True).start()
            self._pipes.append(ours)
        self._memory = memory_on(device_of(kind, 0), SHAPES[kind], 1)
        self._right: dict[int, torch.Tensor] = {}
        self._one_copy: dict[int, float] = {}
        self._timeline = timeline.Timeline()
        self._timeline.watch_reading()

    def run(self) -> None:
        shapes = [one for one in enumerate(SHAPES[self._kind]) if self._only in one[1].name]
        for number, shape in shapes:
            num_bytes = shape.num_bytes(1)
            self._one_copy[number] = seconds = copy_seconds(self._kind, self._p_gpus[0], num_bytes)
            self._keep(number, "one copy", num_bytes, [seconds], {})
        for some in (self._ways[:FIRST_WAYS], self._ways[FIRST_WAYS:]):
            for number, shape in shapes:
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
        decode = Decode(self._kind, shape, self._memory, settings, descriptions, self._timeline)
        try:
            decode.run()  # with the handshake
            self._check(number, way)
            rounds = min(ROUNDS, MAX_LOADS // shape.loads - 3)
            if way == "pieces":
                rounds = min(rounds, 5)
            decode.run()
            found = [decode.run() for _ in range(rounds)]
            times = self._times()
        finally:
            decode.close()
        counted = found[-1][1]
        reads = [max(one["transfer_seconds"]) for _, one in found]
        counted["read_ms"] = 1e3 * statistics.median(reads)
        counted["timeline"] = times
        self._keep(number, way, counted["bytes"], [one for one, _ in found], counted)
        print(times, flush=True)

    def _times(self) -> str:
        """What the last load did, and when."""
        for pipe in self._pipes:
            pipe.send(())
        return timeline.table(self._timeline.take(), [pipe.recv() for pipe in self._pipes])

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
        print(json.dumps(row), flush=True)
        self._rows.append({**row, "timeline": counted.get("timeline", "")})
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
    parser.add_argument("--p-gpus", type=int, nargs="+", default=[1], help="of the prefill ranks")
    parser.add_argument("--thread-blocks", type=int, nargs="*", default=[], help="of the kernel")
    parser.add_argument("--slots", nargs="*", default=[], help="number, x, MiB of each")
    parser.add_argument("--set", nargs="*", default=[], help="module.NAME=number, in vllm_commext")
    parser.add_argument("--only", default="", help="shapes with this in their name")
    args = parser.parse_args()
    set_constants(args.set)
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    ways = dict(WAYS[args.device])
    if args.device == "cpu":
        read.PATIENCE_SECONDS = MAX_SECONDS
    elif args.thread_blocks:
        alone = [packing(count) for count in (NUM_BLOCKS, *args.thread_blocks)]
        (args.out / "packing.json").write_text(json.dumps(alone))
    for text in args.slots:
        slots, slot_mib = map(int, text.split("x"))
        few = {"gather_min_pieces": 1} if args.device == "cpu" else {}
        ways[f"gathered, {slots} x {slot_mib} MiB"] = {**gathered(slots, slot_mib), **few}
    for count in args.thread_blocks:
        name = f"gathered, 4 x 64 MiB, {count} thread blocks"
        ways[name] = {**gathered(4, 64), "thread_blocks": count}
    Bench(args.device, args.p_gpus, ways, args.only, args.set, args.out, deadline).run()
    os._exit(0)


if __name__ == "__main__":
    main()
