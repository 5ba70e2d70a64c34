"""Reads of many small pieces between two GPUs, as different tensor-parallel sizes and hybrid models
make them: through NIXL with several settings, and through a mapping of the other process's memory,
by the connector's kernel or by CUDA's batched copies.

    python benchmarks/nixl_pieces.py --out OUT [--seconds 60]

Shapes are of an 8B-shaped model (32 layers, 8 KV heads, 16 tokens a block, bfloat16) and of a
hybrid one (36 states of 1.5 MiB, four attention layers of 20 blocks).  Between TP 2 and TP 1 a
piece is the heads of one rank in one layer of a block: a source's pieces lie side by side, the
target's at twice the distance.  Medians of several reads from another process; all beside one copy
of the same bytes, their median too.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nixl_gpu import NUM_BYTES, agent_on, copy_once, read_once, serve

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.layout import Int32Array, UInt64Array, strided_row
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.mapped.gather import CudaDevice, Gatherer, Places
from vllm_commext.nixl.mapped.reader import MappedReader
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
    Shape("token by token, 256 tokens", 512, 16, 4096, 2),
)
NUM_BLOCKS = (8, 16, 32, 64)
"""Of a launch of the kernel."""
MAX_SECONDS = 10.0
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


def rows_of(shape: Shape, own_address: int, their_address: int) -> list[UInt64Array]:
    """Descriptors of both sides."""
    count = NUM_BYTES // shape.size
    return [
        strided_row(address=address, num_bytes=shape.size, count=count)
        for address in (own_address, their_address)
    ]


def by_kernel(
    shape: Shape, gatherer: Gatherer, own_address: int, mapped_address: int
) -> dict[str, float]:
    """Milliseconds to post a read, and until it has ended, as the connector does it."""
    own, theirs = map(Places.of, rows_of(shape, own_address, mapped_address))
    reader = MappedReader(gatherer, own, theirs, lambda: None)
    pairs = Pairs(*shape.indices(np.random.default_rng(0)), 0)
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        posting = reader.post(pairs)
        posted = time.perf_counter()
        while (error := posting.look()) is None:
            assert time.perf_counter() - started < MAX_SECONDS, "the read does not end"
        assert error == "", error
        times.append((posted - started, time.perf_counter() - started))
    return {
        "post": statistics.median(one[0] for one in times[1:]) * 1e3,
        "read": statistics.median(one[1] for one in times[1:]) * 1e3,
    }


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``; hints of places are left out."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


IN_STREAM_ORDER = 1


def by_batched_copies(shape: Shape, own_address: int, mapped_address: int) -> dict[str, float]:
    """Milliseconds to hand all pieces to ``cuMemcpyBatchAsync``, and until they have ended."""
    driver = ctypes.CDLL("libcuda.so.1")
    function = driver.cuMemcpyBatchAsync_v2
    own, theirs = shape.indices(np.random.default_rng(0))
    targets = (own_address + own.astype(np.int64) * shape.size).astype(np.uint64)
    sources = (mapped_address + theirs.astype(np.int64) * shape.size).astype(np.uint64)
    sizes = np.full(len(own), shape.size, dtype=np.uint64)
    attributes, first = _Attributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0)
    stream = torch.cuda.Stream()
    count = ctypes.c_size_t(len(own))
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        status = function(
            *(ctypes.c_void_p(one.ctypes.data) for one in (targets, sources, sizes)),
            *(count, ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)),
            ctypes.c_void_p(stream.cuda_stream),
        )
        posted = time.perf_counter()
        assert status == 0, f"CUDA reports {status}"
        stream.synchronize()
        times.append((posted - started, time.perf_counter() - started))
    return {
        "post": statistics.median(one[0] for one in times[1:]) * 1e3,
        "read": statistics.median(one[1] for one in times[1:]) * 1e3,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| shape | pieces | way | ms | GB/s | of one copy |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['shape']} | {row['pieces']} x {row['size'] / 1024:g} KiB | {row['way']} | "
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
    metadata, address, handle = ours.recv()
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

    mapped = ipc.open_handle(handle, "the peer")
    gatherers = {number: Gatherer(CudaDevice(number)) for number in NUM_BLOCKS}
    agents: dict[str, tuple[NixlAgent, str]] = {}
    for number, setting in enumerate(SETTINGS):
        if number:
            agent = NixlAgent(ConnectorConfig("127.0.0.1", 1, **setting))
            agent.register([(memory.data_ptr(), memory.nbytes)], "VRAM", 0)
        name = agent.add_peer(metadata)
        agent.connect(name)
        agents[f"NIXL {json.dumps(setting)}"] = agent, name
    copies: dict[str, float] = {}
    own = memory.data_ptr()
    for shape in SHAPES:
        half = shape.size * shape.blocks * shape.rows
        copies = [copy_once(memory[:half], source[:half]) * 1e3 for _ in range(ROUNDS + 1)]
        one_copy = statistics.median(copies[1:])
        ways: dict[str, Callable[[], dict[str, float]]] = {
            f"mapped, kernel, {number} blocks": partial(by_kernel, shape, gatherer, own, mapped)
            for number, gatherer in gatherers.items()
        }
        ways["mapped, batched copies"] = partial(by_batched_copies, shape, own, mapped)
        for way, (reader, name) in agents.items():
            ways[way] = partial(by_nixl, shape, reader, name, own, address)
        for way, measure in ways.items():
            if time.monotonic() > deadline:
                break
            try:
                found = measure()
            except (AssertionError, AttributeError, UnsupportedError) as error:
                print(f"{shape.name}, {way}: {error}", flush=True)
                continue
            keep(shape, way, found["read"], one_copy)
            keep(shape, f"{way}, of it to post", found["post"], one_copy)
    print(table(rows), flush=True)
    ours.send("done")
    peer.join(10)
    os._exit(0)


if __name__ == "__main__":
    main()
