"""Norms of rows that tensor parallelism has spread, as vLLM's models have them, against our op.

    python benchmarks/spread_norms.py --tp 2 --out benchmarks/results/mine

writes spread_norms_tp2.json and prints a line a case: microseconds a call, medians of the slowest
rank, in CUDA graphs of chained calls. Both sides are compiled by torch.compile, as in a model.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repository  # noqa: F401
import torch
from reduce_rms import EPS, Vllm, measure
from torch import distributed as dist
from turn import turn

from tests.kit.gpu_ranks import run_program

TOKENS = (1, 16, 64, 256, 1024, 4096)
SAMPLES = 9
OURS, THEIRS = "ours", "vllm"
# Elements of Q and of K of a whole row, and whether one call norms both.
ATTENTIONS = {
    "OLMoE-1B-7B": (2048, 2048, True),
    "Olmo-3-32B, Transformers backend": (5120, 1024, False),
}
Layer = Callable[..., Any]


def gathered(world: int, rank: int) -> Layer:
    from vllm.distributed import tensor_model_parallel_all_gather as gather

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole = gather(x.contiguous()).float()
        factor = torch.rsqrt(whole.square().mean(-1, keepdim=True) + EPS)
        out = ((whole * factor).to(x.dtype) * weight).chunk(world, -1)
        return out[rank]

    def layer(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        return norm(q, q_weight), norm(k, k_weight)

    return layer


def exchanged(handle: int, world: int, rank: int, together: bool) -> Layer:
    ops = torch.ops.vllm_commext

    def layer(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        weights = [each.chunk(world)[rank] for each in (q_weight, k_weight)]
        if together:
            return ops.split_qk_rms_norm(q, k, *weights, handle, EPS)
        return [
            ops.reduce_rms_norm(x, weight, handle, EPS)
            for x, weight in zip((q, k), weights, strict=True)
        ]

    return layer


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(torch.bfloat16)


def cases(rank: int, world: int, handle: int) -> Any:
    """By name, both layers and what makes their arguments for a number of tokens."""
    for name, (q, k, together) in ATTENTIONS.items():
        layers = {OURS: exchanged(handle, world, rank, together), THEIRS: gathered(world, rank)}
        weights = normal(q), normal(k)

        def arguments(tokens: int, q: int = q, k: int = k, weights: Any = weights) -> Any:
            packed = normal(tokens, (q + 2 * k) // world)
            return packed[:, : q // world], packed[:, q // world : (q + k) // world], *weights

        yield name, layers, arguments


def tell(row: dict[str, Any]) -> None:
    ours, theirs = row[OURS], row[THEIRS]
    sys.stdout.write(
        f"{row['case']:34s} {row['tokens']:6d}  ours {ours:.2f}  vllm {theirs:.2f}"
        f"  {theirs / ours:.2f}x\n"
    )
    sys.stdout.flush()


def run_rank(args: argparse.Namespace) -> None:
    from vllm_commext.compat.tp_group import let_vllm_use_nccl
    from vllm_commext.reduce_rms import ops as _ops  # noqa: F401 - registers the ops
    from vllm_commext.reduce_rms.kernel import slot_bytes
    from vllm_commext.reduce_rms.workspace import LamportWorkspace

    rank: int = args.rank
    let_vllm_use_nccl()
    torch.cuda.set_device(rank)
    vllm = Vllm(rank, args.tp, args.port)
    group = dist.new_group(backend="gloo")
    size = slot_bytes(max(TOKENS), args.tp)
    workspace = LamportWorkspace(rank, args.tp, size, group)
    ready: list[Any] = []
    for name, layers, arguments in cases(rank, args.tp, workspace.handle):
        compiled = {who: torch.compile(layer, dynamic=True) for who, layer in layers.items()}
        for tokens in (TOKENS[0], TOKENS[-1]):  # one of one token is a graph of its own
            for layer in compiled.values():
                layer(*arguments(tokens))
        ready.append((name, compiled, arguments))
    results: list[dict[str, Any]] = []
    with turn(time.monotonic() + args.seconds) if rank == 0 else contextlib.nullcontext():
        dist.barrier(group)
        for name, compiled, arguments in ready:
            for tokens in TOKENS:
                given = arguments(tokens)
                calls = {
                    who: lambda layer=layer, given=given: layer(*given)
                    for who, layer in compiled.items()
                }
                times = measure(calls, tokens, SAMPLES, vllm, group)
                results.append({"case": name, "tokens": tokens, **times})
                if rank == 0:
                    tell(results[-1])
    workspace.raise_if_failed()
    if rank == 0:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tp": args.tp}
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"spread_norms_tp{args.tp}.json"
        path.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="after which the ranks end")
    unused = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_COMMEXT": "0"}
    return run_program(parser, __file__, run_rank, lambda args: args.seconds, unused)


if __name__ == "__main__":
    sys.exit(main())
