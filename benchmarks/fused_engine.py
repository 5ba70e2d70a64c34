"""What our all-reduce gains in an engine, or our QK RMSNorm: a model with it on or off.

    python benchmarks/fused_engine.py --tp 2 --layers 16 --rounds 5 --out benchmarks/results/mine
    python benchmarks/fused_engine.py --tp 2 --layers 12 --shape minimax --out OUT

Three engines share the GPUs: vLLM as it comes, the same once more, and with ours on. They take
turns, round after round, in another order each time: the time per output token of 1, 16 and 64
requests, and the first token of a prompt of one chunk. What the second of vLLM's engines differs
by from the first is what this machine cannot tell apart. Weights are random, multicast is off for
all. Writes fused_engine_tp2.md and .json after every round, with the calls of the fused op and of
the all-reduce by who served them; under CUDA graphs a call counts where it is captured. Says too
how many greedy tokens the engines agree on.

With --shape minimax it is the norm of Q and K that is compared, in a model like MiniMax-M2 of fewer
experts; writes norm_engine_minimax_tp2.md.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pages
import repository  # noqa: F401
import turn
from dense_engine import BATCHES, ENVIRON, FIRST, TOKENS, DenseEngine, write_model
from engine_process import ANSWER, READY, EngineProcess, run_program, say
from engine_setups import AGAIN, MODELS, TOGGLES, VLLM, Setup, small

OUTPUT = 128  # tokens


def served_by(worker: Any) -> dict[str, Any]:
    """In a worker: the calls of each backend of the all-reduce; those of the fused op, how many
    all-reduces became one, and how many of these quantise, or know the weights that come next; the
    models whose norms are ours."""
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_commext.allreduce.fused import op as fused_op
    from vllm_commext.compat import reduce_rms
    from vllm_commext.compat.allreduce import dispatcher_of

    del worker
    norms = reduce_rms.identity()
    found: dict[str, Any] = {"norms": json.loads(norms)} if norms else {}
    made = dispatcher_of(get_tp_group().device_communicator)
    found |= {} if made is None else {"all-reduce": dict(made.counts()[0])}
    groups = {name: fused_op.find_group(name) for name in fused_op.served_groups()}
    calls = {name: dict(norm.calls) for name, norm in groups.items() if norm is not None}
    if not calls:
        return found
    from vllm_commext.compat import fused_pass

    return {**found, "calls": calls, **fused_pass.counts}


def setup_of(args: argparse.Namespace) -> Setup:
    setup = MODELS[args.shape]
    return small(setup) if args.cpu else setup


def serve(args: argparse.Namespace) -> None:
    """One engine: for every line of its input, a cell, a line with the milliseconds."""
    setup, quantized = setup_of(args), args.quantization
    more = {"quantization": quantized} if quantized else {}
    served = DenseEngine(args, setup.shape["vocab_size"], **more)
    say(READY, served.llm.collective_rpc(served_by))
    for line in sys.stdin:
        say(ANSWER, served.answer(line.strip()))


def start(name: str, args: argparse.Namespace, model: Path) -> EngineProcess:
    """The engine of that name; it is not ready yet."""
    words = ["--tp", str(args.tp), "--model", str(model), "--chunk", str(args.chunk)]
    words += ["--output", str(args.output)]
    words += ["--quantization", args.quantization] if args.quantization else []
    words += ["--cpu"] if args.cpu else []
    words += ["--shape", args.shape]
    environ = {**ENVIRON, **setup_of(args).toggles[name]}
    return EngineProcess(name, __file__, words, environ)


def log_of(engine: EngineProcess) -> list[str]:
    """What ours says of itself."""
    said = ("commext: allreduce", "commext: reduce_rms")
    return [line for line in engine.lines if any(what in line for what in said)][:20]


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[dict[str, EngineProcess]]:
    """All engines, started at once."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), setup_of(args).shape, args.layers, 2 * args.chunk)
        made = {name: start(name, args, Path(folder)) for name in args.engines}
        try:
            yield made
        finally:
            for engine in made.values():
                engine.end()


Rounds = list[dict[str, dict[str, float]]]  # by cell, by engine: milliseconds


def ratios(rounds: Rounds, cell: str, slow: str, fast: str) -> list[float]:
    """How many times as fast one engine was as another, of each round, in rising order."""
    return sorted(of[cell][slow] / of[cell][fast] for of in rounds)


def rows_of(rounds: Rounds, cells: Sequence[str]) -> list[dict[str, Any]]:
    """A row a cell: medians, and the speedups with their spread."""
    rows: list[dict[str, Any]] = []
    for cell in cells if rounds else ():
        names = list(rounds[0][cell])
        medians = {
            name: round(statistics.median(of[cell][name] for of in rounds), 4) for name in names
        }
        speedups = {name: ratios(rounds, cell, VLLM, name) for name in names if name != VLLM}
        rows.append(
            {
                "cell": cell if cell == FIRST else f"time per output token, {cell} requests",
                "ms": medians,
                **{
                    f"{VLLM} / {name}": {
                        "median": round(statistics.median(of), 4),
                        "smallest": round(of[0], 4),
                        "largest": round(of[-1], 4),
                    }
                    for name, of in speedups.items()
                },
            }
        )
    return rows


def agreement(tokens: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    """How far answers agree with the first of vLLM's engines: whole ones, and tokens until the
    first that differs, as shares of all."""
    shares: dict[str, Any] = {}
    for other in (name for name in tokens if name != VLLM):
        pairs = list(zip(tokens[VLLM], tokens[other], strict=True))
        same = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
            for a, b in pairs
        ]
        shares[f"{VLLM} and {other}"] = {
            "answers": round(sum(a == b for a, b in pairs) / len(pairs), 4),
            "tokens": round(sum(same) / sum(len(a) for a, _ in pairs), 4),
        }
    return shares


def markdown(report: Mapping[str, Any]) -> list[str]:
    lines = pages.head(report["name"], report["facts"])
    lines += ["Milliseconds, medians of the rounds; speedups with the smallest and largest.", ""]
    names = report["engines"]
    others = [name for name in names if name != VLLM]
    rows = []
    for row in report["rows"]:
        speedups = [row[f"{VLLM} / {name}"] for name in others]
        rows.append(
            [
                *(row["cell"], *(f"{row['ms'][name]:.3f}" for name in names)),
                *(
                    f"{of['median']:.3f} ({of['smallest']:.3f} to {of['largest']:.3f})"
                    for of in speedups
                ),
            ]
        )
    lines += pages.table(["cell", *names, *(f"{VLLM} / {name}" for name in others)], rows)
    lines += ["", "Served by, of each worker of an engine with ours:", ""]
    lines += [
        f"    {name}: {json.dumps(each)}"
        for name, workers in report["served by"].items()
        for each in workers
    ]
    return [*lines, "", f"Greedy tokens that are equal: {json.dumps(report['equal tokens'])}"]


def write(args: argparse.Namespace, rounds: Rounds, said: Mapping[str, Any]) -> None:
    import torch
    import vllm

    setup = setup_of(args)
    name = f"{setup.name}_tp{args.tp}" + (f"_{args.quantization}" if args.quantization else "")
    report = {
        "name": name,
        "facts": {
            "date": pages.today(),
            "commit": args.commit,
            "device": "cpu" if args.cpu else torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
            "vllm": vllm.__version__,
            "shape": setup.shape,
            "layers": args.layers,
            "chunk": args.chunk,
            "rounds": len(rounds),
            "multicast": "off for all",
        },
        "engines": args.engines,
        **said,
        "rows": rows_of(rounds, cells_of(args)),
        "rounds": rounds,
    }
    pages.write(args.out, name, report, markdown(report))


def cells_of(args: argparse.Namespace) -> list[str]:
    return [*map(str, args.batches), FIRST]


def one_round(
    made: Mapping[str, EngineProcess], cells: Sequence[str], number: int, end: float
) -> Any:
    """Every cell once on every engine; the first of them is another in each round."""
    order = list(made)
    order = order[number % len(order) :] + order[: number % len(order)]
    return {cell: {name: made[name].ask(cell, end) for name in order} for cell in cells}


def compare(args: argparse.Namespace) -> int:
    """Rounds until there are enough or the time is over; at least one, or it has failed."""
    end = time.monotonic() + args.seconds
    args.engines = args.engines or list(setup_of(args).engines)
    args.chunk = args.chunk or setup_of(args).chunk
    rounds: Rounds = []
    with engines(args) as made, contextlib.ExitStack() as stack:
        ready = {
            name: engine.await_line(READY, min(end, time.monotonic() + args.start_seconds))
            for name, engine in made.items()
        }
        print(f"served by: {json.dumps(ready)}", flush=True)
        stack.enter_context(turn.turn(end))
        for engine in made.values():
            for cell in cells_of(args):
                engine.ask(cell, end)  # what is compiled or loaded late is not to be timed
        print("all are warm", flush=True)
        tokens = {name: engine.ask(TOKENS, end) for name, engine in made.items()}
        said = {
            "served by": {name: ready[name] for name in made if name not in (VLLM, AGAIN)},
            "log": {name: log_of(made[name]) for name in made if name not in (VLLM, AGAIN)},
            "equal tokens": agreement(tokens),
        }
        print(json.dumps(said), flush=True)
        spent = 0.0
        while len(rounds) < args.rounds and time.monotonic() + 1.5 * spent < end:
            begun = time.monotonic()
            rounds.append(one_round(made, cells_of(args), len(rounds), end))
            spent = time.monotonic() - begun
            write(args, rounds, said)
            print(f"round {len(rounds)}: {json.dumps(rounds[-1])}", flush=True)
        for row in rows_of(rounds, cells_of(args)):
            print(json.dumps(row), flush=True)
    return 0 if rounds else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(MODELS), default="dense", help="of the model")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, help="requests at a time"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=list(TOGGLES), help="which to start; vllm among them"
    )
    parser.add_argument("--chunk", type=int, help="tokens of the long prompt")
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens of an answer")
    parser.add_argument("--quantization", default="", help="as vLLM's, such as fp8")
    parser.add_argument("--seconds", type=float, default=560.0, help="bound for the whole run")
    parser.add_argument("--start-seconds", type=float, default=420.0, help="for the engines' start")
    return run_program(parser, serve, compare)


if __name__ == "__main__":
    sys.exit(main())
