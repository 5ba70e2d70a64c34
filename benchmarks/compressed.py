"""Reads of a pretrained model's KV cache over a slow network, in pieces, gathered and compressed.

    python benchmarks/throttled.py --mbit 200 -- python benchmarks/compressed.py --out OUT

The cache is SmolLM2-135M's in bfloat16 (``tests/kit/smollm2.py``) of two documents of this
repository, 2,048 tokens, 47 MB; ``--cache`` keeps it.  A prefill worker is a process of its own,
the decode worker this one; both have TP 1, on CPUs.  The ways take turns for so many rounds, each
with workers of its own.  A time is from handing a load to the decode worker's thread to its end,
proof included; every way has to bring the same bytes.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pages
import torch
from gathers import workers
from gathers.shapes import Shape
from gathers.timeline import Timeline
from gathers.workers import Worker
from machine import load_average, machine

from vllm_commext.nixl.gathered import read
from vllm_commext.nixl.geometry.layout import (
    FULL,
    TOKENS,
    AttentionGeometry,
    CacheLayout,
    Family,
    Group,
)

NUM_LAYERS, NUM_HEADS, HEAD_SIZE, BLOCK_TOKENS = 30, 3, 64, 16
TEXTS = ("docs/nixl_connector.md", "vllm_commext/nixl/connector.py")
TEXT_TOKENS = 1024
MIB = 1 << 20
SLOTS = {"gathered_reads": True, "gather_slots": 8, "gather_slot_bytes": 4 * MIB}
WAYS: dict[str, dict[str, Any]] = {
    "pieces": {},
    "gathered": {**SLOTS, "gather_min_pieces": 1},
    "compressed": {**SLOTS, "wire_compression": "lossless"},
}
LOADS = 3
"""Of one way in one round; the first one, with the handshake, does not count."""


def write_cache(path: Path) -> None:
    """The documents' keys and values, ``[layer, block, 2, head, token, element]``."""
    import transformers

    from tests.kit.smollm2 import write_smollm2

    folder = write_smollm2()
    root = Path(__file__).resolve().parents[1]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[torch.Tensor] = []
    for name in TEXTS:
        tokens = tokenizer((root / name).read_text(), return_tensors="pt").input_ids
        with torch.inference_mode():
            kept = model(tokens[:, :TEXT_TOKENS], use_cache=True).past_key_values
        found.append(
            torch.stack([torch.stack((one.keys[0], one.values[0])) for one in kept.layers])
        )
    cache = torch.cat(found, dim=3).unflatten(3, (-1, BLOCK_TOKENS)).permute(0, 3, 1, 2, 4, 5)
    torch.save(cache.to(torch.bfloat16).contiguous(), path)


class Cache(Shape):
    """A cache whose layers are apart, each with keys, then values, in a block."""

    def layout(self, address: int, tp_size: int, tp_rank: int) -> CacheLayout:
        token_bytes = 2 * HEAD_SIZE
        row_bytes = 2 * NUM_HEADS * BLOCK_TOKENS * token_bytes
        attention = AttentionGeometry(
            num_rows=self.blocks,
            rows_per_block=1,
            row_stride=row_bytes,
            row_tokens=BLOCK_TOKENS,
            num_heads=NUM_HEADS,
            replicated=False,
            num_planes=2,
            head_stride=BLOCK_TOKENS * token_bytes,
            token_stride=token_bytes,
            token_bytes=token_bytes,
            content=TOKENS,
            dtype="bfloat16",
        )
        names = [f"layer{number:02}" for number in range(self.layers)]
        bases = [address + number * self.blocks * row_bytes for number in range(self.layers)]
        groups, families = [Group(FULL, BLOCK_TOKENS)], [Family(0, names, bases, attention)]
        return CacheLayout(tp_size, tp_rank, self.blocks, groups, families)


def shape_of(cache: torch.Tensor) -> Cache:
    """All of a cache, as one load."""
    return Cache("SmolLM2-135M", NUM_LAYERS, 0, cache.shape[1], BLOCK_TOKENS)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(path: Path, pipe: Connection) -> None:
    """The prefill worker, anew for each way that it is told."""
    cache = torch.load(path)
    shape, memory = shape_of(cache), cache.view(torch.uint8).flatten()
    worker: Worker | None = None
    while (settings := pipe.recv()) is not None:
        if settings == "cpu":
            pipe.send(cpu_seconds())
            continue
        if worker is not None:
            worker.close()
        layout = shape.layout(memory.data_ptr(), 1, 0)
        worker = Worker("p", torch.device("cpu"), memory, layout, settings)
        worker.hold(shape, LOADS)
        pipe.send(worker.description)
    os._exit(0)


def expected(cache: torch.Tensor, shape: Cache) -> torch.Tensor:
    """What the decode worker's memory has to have."""
    right = torch.empty_like(cache)
    right[:, shape.block_ids(0, 2)[0]] = cache[:, shape.block_ids(0, 1)[0]]
    return right.view(torch.uint8).flatten()


def run_way(settings: dict[str, Any], cache: torch.Tensor, pipe: Any) -> list[dict[str, Any]]:
    """A few loads by workers with these settings."""
    shape, memory = shape_of(cache), torch.zeros(cache.nbytes, dtype=torch.uint8)
    settings = {"mapped_reads": "never", **settings}
    pipe.send(settings)
    descriptions, found = {0: pipe.recv()}, list[dict[str, Any]]()
    decode = workers.Decode("cpu", shape, memory, settings, descriptions, Timeline())
    try:
        for _ in range(LOADS):
            memory.zero_()
            pipe.send("cpu")
            theirs, ours = pipe.recv(), cpu_seconds()
            seconds, counted = decode.run()
            ours = cpu_seconds() - ours
            pipe.send("cpu")
            theirs = pipe.recv() - theirs
            assert torch.equal(memory, expected(cache, shape)), "other bytes than the peer's"
            found.append(
                {
                    "seconds": seconds,
                    "bytes": counted["bytes"],
                    "saved": counted.get("saved_bytes", 0),
                    "gathered": counted.get("gathered_bytes", 0),
                    "cpu_p": theirs,
                    "cpu_d": ours,
                }
            )
    finally:
        decode.close()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--cache", type=Path, help="a file; by default one in OUT")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.cache or args.out / "cache.pt"
    if not path.exists():
        write_cache(path)
    torch.set_num_threads(1)
    read.PATIENCE_SECONDS = read.LONG_PATIENCE_SECONDS = workers.MAX_SECONDS = 120.0
    cache, (ours, theirs) = torch.load(path), multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(path, theirs), daemon=True
    )
    process.start()
    ways = {way: WAYS[way] for way in args.ways}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(args.rounds):
        for way, settings in ways.items():
            some = run_way(settings, cache, ours)
            found[way] += some
            for one in some:
                print(json.dumps({"round": number, "way": way, **one}), flush=True)
    ours.send(None)
    report(found, args.out)
    os._exit(0)


def report(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Print medians of each way."""
    rows: list[list[str]] = []
    for way, some in found.items():
        middle = {key: statistics.median(one[key] for one in some) for key in some[0]}
        size, seconds = middle["bytes"] / 1e6, middle["seconds"]
        sizes = f"{size:.1f}", f"{size - middle['saved'] / 1e6:.1f}"
        used = f"{middle['cpu_p']:.2f}", f"{middle['cpu_d']:.2f}"
        rows.append([way, *sizes, f"{seconds:.3f}", f"{size / seconds:.1f}", *used])
    about = {"machine": machine("nixl", "torch"), "load average": load_average()}
    columns = ["way", "MB", "MB on the wire", "s", "MB/s", "CPU s of P", "of D"]
    lines = [*pages.head("Compressed reads", about), *pages.table(columns, rows)]
    page = pages.write(out, "compressed", {"about": about, "found": found}, lines)
    print(page, flush=True)


if __name__ == "__main__":
    main()
