"""Real servers with everything of ours off and on, side by side, under the same load.

    python benchmarks/serve.py --tp 1 2 --out benchmarks/results/mine
    python benchmarks/serve.py --device cuda --model dense --tp 2 --gpus 0,1 2,3 --out mine
    python benchmarks/serve.py --quick

Cells: `single`, one server; `1P1D`, a prefill and a decode server behind our proxy, with vLLM's
own NixlConnector (off) or ours (on): the same proxy serves both. Off is VLLM_COMMEXT=0, on is our
queue and connector, with CUDA also our all-reduce and QK RMSNorm; `--on NAME=VALUE`
changes that. Both are up all the time and take turns; the other one's processes are stopped
meanwhile (SIGSTOP), for vLLM's are busy while idle. Measured are the client's times, the CPU time
of every server under load, and that of silence. Answers of off and on are compared.

`--out mine` writes mine.md and mine.json. A failed request ends the run with the reason.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import engines
import load
import repository  # noqa: F401
from engines import NONE, OURS, VLLM, Engine, Variant, alone
from load import Stream
from machine import load_average, machine
from models import MODELS, write_model
from serving import figures, report
from serving.figures import OFF, ON, VARIANTS, Sample

from tests.kit import cluster
from tests.kit.processes import cpu_seconds
from tests.kit.servers import ProxyServer, Server, VllmServer

SINGLE, PAIR = "single", "1P1D"
CELLS = (SINGLE, PAIR)
MAX_MODEL_LEN = {"cpu": 1024, "cuda": 4096}
ANYWHERE: Mapping[str, str] = {
    "VLLM_COMMEXT": "1",
    "VLLM_COMMEXT_STRICT": "1",
    "VLLM_COMMEXT_SHM_QUEUE": "1",
    "VLLM_COMMEXT_NIXL": "1",
}
TOGGLES: Mapping[str, Mapping[str, str]] = {
    "cpu": {**ANYWHERE, "VLLM_COMMEXT_CPU_COLLECTIVES": "1"},
    "cuda": {**ANYWHERE, "VLLM_COMMEXT_ALLREDUCE": "1", "VLLM_COMMEXT_REDUCE_RMS": "1"},
}
# The executor is named so that a message queue is there with one worker, too.
ENGINE_ARGS = ("--distributed-executor-backend", "mp", "--no-enable-prefix-caching")


def engine(args: argparse.Namespace, setup: engines.Setup, name: str, role: str) -> VllmServer:
    """One server of a variant, not started; ``role`` is `single`, `prefill` or `decode`."""
    connector = NONE if role == SINGLE else OURS if name == ON else VLLM
    on = {**TOGGLES[args.device], **dict(one.split("=", 1) for one in args.on)}
    one = Engine(
        f"{name}-{role}",
        connector,
        role,
        gpu=args.gpus[1 if role == "decode" else 0],
        share=args.gpu_memory,
        environ=on if name == ON else {"VLLM_COMMEXT": "0"},
        args=ENGINE_ARGS,
    )
    return engines.server(setup, one)


@contextmanager
def started(
    args: argparse.Namespace, setup: engines.Setup, cell: str
) -> Iterator[dict[str, Variant]]:
    """Both variants of a cell, ready."""
    roles = [SINGLE] if cell == SINGLE else ["prefill", "decode"]
    made = {name: {role: engine(args, setup, name, role) for role in roles} for name in VARIANTS}
    every = [one for servers in made.values() for one in servers.values()]
    with engines.ready(every, one_by_one=args.device == "cuda"), ExitStack() as stack:
        variants: dict[str, Variant] = {}
        for name, servers in made.items():
            front: dict[str, Server] = {**servers}
            url = servers[roles[0]].url
            if cell == PAIR:
                urls = [servers[role].url for role in roles]
                proxy = ProxyServer(f"{name}-proxy", urls[:1], urls[1:], setup.folder)
                front["proxy"] = stack.enter_context(proxy)
                url = proxy.url
            variants[name] = Variant(url, front)
        yield variants


def active(variants: Mapping[str, Variant]) -> dict[str, list[str]]:
    """What of ours runs in each engine, by the server's name, from its log.

    Raises ``SystemExit`` where ours is found off, or nothing of it on: nothing would be compared.
    """
    found: dict[str, list[str]] = {}
    for name, variant in variants.items():
        for role, server in variant.servers.items():
            if role == "proxy":
                continue
            found[server.name] = sorted(server.active())
            if bool(found[server.name]) != (name == ON):
                raise SystemExit(f"{server.name}: of ours is active: {found[server.name]}")
    return found


def streams_of(args: argparse.Namespace, count: int) -> list[Stream]:
    """The first streams of a run, the same in each."""
    prompts = load.make_prompts(count, args.prompt_tokens, random.Random(1))
    return [Stream(one, args.output_tokens) for one in prompts]


def one_turn(
    args: argparse.Namespace, variant: Variant
) -> tuple[list[Stream], list[figures.Figure]]:
    """One load on one variant, then silence, and the figures of both."""
    streams, before = streams_of(args, args.requests), processor_seconds(variant)
    seconds = load.play(variant.url, streams, args.concurrency)
    spent = used(before, processor_seconds(variant))
    found = figures.of_load(streams, seconds)
    found += figures.of_cpu(spent, args.requests * args.output_tokens)
    return streams, found + (silence(args, variant) if args.idle_seconds else [])


def silence(args: argparse.Namespace, variant: Variant) -> list[figures.Figure]:
    """Figures of some seconds without any request, some time after the last one."""
    time.sleep(engines.SETTLE_SECONDS)
    before, started_at = processor_seconds(variant), time.perf_counter()
    time.sleep(args.idle_seconds)
    spent, seconds = used(before, processor_seconds(variant)), time.perf_counter() - started_at
    return figures.of_silence(spent, seconds)


def processor_seconds(variant: Variant) -> dict[str, float]:
    """CPU time so far of each server's processes, by its role."""
    return {role: cpu_seconds(server.pids()) for role, server in variant.servers.items()}


def used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {role: seconds - before[role] for role, seconds in after.items()}


def equal_answers(of: Mapping[str, Sequence[Stream]]) -> str:
    """How many answers are the same from both."""
    same = sum(a.ids == b.ids for a, b in zip(of[OFF], of[ON], strict=True))
    return f"{same} of {len(of[OFF])}"


def run_cell(
    args: argparse.Namespace,
    setup: engines.Setup,
    cell: str,
    label: str,
    samples: list[Sample],
    save: Callable[[dict[str, str]], None],
) -> None:
    """All rounds of one cell, added to ``samples``; ``save`` gets the notes after each."""
    before = set(os.listdir("/dev/shm"))
    with started(args, setup, cell) as variants:
        notes = {"active": str(active(variants)), "load average, ready": load_average()}
        for name in variants:
            with alone(variants, name) as one:
                load.play(one.url, streams_of(args, args.warm_up), args.concurrency)
        answers: dict[str, list[Stream]] = {}
        for number in range(args.rounds):
            for name in variants:
                with alone(variants, name) as one:
                    answers[name], found = one_turn(args, one)
                samples += [Sample(label, name, number, *figure) for figure in found]
            equal = equal_answers(answers)
            notes[f"equal answers of off and on, round {number + 1}"] = equal
            print(f"{label}, round {number + 1}: {equal} answers equal", flush=True)
            notes["load average, measured"] = load_average()
            save(notes)
    notes["left in /dev/shm"] = str(sorted(set(os.listdir("/dev/shm")) - before))
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
    small = ["--enforce-eager", "--block-size", str(cluster.BLOCK_SIZE)]
    small = small if args.device == "cpu" else []
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
            setup = engines.Setup(
                args.device,
                place,
                model,
                [*model_args, *small],
                MAX_MODEL_LEN[args.device],
                max(args.concurrency, 16),
                args.start_seconds,
                args.server_args,
                tp,
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
    print("\n".join(report.markdown(samples, notes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
