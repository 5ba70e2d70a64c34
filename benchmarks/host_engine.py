"""A dense model on GPUs that may not reach each other: NCCL alone, and our all-reduce `host`.

    python benchmarks/host_engine.py --tp 2 --rounds 5 --out benchmarks/results/mine

Two engines share the GPUs, both with `NCCL_P2P_DISABLE=1` and without vLLM's custom all-reduce and
its fused one, which need peer access. They take turns, round after round, in another order each
time: the time per output token of 1, 16 and 64 requests, and the first token of a prompt of one
chunk. Weights are random and the same. Writes host_engine_tp2.md and .json after every round, and
says how many greedy tokens are equal. What the engines' all-reduces were served by is in there too;
under CUDA graphs a call counts where it is captured.
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

import turn
from engine_process import ANSWER, READY, EngineProcess, say

from vllm_commext.testing import gpu_ranks

NCCL, HOST = "nccl", "host"
TOGGLES: dict[str, dict[str, str]] = {
    NCCL: {"VLLM_COMMEXT_ALLREDUCE": "0"},
    HOST: {"VLLM_COMMEXT_ALLREDUCE": "1", "VLLM_COMMEXT_ALLREDUCE_BACKEND": "host"},
}
BATCHES = (1, 16, 64)
FIRST, TOKENS, SERVED_BY = "first token", "tokens", "served by"
CHUNK, PROMPT, OUTPUT = 4096, 64, 64  # tokens
SAMPLES, COMPARED = 3, 64
KV_BYTES = 1 << 30
ENVIRON = {
    **gpu_ranks.ENVIRON,
    "NCCL_P2P_DISABLE": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less to start
}
# 4.8 thousand million parameters; and a small one to try the script on CPUs.
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def write_model(folder: Path, layers: int, *, small: bool) -> None:
    """A configuration; vLLM makes random weights of it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **(SMALL if small else SHAPE),
        "num_hidden_layers": layers,
        "max_position_embeddings": 2 * CHUNK,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def served_by(worker: Any) -> dict[str, int]:
    """In a worker: the calls of each backend; empty where vLLM's own dispatch serves."""
    del worker
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_commext.compat.allreduce import dispatcher_of

    made = dispatcher_of(get_tp_group().device_communicator)
    return {} if made is None else dict(made.counts()[0])


class Served:
    """The engine of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self._vocabulary = (SMALL if args.cpu else SHAPE)["vocab_size"]
        self._chunk, self._output = args.chunk, args.output
        more: dict[str, Any] = {"enforce_eager": True} if args.cpu else {}
        if not args.cpu:
            compilation = {
                "cudagraph_capture_sizes": list(BATCHES),
                "pass_config": {"fuse_allreduce_rms": False},
            }
            more = {"compilation_config": compilation, "gpu_memory_utilization": 0.1}
        self._engine = LLM(
            args.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=args.tp,
            disable_custom_all_reduce=True,
            max_model_len=args.chunk + 16,
            max_num_batched_tokens=args.chunk,
            max_num_seqs=max(BATCHES),
            kv_cache_memory_bytes=KV_BYTES if not args.cpu else 64 << 20,
            enable_prefix_caching=False,
            seed=0,
            **more,
        )

    def answer(self, cell: str) -> Any:
        """What a line of the input asks for."""
        if cell == TOKENS:
            return self._generate(COMPARED, PROMPT, self._output)[1]
        if cell == SERVED_BY:
            return self._engine.collective_rpc(served_by)
        return self.measure(cell)

    def _generate(self, requests: int, prompt: int, output: int) -> tuple[float, list[list[int]]]:
        """Seconds that so many requests take together, and the tokens of each."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        prompts: Any = [
            {
                "prompt_token_ids": [
                    (7 * word + 13 * request) % (self._vocabulary - 10) + 5
                    for word in range(prompt)
                ]
            }
            for request in range(requests)
        ]
        begun = time.perf_counter()
        answers = self._engine.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return seconds, [list(answer.outputs[0].token_ids) for answer in answers]

    def measure(self, cell: str) -> float:
        """Milliseconds: of the first token of a chunk, or an output token of so many requests; the
        median of `SAMPLES`, after one that wakes up an engine whose turn it was not."""
        sample = self._first_token if cell == FIRST else lambda: self._output_token(int(cell))
        sample()
        return statistics.median(sample() for _ in range(SAMPLES)) * 1e3

    def _first_token(self) -> float:
        return self._generate(1, self._chunk, 1)[0]

    def _output_token(self, requests: int) -> float:
        short, long = (
            self._generate(requests, PROMPT, count)[0] for count in (1, 1 + self._output)
        )
        return (long - short) / self._output


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
        write_model(Path(folder), args.layers, small=args.cpu)
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
            "shape": SMALL if args.cpu else SHAPE,
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
