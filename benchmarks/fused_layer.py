"""The fused op between the matrix products of a decoder layer: GEMM, op, GEMM, in a CUDA graph.

    python benchmarks/fused_layer.py --tp 2 --out benchmarks/results/mine

Layers are shaped as Llama 70B's without attention, and each has weights of its own, so caches hold
nothing of what a call needs but its input. Variants take turns in one run. A figure is microseconds
of a layer, which has two calls: of a sample the slowest rank's, of the samples the median.
``nothing`` leaves out the op; what a variant takes beyond it is what the op costs in its place,
launch gaps and what it does to its neighbours included. A timeline of rank 0 says how long before
each kernel nothing ran, and how long it took. Writes fused_layer_tp2.md and .json.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fused_norm
import pages
import repository  # noqa: F401

from tests.kit.gpu_ranks import run_program
from vllm_commext.allreduce.fused.layout import ONE_PHASE

HIDDEN, HEADS, KV_HEADS, HEAD, INTERMEDIATE = 8192, 64, 8, 128, 28672
BATCHES = (1, 16, 64)
NOTHING = "nothing"
Op = Callable[[Any, Any, Any], tuple[Any, Any]]  # input, residual, the weights that come next


class Layers:
    """The weights of some layers, of one rank, and their chain."""

    def __init__(self, count: int, world: int, dtype: Any) -> None:
        import torch

        self.q = HEADS * HEAD // world
        qkv = (HEADS + 2 * KV_HEADS) * HEAD // world
        wide = INTERMEDIATE // world
        shapes = ((qkv, HIDDEN), (HIDDEN, self.q), (2 * wide, HIDDEN), (HIDDEN, wide))
        self.layers = [
            [torch.empty(shape, dtype=dtype, device="cuda").normal_(std=0.02) for shape in shapes]
            for _ in range(count)
        ]

    def run(self, hidden: Any, residual: Any, op: Op) -> Any:
        import torch
        from torch.nn.functional import linear

        residual = residual.clone()
        for index, (qkv, out, up, down) in enumerate(self.layers):
            attention = linear(hidden, qkv)[:, : self.q]
            hidden, residual = op(linear(attention, out), residual, up)
            gates = linear(hidden, up)
            inner = torch.empty_like(gates[:, : gates.shape[1] // 2])
            torch.ops._C.silu_and_mul(inner, gates)
            following = self.layers[(index + 1) % len(self.layers)][0]
            hidden, residual = op(linear(inner, down), residual, following)
        return hidden, residual


def ops(bench: Any, rows: int, prefetches: Sequence[str]) -> dict[str, Op]:
    from vllm import _custom_ops

    def ours(form: Any, prefetch: str = "0:0") -> Op:
        kernels = bench.kernels
        mib, cycles = map(int, prefetch.split(":"))

        def op(x: Any, residual: Any, following: Any) -> tuple[Any, Any]:
            kernels.prefetched, kernels.prefetch_after = mib << 20, cycles
            operands = (bench.shape, form, x, residual, bench.weight, fused_norm.EPS)
            out = kernels.run(*operands, next_weight=following if mib else None)
            return out.out, out.residual

        return op

    def parts(all_reduce: Callable[[Any], Any]) -> Op:
        def op(x: Any, residual: Any, _: Any) -> tuple[Any, Any]:
            out = all_reduce(x)
            _custom_ops.fused_add_rms_norm(out, residual, bench.weight, fused_norm.EPS)
            return out, residual

        return op

    found: dict[str, Op] = {NOTHING: lambda x, residual, _: (x, residual)}
    for name, form in bench.fitting(rows).items():
        found[name] = ours(form)
        if form.kernel == ONE_PHASE:
            found |= {f"{name}, prefetch {each}": ours(form, each) for each in prefetches}
    found["push + norm"] = parts(bench.push.all_reduce)
    found["vllm + norm"] = parts(bench.communicator.all_reduce)
    call = bench.flashinfer_call(rows)
    if call is not None:

        def flashinfer(x: Any, residual: Any, _: Any) -> tuple[Any, Any]:
            call(x, residual, residual, x)  # in place, as vLLM's pass does
            return x, residual

        found["flashinfer"] = flashinfer
    return found


def timeline(graph: Any, layers: int) -> list[tuple[str, float, float]]:
    """Of a layer's kernels: name, microseconds without any before it, and its own; medians over
    layers and replays."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(8):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.profiler.DeviceType.CUDA
    )
    per_replay = len(events) // 8
    per_layer = (per_replay - 1) // layers
    found: list[tuple[str, float, float]] = []
    for place in range(per_layer):
        gaps, lengths, name = [], [], ""
        for replay in range(1, 8):
            for layer in range(1, layers):
                at = replay * per_replay + 1 + layer * per_layer + place
                begun, ended, name = events[at]
                gaps.append((begun - events[at - 1][1]) / 1e3)
                lengths.append((ended - begun) / 1e3)
        found.append((name[:60], statistics.median(gaps), statistics.median(lengths)))
    return found


def measure(bench: Any, layers: Layers, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a layer of every variant, and timelines."""
    import torch

    from vllm_commext.allreduce.table import measure as measuring
    from vllm_commext.allreduce.table.table import median_of_slowest

    hidden, residual = (bench.inputs(rows, seed)[1] for seed in (1, 2))
    graphs, outputs = {}, {}
    for name, op in ops(bench, rows, args.prefetch).items():
        for _ in range(2):
            layers.run(hidden, residual, op)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with bench.group.graph_capture(), torch.cuda.graph(graphs[name]):
            outputs[name] = layers.run(hidden, residual, op)
    mine: dict[str, list[float]] = {name: [] for name in graphs}
    for sample in range(args.samples):
        names = list(graphs)
        for name in names[sample % len(names) :] + names[: sample % len(names)]:
            seconds = measuring.replay_seconds(graphs[name], args.replays, bench.collective)
            mine[name].append(seconds / len(layers.layers) * 1e6)
    everybody = bench.collective.run(lambda: mine)
    times = {name: median_of_slowest([rank[name] for rank in everybody]) for name in graphs}
    first = next(iter(bench.fitting(rows)))
    same = {
        name: all(torch.equal(a, b) for a, b in zip(outputs[name], outputs[first], strict=True))
        for name in graphs
        if name != NOTHING
    }
    row = {"rows": rows, "microseconds a layer": times, "bits as the first of ours": same}
    if bench.rank == 0:
        base = times[NOTHING]
        print(f"--- {rows} rows; nothing {base:.1f} us a layer; each op costs in its place:")
        for name, spent in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {name:18s} {spent:8.2f}  op {(spent - base) / 2:6.2f}  {same.get(name)}")
    row["timelines"] = {}
    for name, graph in graphs.items():
        bench.collective.run(lambda: None)
        found = timeline(graph, len(layers.layers))
        row["timelines"][name] = found
        if bench.rank == 0:
            print(f"  {name}: " + "; ".join(f"+{g:.1f} {n[:28]} {t:.1f}" for n, g, t in found))
    sys.stdout.flush()
    measuring.give_back_memory()
    return row


def page(name: str, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: what an op costs in its place, and the layer's timeline."""
    lines = pages.head(name, facts)
    lines += ["Microseconds a layer of two calls; in brackets what a call costs in its place.", ""]
    cells = []
    for row in rows:
        times = row["microseconds a layer"]
        costs = [f"{of:.1f} ({(of - times[NOTHING]) / 2:.1f})" for of in times.values()]
        cells.append([str(row["rows"]), *costs])
    lines += pages.table(["rows", *rows[0]["microseconds a layer"]], cells)
    lines += [
        "",
        "Of rank 0 the kernels of a layer in microseconds, `+` what lies before each:",
        "",
    ]
    for row in rows:
        for name, kernels in row["timelines"].items():
            steps = "; ".join(f"+{gap:.1f} `{kernel}` {of:.1f}" for kernel, gap, of in kernels)
            lines.append(f"- {row['rows']} rows, {name}: {steps}")
    return lines


def run_rank(args: argparse.Namespace) -> None:
    import torch

    from vllm_commext.compat.tp_group import tensor_parallel

    with tensor_parallel(args.rank, args.tp, args.port) as group, torch.inference_mode():
        largest = 2 * HIDDEN * max(args.batches)
        bench = fused_norm.Bench(group, args.dtype, HIDDEN, largest, 0, args.warps)
        layers = Layers(args.layers, args.tp, bench.dtype)
        rows = []
        for batch in args.batches:
            rows.append(measure(bench, layers, batch, args))
            if args.rank == 0:
                facts = {
                    "date": pages.today(),
                    "commit": args.commit,
                    "gpu": torch.cuda.get_device_name(),
                    "dtype": args.dtype,
                    "layers": args.layers,
                }
                name = f"fused_layer_tp{args.tp}"
                pages.write(args.out, name, {**facts, "results": rows}, page(name, facts, rows))
        bench.collective.run(lambda: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="rows of a message")
    parser.add_argument("--warps", type=int, nargs="+", default=(32,), help="of a block of ours")
    parser.add_argument(
        "--prefetch",
        nargs="*",
        default=["16:1200"],
        help="MiB of the next weights that ours prefetches, and cycles after its beginning",
    )
    parser.add_argument("--samples", type=int, default=31)
    parser.add_argument("--replays", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=150.0, help="bound for the whole run")
    parser.add_argument("--commit", default="", help="what the report is to name")
    return run_program(parser, __file__, run_rank, lambda args: args.seconds, fused_norm.STOCK)


if __name__ == "__main__":
    sys.exit(main())
