"""The all-reduce backends, vLLM's own dispatch and ours, interleaved in one run.

    python benchmarks/allreduce.py --tp 2 --out benchmarks/results/mine

writes allreduce_tp2.md and .json. Every backend is measured
first and a table is made of it; then, in a second pass, ``vllm`` (what vLLM does by itself) and
``ours`` (the dispatcher with that table) take turns with every backend again. So ours is judged on
times that the table was not made from. Each figure is microseconds a call in a CUDA graph of
chained calls with their copies and fresh outputs: of a sample the slowest rank's, of the samples
the median. Only ratios of one run mean anything.

``--table builtin`` judges the built-in table instead; ``--quick`` takes fewer samples; ``--eager``
adds what a call costs the host.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pages
import repository  # noqa: F401
from machine import installed

from tests.kit.gpu_ranks import run_program

OURS, VLLM = "ours", "vllm"
HOST_CALLS = 1000
MAX_REGRET, MIN_RATIO = 0.03, 0.97
STOCK = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_COMMEXT_ALLREDUCE": "0"}
Row = dict[str, Any]


class Variants:
    """Every backend by name, vLLM's own dispatch, and ours once `judge` has given it a table."""

    def __init__(self, group: Any) -> None:
        from vllm_commext.allreduce import flashinfer, limits
        from vllm_commext.allreduce.creation import Parts, create_dispatcher
        from vllm_commext.allreduce.flashinfer import MEASURING_BYTES
        from vllm_commext.collective import Collective

        made = group.device_communicator
        custom = made.ca_comm if made.ca_comm is not None and not made.ca_comm.disabled else None
        self._parts = Parts(
            made.cpu_group, made.device_group, made.device, custom, made.pynccl_comm
        )
        flashinfer.shared.budget_bytes = MEASURING_BYTES
        self.dispatcher = create_dispatcher(self._parts, None, wanted=limits.BACKENDS)
        self.collective = Collective.over(made.cpu_group)
        self.group, self._vllm = group, made

    def use(self, table: Any) -> None:
        """Follow another table, with the same backends."""
        from vllm_commext.allreduce.dispatcher import Dispatcher

        backends = list(self.dispatcher.backends.values())
        self.dispatcher = Dispatcher(backends, self.dispatcher.world_size, table)

    def measure(self, options: Any) -> dict[str, Any]:
        from vllm_commext.allreduce import measure

        return measure.measure_backends(
            self.dispatcher, self.collective, options, self.group.graph_capture, tell_size
        )

    def calls(self, message: Any) -> dict[str, Callable[[Any], Any]]:
        from vllm_commext.allreduce.measure import backend_calls

        return {
            **backend_calls(self.dispatcher, message),
            VLLM: self._vllm.all_reduce,
            OURS: self._ours,
        }

    def _ours(self, tensor: Any) -> Any:
        out = self.dispatcher.all_reduce(tensor)
        return self._vllm.all_reduce(tensor) if out is None else out

    def choice(self, message: Any) -> str:
        """What ours takes for the message."""
        import torch

        tensor = torch.zeros(message.shape, dtype=getattr(torch, message.dtype), device="cuda")
        return self.dispatcher.choice(tensor)

    def about(self) -> dict[str, str]:
        """What vLLM's dispatch had to choose from."""
        made = self._vllm
        pynccl = made.pynccl_comm
        return {
            "ours made": ", ".join(self.dispatcher.backends),
            "NCCL through": "pynccl" if pynccl is not None and not pynccl.disabled else "torch",
            "vLLM's custom": str(made.ca_comm is not None and not made.ca_comm.disabled),
            "vLLM's FlashInfer": str(made.fi_ar_comm is not None and not made.fi_ar_comm.disabled),
        }


def judge(variants: Variants, options: Any, dtype: str) -> list[Row]:
    """The second pass: a row a size, with every variant's time."""
    from vllm_commext.allreduce import measure
    from vllm_commext.allreduce.limits import message_of_bytes

    rows: list[Row] = []
    for size in options.sizes:
        message = message_of_bytes(size, dtype, options.hidden)
        calls = variants.calls(message)
        chosen = variants.choice(message)
        context = variants.group.graph_capture
        times = measure.measure_message(calls, message, options, variants.collective, context)
        backends = {name: t for name, t in times.items() if name not in (OURS, VLLM)}
        row = {
            "bytes": size,
            "dtype": dtype,
            "chosen": chosen,
            "regret": times[OURS] / min(backends.values()) - 1,
            "vllm / ours": times[VLLM] / times[OURS],
            "microseconds": times,
        }
        rows.append(row)
        tell(line_of(row))
    return rows


def host_costs(variants: Variants, options: Any) -> dict[str, float]:
    """Microseconds that an eager call of 8 KiB costs the host, where the GPU keeps up."""
    import torch

    from vllm_commext.allreduce.limits import message_of_bytes

    message = message_of_bytes(8192, "bfloat16", options.hidden)
    tensor = torch.zeros(message.shape, dtype=torch.bfloat16, device="cuda")
    costs: dict[str, float] = {}
    for name, call in variants.calls(message).items():
        for _ in range(20):
            call(tensor)
        torch.cuda.synchronize()
        variants.collective.run(lambda: None)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call(tensor)
        costs[name] = (time.perf_counter() - start) / HOST_CALLS * 1e6
        torch.cuda.synchronize()
    return costs


def is_first() -> bool:
    from torch import distributed

    return distributed.get_rank() == 0


def tell(text: str) -> None:
    if is_first():
        print(text, flush=True)


def tell_size(dtype: str, size: int, times: dict[str, float]) -> None:
    tell(f"{dtype} {size:9d}  " + "  ".join(f"{name} {t:.1f}" for name, t in times.items()))


def line_of(row: Row) -> str:
    times = "  ".join(f"{name} {t:.1f}" for name, t in row["microseconds"].items())
    judged = f"regret {row['regret']:+.1%}  vllm/ours {row['vllm / ours']:.2f}"
    return f"{row['dtype']} {row['bytes']:9d}  {judged}  chose {row['chosen']}  {times}"


def table(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["microseconds"]))
    head = ["dtype", "bytes", *names, "chosen", "regret", "vllm / ours"]
    lines = []
    for row in rows:
        times = row["microseconds"]
        cells = [row["dtype"], str(row["bytes"])]
        cells += [f"{times[name]:.1f}" if name in times else "-" for name in names]
        cells += [row["chosen"], f"{row['regret']:+.1%}", f"{row['vllm / ours']:.2f}"]
        lines.append(cells)
    return pages.table(head, lines)


def verdict(rows: Sequence[Row]) -> list[str]:
    """The claims and whether this run bears them out."""
    regret = max(rows, key=lambda row: row["regret"])
    ratio = min(rows, key=lambda row: row["vllm / ours"])
    return [
        f"largest regret {regret['regret']:+.1%} at {regret['bytes']} bytes of {regret['dtype']}: "
        + ("holds" if regret["regret"] <= MAX_REGRET else f"ABOVE {MAX_REGRET:.0%}"),
        f"smallest vllm / ours {ratio['vllm / ours']:.2f} at {ratio['bytes']} bytes of "
        f"{ratio['dtype']}: "
        + ("holds" if ratio["vllm / ours"] >= MIN_RATIO else f"BELOW {MIN_RATIO}"),
    ]


def write(args: argparse.Namespace, facts: dict[str, Any], rows: list[Row]) -> None:
    name = f"allreduce_tp{args.tp}"
    lines = [*pages.head(f"{name}, microseconds a call", facts), *table(rows)]
    print(pages.write(args.out, name, {**facts, "results": rows}, lines))


def run_rank(args: argparse.Namespace) -> None:
    import msgspec
    import torch

    from vllm_commext.allreduce import cache, measure
    from vllm_commext.allreduce.machine import read_machine
    from vllm_commext.allreduce.table import build_table, describe
    from vllm_commext.compat.tp_group import tensor_parallel

    with tensor_parallel(args.rank, args.tp, args.port) as group, torch.inference_mode():
        variants = Variants(group)
        samples = 7 if args.quick else 21
        options = measure.Options(
            *(tuple(args.sizes or measure.SIZES), tuple(args.dtype), args.hidden, samples),
            seconds=args.seconds,
        )
        machine = read_machine(torch.device("cuda", args.rank))
        if args.table == "builtin":
            made = cache.builtin_table(machine.gpu, args.tp)
            if made is None:
                sys.exit(f"no table is built in for {args.tp} x {machine.gpu}")
        else:
            first = msgspec.structs.replace(options, samples=max(5, samples // 2))
            times = variants.measure(first)
            made = build_table(times, args.tp, "first pass")
        variants.use(made)
        rows: list[Row] = []
        for dtype in args.dtype:
            rows += judge(variants, options, dtype)
        costs = host_costs(variants, options) if args.eager else {}
        if args.rank == 0:
            facts = {
                "date": pages.today(),
                "machine": msgspec.to_builtins(machine),
                "versions": [*map(installed, ("torch", "vllm", "flashinfer-python"))],
                "hidden": args.hidden,
                **variants.about(),
                "table": list(describe(made)),
                "verdict": verdict(rows),
                "host microseconds an eager call": costs,
            }
            write(args, facts, rows)
        variants.collective.run(lambda: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes (default: 2 KiB to 64 MiB)")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=200.0, help="bound for the first pass")
    parser.add_argument("--table", choices=("measured", "builtin"), default="measured")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--eager", action="store_true", help="also what a call costs the host")
    return run_program(parser, __file__, run_rank, lambda args: 420 + 3 * args.seconds, STOCK)


if __name__ == "__main__":
    sys.exit(main())
