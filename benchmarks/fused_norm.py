"""All-reduce, residual and RMSNorm: one launch of ours, FlashInfer's fused kernel, and the parts.

    python benchmarks/fused_norm.py --tp 2 --out benchmarks/results/mine

writes fused_norm_tp2.md and .json. All variants of a size take turns in one run. Each figure is
microseconds a call in a CUDA graph of chained calls: of a sample the slowest rank's, of the samples
the median. ``one-phase`` and ``two-phase`` are our kernels with the number of warps of a block;
``push + norm`` is our all-reduce followed by vLLM's norm, ``vllm + norm`` vLLM's own all-reduce
followed by it, ``flashinfer`` the kernel that vLLM's fusion pass takes, called as the pass does.
``--between 100`` reads 100 MiB of other weights before each call, as a model does, and takes off
what these reads take alone: caches then hold nothing of what the call needs but its input.

Before anything is timed, every form of ours is compared with a sum in the order of ranks: the new
residual bit by bit, the norm within a unit in the last place. ``--stress N`` makes N calls of
random sizes and forms, a part of them replays of CUDA graphs, with ranks that come late by turns.
"""

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pages
import repository  # noqa: F401

from tests.kit.gpu_ranks import run_program

STOCK = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_COMMEXT_ALLREDUCE": "0"}
MIB = 1 << 20
SIZES = (*((16 << 10) << step for step in range(13)), 128 * MIB)  # 16 KiB to 64 MiB, 128 MiB
WARPS = (4, 8, 16, 32)
EPS = 1e-6
ALONE = "other weights alone"
LATE_SECONDS = 0.002
PART = 4  # of stress calls one in so many replays a graph
# Up to here vLLM's pass takes FlashInfer's kernel on compute capability 9.0, by number of ranks.
FLASHINFER_MAX_BYTES = {2: 64 * MIB, 4: 2 * MIB, 8: MIB // 2}
FLASHINFER_ONE_SHOT_BYTES = {2: 32 * MIB, 4: 2 * MIB, 8: MIB // 2}
Call = Callable[[Any], Any]


class Bench:
    """One rank: the group, our memory and kernels, and the tensors of a size."""

    def __init__(
        self,
        group: Any,
        dtype: str,
        hidden: int,
        max_bytes: int,
        between: int,
        warps: Sequence[int] = WARPS,
    ) -> None:
        import torch

        from vllm_commext.allreduce.fused.kernels import FusedKernels
        from vllm_commext.allreduce.fused.layout import ONE_PHASE, TWO_PHASE, Form, FusedShape
        from vllm_commext.allreduce.push import PushBackend
        from vllm_commext.collective import Collective

        made = group.device_communicator
        self.group, self.communicator = group, made
        self.collective = Collective.over(made.cpu_group)
        self.rank, self.world = self.collective.rank, self.collective.world_size
        self.push = PushBackend(max_bytes, self.collective)
        self.shape = FusedShape(dtype, dtype, hidden)
        self.dtype, self.hidden = getattr(torch, dtype), hidden
        self.kernels = FusedKernels(self.push.memory, self.collective)
        self.forms = {
            f"{name} {each}": Form(kernel, each)
            for name, kernel in (("one-phase", ONE_PHASE), ("two-phase", TWO_PHASE))
            for each in warps
        }
        self.kernels.prepare(self.shape, list(self.forms.values()))
        self.weight = torch.rand(hidden, device="cuda").to(self.dtype) + 0.5
        columns = between * MIB // (hidden * self.dtype.itemsize)
        self.others = torch.rand(columns, hidden, device="cuda").to(self.dtype)

    def read_others(self, tensor: Any) -> Any:
        """Multiply a row by the weights of others, as the layer before a call does."""
        return self.others @ tensor[0]

    def after_others(self, call: Call) -> Call:

        def both(tensor: Any) -> Any:
            self.read_others(tensor)
            return call(tensor)

        return both

    def fitting(self, rows: int) -> dict[str, Any]:
        """The forms that so many rows find room for."""
        most = self.kernels.most_rows
        return {name: form for name, form in self.forms.items() if most(self.shape, form) >= rows}

    def ours(self, form: Any, residual: Any) -> Call:
        from vllm_commext.allreduce.fused.kernels import Operands

        def call(tensor: Any) -> Any:
            return self.kernels.run(form, Operands(self.shape, tensor, residual, self.weight, EPS))

        return call

    def parts(self, all_reduce: Call, residual: Any) -> Call:
        """An all-reduce and vLLM's norm after it."""
        from vllm import _custom_ops

        def call(tensor: Any) -> Any:
            out = all_reduce(tensor)
            _custom_ops.fused_add_rms_norm(out, residual, self.weight, EPS)
            return out

        return call

    def flashinfer(self, rows: int, residual: Any) -> Call | None:
        """`flashinfer_call` into new tensors."""
        import torch

        fused = self.flashinfer_call(rows)
        if fused is None:
            return None

        def call(tensor: Any) -> Any:
            norm = torch.empty_like(tensor)
            fused(tensor, residual, torch.empty_like(tensor), norm)
            return norm

        return call

    def flashinfer_call(self, rows: int) -> Callable[[Any, Any, Any, Any], None] | None:
        """FlashInfer's fused kernel as vLLM's pass calls it, with input, residual, and where the
        new residual and the norm go; None where the pass does not, and for float32, in which it
        ended this benchmark with an illegal memory access."""
        import torch

        num_bytes = rows * self.hidden * self.dtype.itemsize
        limit = FLASHINFER_MAX_BYTES.get(self.world, 0)
        missing = importlib.util.find_spec("flashinfer") is None
        if missing or num_bytes > limit or self.dtype == torch.float32:
            return None
        from flashinfer import comm

        from vllm_commext.allreduce.flashinfer import (
            MEASURING_BYTES,
            WorkspaceKey,
            shared,
        )

        shared.budget_bytes, group = MEASURING_BYTES, self.communicator.cpu_group
        key = WorkspaceKey(group.group_name, self.dtype.itemsize == 4, self.hidden)
        made = shared.get_or_create(key, self.dtype, limit, group)
        if made is None or made.size.max_bytes < num_bytes:
            return None
        workspace = made.handle
        one_shot = num_bytes <= FLASHINFER_ONE_SHOT_BYTES[self.world]

        def call(tensor: Any, residual: Any, residual_out: Any, norm: Any) -> None:
            comm.allreduce_fusion(
                input=tensor,
                workspace=workspace,
                pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
                launch_with_pdl=True,
                output=None,
                residual_out=residual_out,
                norm_out=norm,
                quant_out=None,
                scale_out=None,
                residual_in=residual,
                rms_gamma=self.weight,
                rms_eps=EPS,
                scale_factor=None,
                layout_code=None,
                use_oneshot=one_shot,
                fp32_acc=True,
                trigger_completion_at_end=True,
            )

        return call

    def inputs(self, rows: int, seed: int) -> tuple[list[Any], Any]:
        """Every rank's tensor, the same on all ranks, and the residual."""
        import torch

        generator = torch.Generator("cuda").manual_seed(seed)

        def make() -> Any:
            return torch.randn(rows, self.hidden, generator=generator, device="cuda").to(self.dtype)

        return [make() for _ in range(self.world)], make()

    def want(self, parts: Sequence[Any], residual: Any) -> tuple[Any, Any]:
        """The residual to the bit, and the norm in float32."""
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        new = (total.to(self.dtype).float() + residual.float()).to(self.dtype)
        wide = new.float()
        factor = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return new, wide * factor * self.weight.float()


def check(bench: Bench, sizes: Sequence[int]) -> int:
    """Compare every form at every size with the sum in the order of ranks; how many were."""
    import torch

    checked = 0
    for size in sizes:
        rows = rows_of(bench, size)
        parts, residual = bench.inputs(rows, seed=size)
        new, norm = bench.want(parts, residual)
        step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-21}
        first = None
        for name, form in bench.fitting(rows).items():
            out = bench.ours(form, residual)(parts[bench.rank])
            assert torch.equal(out.residual, new), f"{name}, {size} bytes: the residual differs"
            error = ((out.out.float() - norm).abs() / norm.abs().clamp_min(1e-3)).max().item()
            assert error <= step[bench.dtype], f"{name}, {size} bytes: the norm is off by {error}"
            first = out.out if first is None else first
            assert torch.equal(out.out, first), f"{name}, {size} bytes: its bits are its own"
            checked += 1
    return checked


def stress(bench: Bench, num_calls: int) -> dict[str, int]:
    """Calls of random sizes and forms, eager and replayed, with ranks that come late by turns."""
    import torch

    chance = random.Random(1)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    cases: list[tuple[Any, Any, Any, Any]] = []
    for index in range(24):
        rows = chance.choice((1, 2, 3, 7, 16, 33, 64, 100, 256, 1000))
        parts, residual = bench.inputs(rows, seed=1000 + index)
        form = chance.choice(list(bench.fitting(rows).values()))
        call = bench.ours(form, residual)
        tensor = parts[bench.rank]
        call(tensor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call(tensor)
        new = bench.want(parts, residual)[0]
        cases.append(((call, tensor), (graph, replayed), new, rows))
    counts = {"calls": 0, "replays": 0}
    for number in range(num_calls):
        (call, tensor), (graph, replayed), new, _ = chance.choice(cases)
        if number % 50 == 0 and chance.randrange(bench.world) == bench.rank:
            torch.cuda.synchronize()
            time.sleep(LATE_SECONDS)
        if chance.randrange(PART) == 0:
            graph.replay()
            found = replayed.residual
            counts["replays"] += 1
        else:
            found = call(tensor).residual
            counts["calls"] += 1
        wrong += (found != new).sum()
    torch.cuda.synchronize()
    return {**counts, "wrong elements": int(wrong)}


def rows_of(bench: Bench, size: int) -> int:
    """Rows of a message of so many bytes, at least one."""
    return max(1, size // (bench.hidden * bench.dtype.itemsize))


def variants(bench: Bench, rows: int) -> Iterator[tuple[str, Call]]:
    """Every variant that takes so many rows; collective."""
    from vllm_commext.allreduce.limits import Message

    residual = bench.inputs(rows, seed=1)[1]
    for name, form in bench.fitting(rows).items():
        yield name, bench.ours(form, residual)
    if bench.push.takes(Message((rows, bench.hidden), bench.shape.dtype)):
        yield "push + norm", bench.parts(bench.push.all_reduce, residual)
    yield "vllm + norm", bench.parts(bench.communicator.all_reduce, residual)
    fused = bench.flashinfer(rows, residual)
    if fused is not None:
        yield "flashinfer", fused


def measure_sizes(bench: Bench, sizes: Sequence[int], samples: int) -> list[dict[str, Any]]:
    """A row a size: the time of each variant, and how ours compares."""
    import torch

    from vllm_commext.allreduce import measure
    from vllm_commext.allreduce.limits import Message

    options = measure.Options(samples=samples, hidden=bench.hidden)
    found: list[dict[str, Any]] = []
    for size in sizes:
        rows = rows_of(bench, size)
        message = Message((rows, bench.hidden), bench.shape.dtype)
        calls: Mapping[str, Call] = dict(variants(bench, rows))
        if len(bench.others):
            calls = {name: bench.after_others(call) for name, call in calls.items()}
            calls = {**calls, ALONE: bench.read_others}
        times = measure.measure_message(
            calls, message, options, bench.collective, bench.group.graph_capture
        )
        alone = times.pop(ALONE, 0.0)
        times = {name: spent - alone for name, spent in times.items()}
        measure.give_back_memory()
        ours = {name: spent for name, spent in times.items() if name in bench.forms}
        best = min(ours, key=lambda name: ours[name]) if ours else ""
        row = {"bytes": size, "rows": rows, "best of ours": best, "microseconds": times}
        found.append(row)
        if bench.rank == 0:
            line = "  ".join(f"{name} {spent:.1f}" for name, spent in times.items())
            print(f"{size:10d}  best {best}  {line}", flush=True)
        torch.cuda.synchronize()
    return found


def ratio(row: Mapping[str, Any], name: str) -> str:
    """A variant's time over that of the best form of ours."""
    times = row["microseconds"]
    if name not in times or not row["best of ours"]:
        return "-"
    return f"{times[name] / times[row['best of ours']]:.2f}"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    others = ("flashinfer", "push + norm", "vllm + norm")
    head = ["bytes", "ours", "form", *others, *(f"{name} / ours" for name in others)]
    lines = []
    for row in rows:
        times, best = row["microseconds"], row["best of ours"]
        cells = [str(row["bytes"]), f"{times[best]:.1f}" if best else "-", best or "-"]
        cells += [f"{times[name]:.1f}" if name in times else "-" for name in others]
        cells += [ratio(row, name) for name in others]
        lines.append(cells)
    return pages.table(head, lines)


def run_rank(args: argparse.Namespace) -> None:
    import msgspec
    import torch

    from vllm_commext.allreduce.machine import read_machine
    from vllm_commext.compat.tp_group import tensor_parallel

    with tensor_parallel(args.rank, args.tp, args.port) as group, torch.inference_mode():
        bench = Bench(group, args.dtype, args.hidden, max(args.sizes), args.between, args.warps)
        checked = check(bench, args.sizes)
        stressed = stress(bench, args.stress)
        if args.rank == 0:
            print(f"{checked} comparisons, stress {stressed}", flush=True)
        assert not stressed["wrong elements"], stressed
        rows = measure_sizes(bench, args.sizes, args.samples)
        if args.rank == 0:
            machine = read_machine(torch.device("cuda", args.rank))
            facts = {
                "date": pages.today(),
                "commit": args.commit,
                "machine": msgspec.to_builtins(machine),
                "dtype": args.dtype,
                "hidden": args.hidden,
                "MiB of other weights before each call": args.between,
                "comparisons without a difference": checked,
                "stress": stressed,
                "multicast": "off for all",
            }
            name = f"fused_norm_tp{args.tp}"
            lines = [*pages.head(f"{name}, microseconds a call", facts), *table(rows)]
            print(pages.write(args.out, name, {**facts, "results": rows}, lines), flush=True)
        bench.collective.run(lambda: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes")
    parser.add_argument(
        "--between", type=int, default=0, help="MiB of other weights that are read before each call"
    )
    parser.add_argument(
        "--warps", type=int, nargs="+", default=WARPS, help="of a block of ours, each tried"
    )
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--stress", type=int, default=2000, help="calls of the stress run")
    parser.add_argument("--seconds", type=float, default=400.0, help="bound for the whole run")
    parser.add_argument("--commit", default="", help="what the report is to name")
    return run_program(parser, __file__, run_rank, lambda args: args.seconds, STOCK)


if __name__ == "__main__":
    sys.exit(main())
