"""Our reduce-RMS op against vLLM's fused op, its three-launch fall-back and the launch floor.

    python benchmarks/reduce_rms.py --tp 2 --out benchmarks/results/mine

writes reduce_rms_tp2.md and .json. Each figure is the time a call in a CUDA graph of chained calls,
in microseconds: of a sample the slowest rank's, of the samples the median. All variants take turns
in every sample, so what else the machine does meets all of them. Only ratios of one run mean
anything.

``--quick`` takes fewer token counts and samples.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pages
import repository  # noqa: F401
import torch
from machine import installed
from torch import distributed as dist

from tests.kit.gpu_ranks import run_program

EPS = 1e-6
Q_SIZE, KV_SIZE = 6144, 1024  # MiniMax-M2's, all ranks together
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
QUICK_TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 16384)
OURS = "ours"
VLLM_FUSED_TOKENS = 2048  # vLLM's own bound for its fused op
SAMPLES, QUICK_SAMPLES, REPLAYS = 31, 15, 5
TOTAL_SECONDS, QUICK_SECONDS = 540, 150
HOST_CALLS = 2000
UNUSED = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
Call = Callable[[], Any]


@dataclasses.dataclass
class Rows:
    """A rank's packed rows and weights for one token count."""

    qkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        return self.q_weight.numel(), self.k_weight.numel()


def make_rows(tokens: int, world: int) -> Rows:
    q, kv = Q_SIZE // world, KV_SIZE // world

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(torch.bfloat16)

    return Rows(normal(tokens, q + 2 * kv), normal(q), normal(kv))


class Ours:
    def __init__(self, rank: int, world: int, group: Any) -> None:
        from vllm_commext.reduce_rms import ops as _ops  # noqa: F401 - registers the op
        from vllm_commext.reduce_rms.kernel import slot_bytes
        from vllm_commext.reduce_rms.workspace import LamportWorkspace

        size = slot_bytes(max(TOKENS), world)
        self._workspace = LamportWorkspace(rank, world, size, group)

    def call(self, rows: Rows) -> Any:
        return torch.ops.vllm_commext.qk_rms_norm(
            rows.qkv, rows.q_weight, rows.k_weight, self._workspace.handle, EPS
        )

    def check(self) -> None:
        torch.cuda.synchronize()
        self._workspace.raise_if_failed()


class Vllm:
    """vLLM's fused op, its fall-back, and the fall-back's first launch alone: the floor."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state

        self._config = set_current_vllm_config(VllmConfig())
        self._config.__enter__()
        parallel_state.init_distributed_environment(
            world, rank, f"tcp://127.0.0.1:{port}", rank, backend="nccl"
        )
        parallel_state.initialize_model_parallel(world)
        from vllm.model_executor.layers.minimax_rms_norm import lamport_workspace, rms_norm_tp

        self.module, self._rank, self._world = rms_norm_tp, rank, world
        self.capture = parallel_state.graph_capture
        group = parallel_state.get_tp_group()
        self._workspace = lamport_workspace.get_allreduce_workspace(
            rank, world, max_tokens=VLLM_FUSED_TOKENS, process_group=group.cpu_group
        )
        communicator = group.device_communicator
        self.all_reduce = type(getattr(communicator, "ca_comm", None)).__name__

    def fused(self, rows: Rows) -> Any:
        return torch.ops._C.minimax_allreduce_rms_qk(
            *(rows.qkv, rows.q_weight, rows.k_weight, self._workspace),
            *(*rows.sizes, self._rank, self._world, EPS),
        )

    def fall_back(self, rows: Rows) -> Any:
        return self.module._minimax_qk_norm_tp_fallback(
            *(rows.qkv, rows.q_weight, rows.k_weight), *(*rows.sizes, self._rank, self._world, EPS)
        )

    def floor(self, rows: Rows) -> Any:
        var = torch.empty(rows.qkv.shape[0], 2, dtype=torch.float32, device="cuda")
        q, kv = rows.sizes
        self.module._minimax_qk_var_kernel[(rows.qkv.shape[0],)](
            rows.qkv, var, rows.qkv.stride(0), q_size=q, kv_size=kv, BLOCK=1024
        )
        return var


def capture(call: Call, chained: int, vllm: Vllm | None) -> torch.cuda.CUDAGraph:
    """A graph of `chained` calls; vLLM's own context lets its all-reduce register its buffers."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if vllm is None:
        with torch.cuda.graph(graph):
            for _ in range(chained):
                call()
        return graph
    with (
        vllm.capture(torch.device("cuda", torch.cuda.current_device())) as context,
        torch.cuda.graph(graph, stream=context.stream),
    ):
        for _ in range(chained):
            call()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, group: Any) -> float:
    """Of one replay, once the ranks have met in another."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(group)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / REPLAYS


def measure(
    variants: dict[str, Call], tokens: int, samples: int, vllm: Vllm | None, group: Any
) -> dict[str, float]:
    """Microseconds a call of each variant: the median of samples of the slowest rank."""
    chained = 32 if tokens <= 2048 else 8
    graphs = {name: capture(call, chained, vllm) for name, call in variants.items()}
    mine: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(samples):
        for name, graph in graphs.items():
            mine[name].append(replay_seconds(graph, group) / chained * 1e6)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine, group)
    return {
        name: statistics.median(
            max(ranks) for ranks in zip(*(all_[name] for all_ in everybody), strict=True)
        )
        for name in graphs
    }


def compare(ours: Ours, vllm: Vllm | None, args: argparse.Namespace, group: Any) -> list[Any]:
    results: list[Any] = []
    for tokens in QUICK_TOKENS if args.quick else TOKENS:
        rows = make_rows(tokens, args.tp)
        variants: dict[str, Call] = {OURS: lambda rows=rows: ours.call(rows)}
        if vllm is not None:
            if tokens <= VLLM_FUSED_TOKENS:
                variants["vllm fused"] = lambda rows=rows: vllm.fused(rows)
            variants["vllm fall-back"] = lambda rows=rows: vllm.fall_back(rows)
            variants["floor"] = lambda rows=rows: vllm.floor(rows)
        times = measure(variants, tokens, QUICK_SAMPLES if args.quick else SAMPLES, vllm, group)
        ours.check()
        results.append({"tokens": tokens, **times})
        tell(f"{tokens:6d}  " + "  ".join(f"{name} {t:.2f}" for name, t in times.items()))
    return results


def host_microseconds(call: Call, group: Any) -> float:
    """What an eager call costs the host, where the GPU keeps up."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / HOST_CALLS * 1e6


def host_costs(ours: Ours, vllm: Vllm | None, args: argparse.Namespace, group: Any) -> str:
    rows = make_rows(1, args.tp)
    costs = {"ours": host_microseconds(lambda: ours.call(rows), group)}
    if vllm is not None:
        costs["vllm fused"] = host_microseconds(lambda: vllm.fused(rows), group)
    return ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items())


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def about(world: int, vllm: Vllm | None, costs: str) -> dict[str, Any]:
    names = ("torch", "vllm", "cuda-bindings", "nvidia-cuda-nvrtc", "triton")
    return {
        "date": pages.today(),
        "gpu": f"{world} x {torch.cuda.get_device_name()}",
        "versions": [*map(installed, names)],
        "case": f"q {Q_SIZE}, kv {KV_SIZE} over {world} ranks, bfloat16, CUDA graphs",
        "host microseconds an eager call": costs,
        "all-reduce of the fall-back": vllm.all_reduce if vllm else "-",
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown; with ratios to ours where vLLM's are there."""
    names = list(dict.fromkeys(name for row in results for name in row if name != "tokens"))
    rivals = [name for name in names if name.startswith("vllm") and OURS in names]
    head = ["tokens", *names, *(f"{name} / ours" for name in rivals)]
    lines = []
    for row in results:
        cells = [str(row["tokens"]), *(f"{row[n]:.2f}" if n in row else "-" for n in names)]
        cells += [f"{row[n] / row[OURS]:.2f}" if n in row else "-" for n in rivals]
        lines.append(cells)
    return pages.table(head, lines)


def start_vllm(rank: int, world: int, port: int) -> Vllm | None:
    try:
        return Vllm(rank, world, port)
    except Exception as error:  # noqa: BLE001 - ours can be timed without it
        print(f"without vLLM's own: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def run_rank(args: argparse.Namespace) -> None:
    torch.cuda.set_device(args.rank)
    vllm = start_vllm(args.rank, args.tp, args.port)
    if not dist.is_initialized():
        method = f"tcp://127.0.0.1:{args.port}"
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", method, limit, args.tp, args.rank)
    group = dist.new_group(backend="gloo")  # between samples no rank is to touch its GPU
    ours = Ours(args.rank, args.tp, group)
    results = compare(ours, vllm, args, group)
    costs = host_costs(ours, vllm, args, group)
    if args.rank == 0:
        name = f"reduce_rms_tp{args.tp}"
        facts = about(args.tp, vllm, costs)
        lines = [*pages.head(f"{name}, microseconds a call", facts), *table(results)]
        print(pages.write(args.out, name, {**facts, "results": results}, lines))
    dist.barrier(group)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("reduce_rms_results"))
    parser.add_argument("--quick", action="store_true", help="fewer token counts and samples")
    return run_program(
        *(parser, __file__, run_rank),
        lambda args: QUICK_SECONDS if args.quick else TOTAL_SECONDS,
        UNUSED,
    )


if __name__ == "__main__":
    sys.exit(main())
