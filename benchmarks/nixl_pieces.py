"""Reads of many small pieces between two GPUs, as different tensor-parallel sizes and hybrid models
make them, through NIXL with several settings.

    python benchmarks/nixl_pieces.py --out OUT [--seconds 60]

Shapes are of an 8B-shaped model (32 layers, 8 KV heads, 16 tokens a block, bfloat16) and of a
hybrid one (36 states of 1.5 MiB, four attention layers of 20 blocks).  Between TP 2 and TP 1 a
piece is the heads of one rank in one layer of a block: a source's pieces lie side by side, the
target's at twice the distance.  Medians of several reads from another process; all beside one copy
of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nixl_gpu import NUM_BYTES, agent_on, copy_once, read_once, serve

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.descriptors import Int32Array, strided_row
from vllm_commext.nixl.transport.agent import NixlAgent, ucx_log

LAYERS = 32
ROUNDS = 5


@dataclass(frozen=True)
class Shape:
    """Pieces of ``size`` bytes, ``rows`` of them in each of ``blocks`` blocks; the target's lie
    ``stride`` pieces apart, the source's side by side."""

    name: str
    size: int
    blocks: int
    rows: int
    stride: int

    def indices(self, dice: np.random.Generator) -> tuple[Int32Array, Int32Array]:
        """Places of the pieces in the target and in the source, in pieces; blocks are scattered."""
        own = dice.permutation(self.blocks)[:, None] * self.rows * self.stride
        theirs = dice.permutation(self.blocks)[:, None] * self.rows
        row = np.arange(self.rows)
        return (
            (own + row * self.stride).ravel().astype(np.int32),
            (theirs + row).ravel().astype(np.int32),
        )


SHAPES = (
    Shape("equal TP, 8,000 tokens, aged pool", 2 << 20, 500, 1, 1),
    Shape("TP 2 to TP 1, 8,000 tokens, one rank", 32 << 10, 500, LAYERS, 2),
    Shape("TP 4 to TP 1, 8,000 tokens, one rank", 16 << 10, 500, LAYERS, 4),
    Shape("layers apart, 8,000 tokens", 64 << 10, 500, LAYERS, 2),
    Shape("hybrid, 36 states and 4 x 20 blocks", 3 << 19, 116, 1, 1),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_threads": 0},
    {"num_threads": 8, "backend_params": {"split_batch_size": "64"}},
    {"num_threads": 16, "backend_params": {"split_batch_size": "1024"}},
)


def by_nixl(
    shape: Shape, agent: NixlAgent, name: str, own_address: int, their_address: int
) -> dict[str, float]:
    """Milliseconds to post a read, and until it has ended."""
    indices = shape.indices(np.random.default_rng(0))
    slots = [NUM_BYTES // shape.size] * 2
    own = strided_row(address=own_address, num_bytes=shape.size, count=slots[0])
    theirs = strided_row(address=their_address, num_bytes=shape.size, count=slots[1], device_id=1)
    lists = agent.prepare("", own, "VRAM"), agent.prepare(name, theirs, "VRAM")
    read_once(agent, lists, indices)
    times = [read_once(agent, lists, indices) for _ in range(ROUNDS)]
    for prepared in lists:
        agent.release_list(prepared)
    return {
        "post": statistics.median(one[0] for one in times) * 1e3,
        "read": statistics.median(one[1] for one in times) * 1e3,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| shape | pieces | way | ms | GB/s | of one copy |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['shape']} | {row['pieces']} x {row['size'] >> 10} KiB | {row['way']} | "
            f"{row['ms']:.2f} | {row['gb_s']:.1f} | {row['of_one_copy']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing after so long")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(
        target=serve, args=(1, {}, theirs), daemon=True
    )
    peer.start()
    agent, memory = agent_on(0, {})
    source = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda:1")
    metadata, address = ours.recv()
    rows: list[dict[str, Any]] = []

    def keep(shape: Shape, way: str, milliseconds: float, one_copy: float) -> None:
        pieces = shape.blocks * shape.rows
        gb_s = pieces * shape.size / milliseconds / 1e6
        row = {"shape": shape.name, "pieces": pieces, "size": shape.size, "way": way}
        row |= {"ms": milliseconds, "gb_s": gb_s, "of_one_copy": one_copy / milliseconds}
        rows.append(row)
        print(json.dumps(row), flush=True)
        about = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "transports": ucx_log.transports(),
            "rounds": ROUNDS,
        }
        found = json.dumps({"about": about, "rows": rows}, indent=1)
        (args.out / "nixl_pieces.json").write_text(found)
        (args.out / "nixl_pieces.md").write_text(f"{table(rows)}\n\n{json.dumps(about)}\n")

    agents: dict[str, tuple[NixlAgent, str]] = {}
    for number, setting in enumerate(SETTINGS):
        if number:
            agent = NixlAgent(ConnectorConfig("127.0.0.1", 1, **setting))
            agent.register([(memory.data_ptr(), memory.nbytes)], "VRAM", 0)
        name = agent.add_peer(metadata)
        agent.connect(name)
        agents[f"NIXL {json.dumps(setting)}"] = agent, name
    copies: dict[str, float] = {}
    for shape in SHAPES:
        for way, (reader, name) in agents.items():
            if time.monotonic() > deadline:
                break
            if shape.name not in copies:
                half = shape.size * shape.blocks * shape.rows
                copy_once(memory[:half], source[:half])
                copies[shape.name] = copy_once(memory[:half], source[:half]) * 1e3
            found = by_nixl(shape, reader, name, memory.data_ptr(), address)
            keep(shape, way, found["read"], copies[shape.name])
            keep(shape, f"{way}, of it to post", found["post"], copies[shape.name])
    print(table(rows), flush=True)
    ours.send("done")
    peer.join(10)
    os._exit(0)


if __name__ == "__main__":
    main()
