"""A dense model on GPUs that may not reach each other: NCCL alone, and our all-reduce `host`.

    python benchmarks/host_engine.py --tp 2 --rounds 5 --out benchmarks/results/mine

Two engines share the GPUs, both with `NCCL_P2P_DISABLE=1` and without vLLM's custom all-reduce and
its fused one, which need peer access. They take turns, round after round, in another order each
time: the time per output token of 1, 16 and 64 requests, and the first token of a prompt of one
chunk. Weights are random and the same. Writes host_engine_tp2.md and .json after every round, and
says how many greedy tokens are equal. What the engines' all-reduces were served by is in there too;
under CUDA graphs a call counts where it is captured. With --profile it says in which kernels they
differ where requests come one at a time.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import dense_engine
import engine_profile
import turn
from dense_engine import BATCHES, FIRST, PROFILE, SMALL, TOKENS, DenseEngine, write_model
from engine_process import ANSWER, READY, EngineProcess, say

NCCL, HOST = "nccl", "host"
TOGGLES: dict[str, dict[str, str]] = {
    NCCL: {"VLLM_COMMEXT_ALLREDUCE": "0"},
    HOST: {"VLLM_COMMEXT_ALLREDUCE": "1", "VLLM_COMMEXT_ALLREDUCE_BACKEND": "host"},
}
SERVED_BY = "served by"
CHUNK, OUTPUT = 4096, 64  # tokens
ENVIRON = {
    **dense_engine.ENVIRON,
    "NCCL_P2P_DISABLE": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# 4.8 thousand million parameters.
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def served_by(worker: Any) -> dict[str, int]:
    """In a worker: the calls of each backend; empty where vLLM's own dispatch serves."""
    del worker
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_commext.compat.allreduce import dispatcher_of

    made = dispatcher_of(get_tp_group().device_communicator)
    return {} if made is None else dict(made.counts()[0])


class Served(DenseEngine):
    """The engine of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        compilation = {"pass_config": {"fuse_allreduce_rms": False}}
        vocabulary = shape_of(args)["vocab_size"]
        super().__init__(args, vocabulary, compilation, disable_custom_all_reduce=True)

    def answer(self, cell: str) -> Any:
        """What a line of the input asks for."""
        return self.llm.collective_rpc(served_by) if cell == SERVED_BY else super().answer(cell)


def shape_of(args: argparse.Namespace) -> dict[str, int]:
    """Of the model."""
    return SMALL if args.cpu else SHAPE


def serve(args: argparse.Namespace) -> None:
    """One engine: for every line of its input, a cell, a line with the answer."""
    served = Served(args)
    say(READY, 0)
    for line in sys.stdin:
        say(ANSWER, served.answer(line.strip()))


def start(name: str, args: argparse.Namespace, model: Path) -> EngineProcess:
    """The engine of that name."""
    arguments = ["--tp", str(args.tp), "--model", str(model), "--chunk", str(args.chunk)]
    arguments += ["--output", str(args.output), *(["--cpu"] if args.cpu else [])]
    return EngineProcess(name, __file__, arguments, {**ENVIRON, **TOGGLES[name]})


def log_of(engine: EngineProcess) -> list[str]:
    """What ours says of itself."""
    return [line for line in engine.lines if "commext: allreduce" in line][:10]


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[dict[str, EngineProcess]]:
    """Both engines, starting."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape_of(args), args.layers, 2 * args.chunk)
        made = {name: start(name, args, Path(folder)) for name in TOGGLES}
        try:
            yield made
        finally:
            for engine in made.values():
                engine.end()


def check_served(engine: EngineProcess, end: float) -> None:
    """See that ours serves at all, or there is nothing to compare.

    Raises:
        RuntimeError: it does not.
    """
    found = engine.ask(SERVED_BY, end)
    if not all(of.get(HOST) for of in found):
        said = "\n".join(log_of(engine))
        raise RuntimeError(f"expected `host` to serve on every rank, got {found}; it says\n{said}")


Rounds = list[dict[str, dict[str, float]]]  # by cell, by engine: milliseconds


def rows_of(rounds: Rounds) -> list[dict[str, Any]]:
    """A row a cell: medians, and the speedups of the rounds with their spread."""
    rows: list[dict[str, Any]] = []
    for cell in rounds[0] if rounds else ():
        ratios = sorted(of[cell][NCCL] / of[cell][HOST] for of in rounds)
        rows.append(
            {
                "cell": cell if cell == FIRST else f"time per output token, {cell} requests",
                "ms": {
                    name: round(statistics.median(of[cell][name] for of in rounds), 4)
                    for name in TOGGLES
                },
                "speedup": round(statistics.median(ratios), 4),
                "smallest": round(ratios[0], 4),
                "largest": round(ratios[-1], 4),
            }
        )
    return rows


def agreement(tokens: Mapping[str, list[list[int]]]) -> dict[str, int]:
    """How many answers of both engines are the same from the first token to the last."""
    pairs = list(zip(tokens[NCCL], tokens[HOST], strict=True))
    return {"answers": len(pairs), "equal": sum(one == other for one, other in pairs)}


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    lines = [f"# {report['name']}", ""]
    lines += [f"- {key}: {value}" for key, value in report["facts"].items()]
    lines += [
        "",
        "Milliseconds, medians of the rounds; speedups with the smallest and largest.",
        "",
    ]
    lines += ["| cell | NCCL | through host memory | speedup |", "|" + " --- |" * 4]
    for row in report["rows"]:
        spread = f"{row['speedup']:.3f} ({row['smallest']:.3f} to {row['largest']:.3f})"
        times = " | ".join(f"{row['ms'][name]:.3f}" for name in TOGGLES)
        lines.append(f"| {row['cell']} | {times} | {spread} |")
    lines += ["", f"Greedy answers of {report['facts']['output']} tokens: "]
    lines[-1] += f"{report['answers']['equal']} of {report['answers']['answers']} equal."
    lines += ["", "All-reduces by who served them, of each worker:", ""]
    lines += [f"    {name}: {json.dumps(of)}" for name, of in report["served by"].items()]
    lines += engine_profile.section(report[PROFILE], report["facts"]["output"])
    return "\n".join([*lines, ""])


def write(args: argparse.Namespace, rounds: Rounds, said: Mapping[str, Any]) -> None:
    import torch
    import vllm

    report = {
        "name": f"host_engine_tp{args.tp}",
        "facts": {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": args.commit,
            "device": "cpu" if args.cpu else f"{args.tp} x {torch.cuda.get_device_name()}",
            "peer access": "refused (NCCL_P2P_DISABLE=1, no custom or fused all-reduce)",
            "torch": str(torch.__version__),
            "vllm": vllm.__version__,
            "shape": shape_of(args),
            "layers": args.layers,
            "chunk": args.chunk,
            "output": args.output,
            "rounds": len(rounds),
        },
        **said,
        "rows": rows_of(rounds),
        "rounds": rounds,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{report['name']}.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / f"{report['name']}.md").write_text(markdown(report))


def one_round(
    made: Mapping[str, EngineProcess], number: int, end: float
) -> dict[str, dict[str, float]]:
    """Every cell once on both engines; the first of them is another in each round."""
    order = list(made)[:: 1 if number % 2 else -1]
    cells = [*map(str, BATCHES), FIRST]
    return {cell: {name: made[name].ask(cell, end) for name in order} for cell in cells}


def compare(args: argparse.Namespace) -> int:
    """Rounds until there are enough or the time is over; at least one, or it has failed."""
    end = time.monotonic() + args.seconds
    rounds: Rounds = []
    with engines(args) as made:
        for engine in made.values():
            engine.await_line(READY, end)
        with turn.turn(end):
            for engine in made.values():
                engine.ask(FIRST, end)  # what is compiled late is not to be timed
            tokens = {name: engine.ask(TOKENS, end) for name, engine in made.items()}
            if not args.cpu:
                check_served(made[HOST], end)
            said: dict[str, Any] = {"answers": agreement(tokens), "log": log_of(made[HOST])}
            said[PROFILE] = (
                {name: engine.ask(PROFILE, end) for name, engine in made.items()}
                if args.profile
                else {}
            )
            begun = time.monotonic()
            while len(rounds) < args.rounds and time.monotonic() < end:
                rounds.append(one_round(made, len(rounds), end))
                said[SERVED_BY] = {name: made[name].ask(SERVED_BY, end) for name in made}
                write(args, rounds, said)
                print(f"round {len(rounds)}: {json.dumps(rounds[-1])}", flush=True)
                if time.monotonic() - begun > args.measure_seconds:
                    break
        print(json.dumps(said), flush=True)
        for row in rows_of(rounds):
            print(json.dumps(row), flush=True)
    return 0 if rounds else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="number of GPUs")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of the long prompt")
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens of an answer")
    parser.add_argument("--profile", action="store_true", help="time kernels, before the rounds")
    parser.add_argument("--seconds", type=float, default=560.0, help="bound for the whole run")
    parser.add_argument("--measure-seconds", type=float, default=60.0, help="no round after that")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--commit", default="", help="what the report is to name")
    parser.add_argument("--cpu", action="store_true", help="a small model on CPUs, to try this out")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        serve(args)
        return 0
    code = compare(args)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
