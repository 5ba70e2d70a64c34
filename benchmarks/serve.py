"""Real servers with everything of ours off and on, side by side, under the same load.

    python benchmarks/serve.py --tp 1 2 --out benchmarks/results/mine
    python benchmarks/serve.py --device cuda --model dense --tp 2 --gpus 0,1 2,3 --out mine
    python benchmarks/serve.py --quick

Cells: `single`, one server; `1P1D`, a prefill and a decode server behind our proxy, with vLLM's
own NixlConnector (off) or ours (on): the same proxy serves both. Off is VLLM_COMMEXT=0, on is our
queue and connector, with CUDA also our all-reduce and QK RMSNorm; `--on NAME=VALUE`
changes that. Both are up all the time and take turns; the other one's processes are stopped
meanwhile (SIGSTOP), for vLLM's are busy while idle. Measured are the client's times, the CPU time
of every process under load, and that of silence. Answers of off and on are compared.

`--out mine` writes mine.md and mine.json. A failed request ends the run with the reason.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import repository  # noqa: F401
from machine import load_average, machine
from serving import cpu, figures, load, report
from serving.figures import Sample
from serving.models import MODELS, write_model
from serving.servers import (
    CELLS,
    SETTLE_SECONDS,
    VARIANTS,
    Setup,
    Variant,
    active,
    alone,
    left_in_shared_memory,
    started,
)


def one_turn(
    args: argparse.Namespace, variant: Variant, prompts: Sequence[Sequence[int]]
) -> tuple[load.Outcome, list[figures.Figure]]:
    """One load on one variant, then silence, and the figures of both."""
    before = cpu.snapshot(variant.servers)
    outcome = load.run(variant.url, prompts, args.concurrency, args.output_tokens)
    spent = cpu.used(before, cpu.snapshot(variant.servers))
    found = figures.of_load(outcome)
    found += figures.of_cpu(spent, len(prompts) * args.output_tokens)
    return outcome, found + (silence(args, variant) if args.idle_seconds else [])


def silence(args: argparse.Namespace, variant: Variant) -> list[figures.Figure]:
    """Figures of some seconds without any request, some time after the last one."""
    time.sleep(SETTLE_SECONDS)
    before, started_at = cpu.snapshot(variant.servers), time.perf_counter()
    time.sleep(args.idle_seconds)
    after, seconds = cpu.snapshot(variant.servers), time.perf_counter() - started_at
    return figures.of_silence(cpu.used(before, after), seconds)


def equal_answers(outcomes: Mapping[str, load.Outcome]) -> str:
    """How many answers are the same from both."""
    off, on = (outcomes[name].answers for name in VARIANTS)
    same = sum(a.token_ids == b.token_ids for a, b in zip(off, on, strict=True))
    return f"{same} of {len(off)}"


def run_cell(
    args: argparse.Namespace,
    setup: Setup,
    cell: str,
    label: str,
    samples: list[Sample],
    save: Callable[[dict[str, str]], None],
) -> None:
    """All rounds of one cell, added to ``samples``; ``save`` gets the notes after each."""
    prompts = load.make_prompts(args.requests, args.prompt_tokens)
    before = set(os.listdir("/dev/shm"))
    with started(setup, cell) as variants:
        notes = {"active": str(active(variants)), "load average, ready": load_average()}
        for name in variants:
            with alone(variants, name) as one:
                load.run(one.url, prompts[: args.warm_up], args.concurrency, args.output_tokens)
        outcomes: dict[str, load.Outcome] = {}
        for number in range(args.rounds):
            for name in variants:
                with alone(variants, name) as one:
                    outcomes[name], found = one_turn(args, one, prompts)
                samples += [Sample(label, name, number, *figure) for figure in found]
            equal = equal_answers(outcomes)
            notes[f"equal answers of off and on, round {number + 1}"] = equal
            print(f"{label}, round {number + 1}: {equal} answers equal", flush=True)
            notes["load average, measured"] = load_average()
            save(notes)
    notes["left in /dev/shm"] = str(left_in_shared_memory(before))
    save(notes)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one short round with tensor-parallel size 1")
    add("--model", default="llama", choices=MODELS, help="made here; dense, minimax: for GPUs")
    add("--tp", type=int, nargs="+", default=[1, 2], help="tensor-parallel sizes")
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--gpus", nargs="+", default=["0", "1"], help="of the first and of the decode server")
    add("--gpu-memory", type=float, default=0.4, help="share of each server; two share a GPU")
    add("--requests", type=int, default=64)
    add("--concurrency", type=int, default=8)
    add("--rounds", type=int, default=5)
    add("--prompt-tokens", type=int, default=128)
    add("--output-tokens", type=int, default=64)
    add("--warm-up", type=int, default=8, metavar="N", help="requests before the first round")
    add("--idle-seconds", type=float, default=3.0, help="of silence a round; 0: none")
    add("--on", nargs="*", default=[], metavar="NAME=VALUE", help="environment of what is on")
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    add("--start-seconds", type=float, default=600.0, help="for a server to become ready")
    add("--logs", type=Path, help="keep the servers' logs and models there")
    add("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    if args.quick:
        args.tp, args.rounds, args.requests, args.idle_seconds = [1], 1, 16, 2.0
    if args.device == "cuda" and "1P1D" in args.cells and len(args.gpus) < 2:
        parser.error("--gpus: 1P1D needs GPUs for the prefill and for the decode server")
    return args


def run(args: argparse.Namespace, folder: Path) -> tuple[list[Sample], report.Notes]:
    """All cells; what is there is saved after each round."""
    model, model_args = write_model(args.model, folder / "model", args.device)
    samples: list[Sample] = []
    notes: report.Notes = {
        "machine": machine("nixl", cuda=args.device == "cuda"),
        "rounds": args.rounds,
        "cells": {},
    }
    for tp in args.tp:
        for cell in args.cells:
            label = f"{cell}, {args.model}, TP {tp}"
            place = folder / f"{cell}_tp{tp}"
            place.mkdir(parents=True, exist_ok=True)
            setup = Setup(
                model=model,
                model_args=model_args,
                tp=tp,
                device=args.device,
                gpus=args.gpus,
                gpu_memory=args.gpu_memory,
                max_num_seqs=max(args.concurrency, 16),
                server_args=args.server_args,
                changes=dict(one.split("=", 1) for one in args.on),
                folder=place,
                ready_seconds=args.start_seconds,
            )

            def save(remarks: dict[str, str], label: str = label) -> None:
                notes["cells"][label] = remarks
                if args.out:
                    report.save(samples, notes, args.out)

            run_cell(args, setup, cell, label, samples, save)
    return samples, notes


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        samples, notes = run(args, args.logs or Path(folder))
    print(report.markdown(samples, notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
