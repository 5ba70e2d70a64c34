"""The all-reduce where GPUs may not reach each other: ours through host memory beside NCCL's.

    python benchmarks/host_allreduce.py --tp 2 --out benchmarks/results/mine

All processes have `NCCL_P2P_DISABLE=1`. `allreduce.py` measures `host`, NCCL, vLLM's own dispatch
and the dispatcher in turns, in CUDA graphs. NCCL with `NCCL_SHM_USE_CUDA_MEMCPY=1` needs processes
of its own, and did not come back from CUDA graphs; it is timed without graphs, calls one after the
other, beside NCCL without that variable in the same way. A size that has not ended in time is said
not to have. Writes host_allreduce_tp2.md and .json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pages
import repository  # noqa: F401

from tests.kit.gpu_ranks import ENVIRON, end_together
from tests.kit.servers import free_port

HERE = Path(__file__).parent
KIB, MIB, MB = 1 << 10, 1 << 20, 1_000_000
SIZES = (
    *(2 * KIB, 8 * KIB, 10 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB),
    *(MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 20 * MB, 32 * MIB, 64 * MIB),
)
REFUSED = {"NCCL_P2P_DISABLE": "1"}
EAGER: dict[str, dict[str, str]] = {
    "nccl, no graph": {},
    "nccl with memcpy, no graph": {"NCCL_SHM_USE_CUDA_MEMCPY": "1"},
}
CALLS, SAMPLES = 20, 5
SIZE_MARK = "SIZE "
Times = dict[int, float]  # microseconds by bytes


def run_rank(args: argparse.Namespace) -> None:
    """NCCL alone, size by size; rank 0 says what it found as soon as it has."""
    import torch
    from torch import distributed

    torch.cuda.set_device(args.rank)
    distributed.init_process_group(
        *("nccl", f"tcp://127.0.0.1:{args.port}"), rank=args.rank, world_size=args.tp
    )
    for size in SIZES:
        tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        samples: list[float] = []
        for _ in range(SAMPLES + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                distributed.all_reduce(tensor)
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / CALLS)
        if args.rank == 0:
            print(f"{SIZE_MARK}{json.dumps([size, statistics.median(samples[1:])])}", flush=True)
    os._exit(0)


def eager(args: argparse.Namespace, more: Mapping[str, str]) -> Times:
    """NCCL without graphs: what the sizes took that ended in time."""
    command = [sys.executable, __file__, "--tp", str(args.tp), "--port", str(free_port())]
    environ = {**os.environ, **ENVIRON, **REFUSED, **more}
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env=environ,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(args.tp)
    ]
    try:
        text = ranks[0].communicate(timeout=args.eager_seconds)[0]
    except subprocess.TimeoutExpired:
        ranks[0].kill()
        text = ranks[0].communicate()[0]
    end_together(ranks, 1)
    lines = [line for line in text.splitlines() if line.startswith(SIZE_MARK)]
    found = dict(json.loads(line.removeprefix(SIZE_MARK)) for line in lines)
    if len(found) < len(SIZES):
        print(text[-1500:], flush=True)
    return found


def graphs(args: argparse.Namespace) -> dict[str, Any]:
    """The report of `allreduce.py`."""
    command = [sys.executable, str(HERE / "allreduce.py"), "--tp", str(args.tp)]
    command += ["--out", str(args.out), "--seconds", str(args.seconds), "--sizes"]
    command += [*map(str, SIZES), *(["--quick"] if args.quick else [])]
    subprocess.run(command, env={**os.environ, **REFUSED}, check=True)
    path = args.out / f"allreduce_tp{args.tp}_no_peers.json"
    return json.loads(path.read_text())


def table(rows: Sequence[Mapping[str, Any]], others: Mapping[str, Times]) -> list[str]:
    head = ["bytes", "host", "nccl", *others, "nccl's best / host", "host, GB/s", "regret"]
    lines = []
    for row in rows:
        size, times = row["bytes"], row["microseconds"]
        apart = [of.get(size) for of in others.values()]
        best = min([times["nccl"], *(time for time in apart if time is not None)])
        cells = [str(size), f"{times['host']:.1f}", f"{times['nccl']:.1f}"]
        cells += ["did not end" if time is None else f"{time:.1f}" for time in apart]
        cells += [f"{best / times['host']:.2f}", f"{size / times['host'] / 1e3:.1f}"]
        lines.append([*cells, f"{row['regret']:+.1%}"])
    return pages.table(head, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="number of GPUs")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--commit", default="", help="what the report is to name")
    parser.add_argument("--seconds", type=float, default=60.0, help="bound for the first pass")
    parser.add_argument("--eager-seconds", type=float, default=30.0, help="for NCCL without graphs")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        run_rank(args)
    args.out.mkdir(parents=True, exist_ok=True)
    found = graphs(args)
    others = {name: eager(args, more) for name, more in EAGER.items()}
    rows = found.pop("results")
    facts = {"commit": args.commit, **found, "peer access": "refused, NCCL_P2P_DISABLE=1"}
    name = f"host_allreduce_tp{args.tp}"
    report = {**facts, "no graph": others, "results": rows}
    lines = pages.head(f"{name}, microseconds a call", facts)
    lines += table(rows, others)
    print(pages.write(args.out, name, report, lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
