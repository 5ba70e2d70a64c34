"""Reading between two GPUs through NIXL, against a plain copy between them.

    python benchmarks/nixl_gpu.py [--out FOLDER] [--param split_batch_size=64 ...]

For several sizes and numbers of descriptors: the time to post a read, a descriptor, and the bytes a
second until it has ended, beside `cudaMemcpyPeer` of the same bytes (torch's `copy_` between two
devices of one process).  The peer's memory belongs to another process, as that of a prefill engine
does.  Both are measured in turn, several rounds; medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_commext.gpu import ipc
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.descriptors import strided_row
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent, ucx_log

CUDART = ctypes.CDLL("libcudart.so.13")
NUM_BYTES = 1 << 31
CASES = [
    *((size, count) for size in (4 << 10, 16 << 10, 64 << 10) for count in (1000, 10000)),
    *((1 << 20, count) for count in (1, 64, 1024)),
    *((4 << 20, count) for count in (16, 256)),
    (64 << 20, 16),
]
ROUNDS = 5
MAX_SECONDS = 20.0


def agent_on(device: int, params: dict[str, str]) -> tuple[NixlAgent, torch.Tensor]:
    """An agent with two gibibytes of one GPU registered."""
    torch.cuda.set_device(device)
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize()
    agent = NixlAgent(ConnectorConfig("127.0.0.1", 1, backend_params=params))
    agent.register([(memory.data_ptr(), memory.nbytes)], "VRAM", device)
    return agent, memory


def serve(device: int, params: dict[str, str], pipe: Connection) -> None:
    """The peer: its memory is read."""
    agent, memory = agent_on(device, params)
    address = memory.data_ptr()
    pipe.send((agent.metadata(), address, ipc.export_handle(address)))
    pipe.recv()
    os._exit(0)


def read_once(agent: NixlAgent, lists: tuple[Any, Any], indices: Any) -> tuple[float, float]:
    """Seconds to make and post a read, and until it has ended."""
    started = time.perf_counter()
    read = agent.make_read(lists[0], indices[0], lists[1], indices[1])
    state = agent.post(read)
    posted = time.perf_counter()
    while state == IN_PROGRESS and time.perf_counter() - started < MAX_SECONDS:
        state = agent.state(read)
    ended = time.perf_counter()
    assert state == DONE, state
    agent.release_read(read)
    return posted - started, ended - started


def copy_once(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of a plain copy between two GPUs of this process."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def copy_pieces(target: int, source: int, size: int, indices: Any) -> float:
    """Seconds of plain copies of single pieces on one stream."""
    pairs = [
        (target + int(own) * size, source + int(other) * size)
        for own, other in zip(*indices, strict=True)
    ]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for own, other in pairs:
        status = CUDART.cudaMemcpyPeerAsync(
            ctypes.c_void_p(own), 0, ctypes.c_void_p(other), 1, ctypes.c_size_t(size), None
        )
        assert status == 0, status
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(agent: NixlAgent, name: str, own: int, theirs: int, target: torch.Tensor) -> list[Any]:
    """A row for each case and order of descriptors."""
    source = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda:1")
    dice = np.random.default_rng(0)
    rows: list[Any] = []
    for size, count in CASES:
        slots = min(NUM_BYTES // size, 4 * count)
        lists = (
            agent.prepare("", strided_row(address=own, num_bytes=size, count=slots), "VRAM"),
            agent.prepare(
                name,
                strided_row(address=theirs, num_bytes=size, count=slots, device_id=1),
                "VRAM",
            ),
        )
        in_order = np.arange(count, dtype=np.int32)
        orders = {
            "neighbours": (in_order, in_order),
            "scattered": tuple(
                dice.choice(slots, count, replace=False).astype(np.int32) for _ in range(2)
            ),
        }
        for order, indices in orders.items():
            read_once(agent, lists, indices)
            reads: list[tuple[float, float]] = []
            copies: list[float] = []
            pieces: list[float] = []
            num_bytes = min(size * count, source.nbytes)
            for _ in range(ROUNDS):
                reads.append(read_once(agent, lists, indices))
                copies.append(copy_once(target[:num_bytes], source[:num_bytes]))
                pieces.append(copy_pieces(own, source.data_ptr(), size, indices))
            post = statistics.median(one[0] for one in reads)
            whole = statistics.median(one[1] for one in reads)
            copied = statistics.median(copies)
            read, one_copy = size * count / whole / 1e9, num_bytes / copied / 1e9
            by_piece = size * count / statistics.median(pieces) / 1e9
            row = {
                "descriptor_bytes": size,
                "descriptors": count,
                "order": order,
                "post_us_a_descriptor": post / count * 1e6,
                "read_gb_s": read,
                "copy_gb_s": one_copy,
                "pieces_gb_s": by_piece,
                "share_of_copy": read / one_copy,
                "share_of_pieces": read / by_piece,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
        for prepared in lists:
            agent.release_list(prepared)
    return rows


def table(rows: list[Any]) -> str:
    """Markdown."""
    lines = [
        "| descriptor | count | order | post, us a descriptor | read GB/s | one copy GB/s | copy a "
        "piece GB/s | read / one copy | read / pieces |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['descriptor_bytes'] >> 10} KiB | {row['descriptors']} | {row['order']} | "
            f"{row['post_us_a_descriptor']:.3f} | {row['read_gb_s']:.1f} | "
            f"{row['copy_gb_s']:.1f} | {row['pieces_gb_s']:.1f} | {row['share_of_copy']:.2f} | "
            f"{row['share_of_pieces']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--param", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--name", default="nixl_gpu", help="of the result files")
    args = parser.parse_args()
    params = dict(one.split("=", 1) for one in args.param)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(
        target=serve, args=(1, params, theirs), daemon=True
    )
    peer.start()
    agent, memory = agent_on(0, params)
    metadata, address, _ = ours.recv()
    name = agent.add_peer(metadata)
    agent.connect(name)
    rows = measure(agent, name, memory.data_ptr(), address, memory)
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "transports": ucx_log.transports(),
        "rounds": ROUNDS,
        "backend_params": params,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1)
    )
    text = f"{table(rows)}\n\n{json.dumps(about)}\n"
    (args.out / f"{args.name}.md").write_text(text)
    print(text, flush=True)
    ours.send("done")
    peer.join(10)
    os._exit(0)


if __name__ == "__main__":
    main()
