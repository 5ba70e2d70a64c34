"""One rank of the checks of the all-reduce through host memory; test_host_allreduce.py starts it.

    python tests/gpu/host_ranks.py RANK WORLD_SIZE PORT [CHECK ...]

Ranks may share a GPU, which serves them in turns, for they need nothing of each other's GPU. Rank 0
prints a line of JSON a check: its name, the seconds it took, figures, and each rank's error.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.kit.gpu_ranks import checks_of, run_checks
from vllm_commext.allreduce.backends.host import HostBackend
from vllm_commext.allreduce.message import ITEM_BYTES, PACK_BYTES
from vllm_commext.collective import Collective

MIB = 1 << 20
DTYPES = tuple(getattr(torch, name) for name in ITEM_BYTES)
MANY_SECONDS = 8.0
Figures = dict[str, Any]


class Case:
    """This rank's part of a message, and the sum in the order of ranks."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, world: int, rank: int) -> None:
        generator = torch.Generator("cuda").manual_seed(num_bytes)
        size = num_bytes // dtype.itemsize
        parts = [
            torch.randn(size, generator=generator, device="cuda").to(dtype) for _ in range(world)
        ]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        self.part, self.want = parts[rank].clone(), total.to(dtype)


class Rank:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.collective = Collective.over(distributed.group.WORLD)
        self.backend = HostBackend(64 * MIB, self.collective)

    def case(self, num_bytes: int, dtype: torch.dtype = torch.bfloat16) -> Case:
        return Case(num_bytes, dtype, self.world, self.rank)


def sizes(rank: Rank) -> list[int]:
    edge = rank.backend._layout.one_shot_bytes // PACK_BYTES * PACK_BYTES
    return [16, 1536, 10240, edge, edge + 16, MIB + 48, 9 * MIB + 16]


def check_sums(rank: Rank) -> Figures:
    """Every kernel, dtype and edge, twice; bits are those of a sum in the order of ranks."""
    calls = 0
    for size in sizes(rank):
        for dtype in DTYPES:
            case = rank.case(size, dtype)
            for _ in range(2):
                assert torch.equal(rank.backend.all_reduce(case.part), case.want), (size, dtype)
                calls += 1
    return {"calls": calls}


def check_many(rank: Rank) -> Figures:
    """Random sizes, with ranks that come late at random: not one element is wrong."""
    pool = [rank.case(size, dtype) for size in sizes(rank)[:-1] for dtype in DTYPES]
    numbers, mine = random.Random(3), random.Random(50 + rank.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    end, calls = time.monotonic() + MANY_SECONDS, 0
    while all(rank.collective.run(lambda: time.monotonic() < end)):
        for _ in range(200 if rank.world <= torch.cuda.device_count() else 4):
            case = pool[numbers.randrange(len(pool))]
            if mine.random() < 0.02:
                torch.cuda._sleep(mine.randrange(300000))
            wrong += (rank.backend.all_reduce(case.part) != case.want).sum()
            calls += 1
        torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} elements are wrong"
    return {"calls": calls}


def check_graphs(rank: Rank) -> Figures:
    """Replays of graphs of several calls, between eager ones."""
    cases = [rank.case(size) for size in sizes(rank)[1:]]
    graphs: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = []
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [rank.backend.all_reduce(case.part) for _ in range(3)]
        graphs.append((graph, outs))
    numbers = random.Random(11)
    for _ in range(60):
        index = numbers.randrange(len(cases))
        graphs[index][0].replay()
        assert all(torch.equal(out, cases[index].want) for out in graphs[index][1])
        again = cases[numbers.randrange(len(cases))]
        assert torch.equal(rank.backend.all_reduce(again.part), again.want)
    return {"graphs": len(graphs)}


def check_memory(rank: Rank) -> Figures:
    """Made and destroyed again and again: neither mappings nor descriptors are left."""

    def left() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("vllm-commext")
        return maps, len(os.listdir("/proc/self/fd"))

    before = left()
    for turn in range(4):
        if turn == 1:
            before = left()  # whatever CUDA opens once is open now
        made = HostBackend(4 * MIB, rank.collective)
        assert left()[0] == before[0] + rank.world
        case = rank.case(2 * MIB)
        assert torch.equal(made.all_reduce(case.part), case.want)
        torch.cuda.synchronize()
        rank.collective.run(lambda: None)
        made.destroy()
        made.destroy()
    assert left() == before
    return {"maps, descriptors": before}


CHECKS: dict[str, Callable[[Rank], Figures]] = checks_of(globals())


def main() -> None:
    rank, world, port = (int(text) for text in sys.argv[1:4])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    made = Rank(rank, world)
    run_checks(made, CHECKS, sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
