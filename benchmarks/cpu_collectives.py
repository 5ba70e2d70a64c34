"""All-reduce of CPU tensors among processes of this machine: torch's Gloo, our shared-memory ring
buffers, and vLLM's own shared memory where the processor has AVX-512, interleaved.

    python benchmarks/cpu_collectives.py --out benchmarks/results/mine
    python benchmarks/cpu_collectives.py --quick

Each rank is a process with one thread, free to run on any core. Every round measures all, one
after the other, at every size; a figure is the median over rounds of the median time of one call at
rank 0. Before the first round their sums are compared, to the bit.
`--out mine` writes mine.md and mine.json.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import repository  # noqa: F401
import torch
from machine import load_average, machine
from torch import distributed as dist

from tests.kit.gpu_ranks import add_rank_arguments, run_as_ranks
from tests.kit.servers import LOOPBACK
from vllm_commext.allreduce.table import size_text
from vllm_commext.collective import Collective
from vllm_commext.shm.collectives import RingGroup, is_worth_it

KIB, MIB = 1 << 10, 1 << 20
SIZES = (512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
OURS = "ours"
RANK_SECONDS = 600.0


class Cell(NamedTuple):
    """Microseconds that one sum took at rank 0, the median of one round."""

    num_ranks: int
    num_bytes: int
    number: int
    variant: str
    median_us: float


def microseconds(call: Callable[[torch.Tensor], Any], num_bytes: int, seconds: float) -> float:
    """Median of as many calls as rank 0 makes in that time, five at least."""
    tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
    more, times = torch.ones(1), []
    until = time.perf_counter() + seconds
    while more:
        for _ in range(5):
            started = time.perf_counter()
            call(tensor)
            times.append(time.perf_counter() - started)
        more.fill_(time.perf_counter() < until)
        dist.broadcast(more, 0)
    return median(times) * 1e6


def vllm_shared_memory(rank: int, num_ranks: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What vLLM takes where its build for this processor has it; collective."""
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "init_shm_manager"):
        return {}
    group = SimpleNamespace(
        unique_name="tp",
        ranks=range(num_ranks),
        rank=rank,
        world_size=num_ranks,
        device_group=dist.group.WORLD,
    )
    return {"vllm": cpu_communicator._CPUSHMDistributed(group).all_reduce}


def run_rank(rank: int, num_ranks: int, port: int, args: argparse.Namespace) -> list[Cell]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=num_ranks)
    rings = RingGroup.connect(Collective.over(None))
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "gloo": dist.all_reduce,
        OURS: rings.all_reduce,
        **vllm_shared_memory(rank, num_ranks),
    }
    for num_bytes in args.sizes:
        sums = [torch.full((num_bytes // 2,), rank + 1).bfloat16() for _ in calls]
        for call, tensor in zip(calls.values(), sums, strict=True):
            call(tensor)
        assert all(torch.equal(sums[0], each) for each in sums)
    cells = [
        Cell(num_ranks, num_bytes, number, name, microseconds(calls[name], num_bytes, args.seconds))
        for number in range(args.rounds)
        for num_bytes in args.sizes
        for name in calls
    ]
    dist.barrier()
    return cells


def measure(num_ranks: int, args: argparse.Namespace) -> list[Cell]:
    """Start all ranks, and take what rank 0 has measured."""
    options = ["--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    options += ["--ranks", str(num_ranks), "--sizes", *map(str, args.sizes)]
    environ = {"OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": str(os.getpid())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        options += ["--cells", str(path)]
        if run_as_ranks(__file__, options, num_ranks, RANK_SECONDS, environ):
            raise SystemExit(f"one of {num_ranks} ranks failed, or took {RANK_SECONDS:.0f} s")
        return [Cell(*fields) for fields in json.loads(path.read_text())]


def markdown(cells: list[Cell], load: str) -> str:
    """One table for all numbers of ranks."""
    others = [name for name in dict.fromkeys(cell.variant for cell in cells) if name != OURS]
    lines = [
        "# All-reduce among CPU processes: our shared-memory ring buffers and others",
        "",
        machine("nixl"),
        "",
    ]
    lines += ["    " + shlex.join(["python", "benchmarks/cpu_collectives.py", *sys.argv[1:]]), ""]
    lines += [f"Load average before and after: {load}. us a call; speedup: theirs / ours, "]
    lines[-1] += "median (smallest to largest) over the rounds. *: within vLLM left to Gloo."
    head = ["ranks", "bytes", OURS, *(f"{name} | speedup" for name in others)]
    lines += ["", f"| {' | '.join(head)} |", "|---" * (3 + 2 * len(others)) + "|"]
    for num_ranks, num_bytes in dict.fromkeys((cell.num_ranks, cell.num_bytes) for cell in cells):
        chosen = [cell for cell in cells if cell[:2] == (num_ranks, num_bytes)]
        ours = [cell.median_us for cell in chosen if cell.variant == OURS]
        mark = "" if is_worth_it(torch.bfloat16, num_bytes, num_ranks) else " *"
        row = [str(num_ranks), size_text(num_bytes) + mark, f"{median(ours):,.0f}"]
        for name in others:
            theirs = [cell.median_us for cell in chosen if cell.variant == name]
            ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
            better = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            row += [f"{median(theirs):,.0f}", better]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two ranks, four sizes, three short rounds")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="processes that sum")
    add("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of bfloat16")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=0.5, help="of each variant, size and round")
    add("--out", type=Path, help="write OUT.md and OUT.json")
    add("--cells", type=Path, help=argparse.SUPPRESS)
    add_rank_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.rounds, args.seconds = [2], 3, 0.2
        args.sizes = [512, 8 * KIB, 512 * KIB, 8 * MIB]
    return args


def main() -> int:
    args = arguments()
    if args.rank >= 0:
        cells = run_rank(args.rank, args.ranks[0], args.port, args)
        if args.rank == 0:
            args.cells.write_text(json.dumps(cells))
        return 0
    before = load_average()
    cells = [cell for num_ranks in args.ranks for cell in measure(num_ranks, args)]
    text = markdown(cells, f"{before}; {load_average()}")
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(text)
        found = {"machine": machine("nixl"), "command": sys.argv}
        found["cells"] = [cell._asdict() for cell in cells]
        args.out.with_suffix(".json").write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
