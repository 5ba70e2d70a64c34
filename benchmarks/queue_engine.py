"""What the message queue alone gains in an engine: a dense model at TP 2, vLLM's queue or ours.

    python benchmarks/queue_engine.py --tp 2 --seconds 300 --out benchmarks/results/mine

Two engines share the GPUs and take turns, round after round, the other one first each time. Of 1,
16 and 64 requests at a time, all begun together: the time between two steps' tokens as the process
sees it that asked (mean, median, 99th percentile), and the CPU time of all processes of the engine.
Weights are random, multicast is off for both. Writes a page and its JSON after every round. Says
too whose queue each worker has, and how many answers are equal.

`--cpu` runs a tiny model on CPUs, whose workers sum by Gloo unless VLLM_COMMEXT_CPU_COLLECTIVES
says otherwise.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import pages
import repository  # noqa: F401
import turn
from engine_process import ANSWER, READY, EngineProcess, run_program, say

from tests.kit import gpu_ranks
from tests.kit.processes import stat_of

VLLM, OURS = "vllm", "ours"
TOGGLE = "VLLM_COMMEXT_SHM_QUEUE"
PROMPT = 64  # tokens
SKIPPED = 8  # steps at the beginning and at the end of an answer, when not all requests run
SETTLE_SECONDS = 1.2  # vLLM's readers spin for a second after the last message
KV_BYTES = 1 << 30
KINDS = {"VLLM::EngineCore": "engine", "VLLM::Worker": "workers"}
ENVIRON = {
    **gpu_ranks.ENVIRON,
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its first use would compile
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to the workers, to ask them
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # for --cpu: two workers on one NUMA node
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_COMMEXT_ALLREDUCE": "0",
    "VLLM_COMMEXT_CPU_COLLECTIVES": os.environ.get("VLLM_COMMEXT_CPU_COLLECTIVES", "0"),
    "OMP_NUM_THREADS": "1",
}
FIGURES = {
    "mean": "time per output token, mean, ms",
    "p50": "time per output token, p50, ms",
    "p99": "between two tokens, p99, ms",
    "cpu": "CPU of all processes, ms a step",
    "cpu engine": "CPU, engine, ms a step",
    "cpu workers": "CPU, workers, ms a step",
}


def queue_of(worker: Any) -> str:
    """In a worker: whose queue it listens to."""
    del worker
    from vllm.distributed.device_communicators import shm_broadcast

    return shm_broadcast.MessageQueue.__module__.partition(".")[0]


def cpu_seconds() -> dict[str, float]:
    """Of this session's processes so far, by what they are."""
    spent = {"front end": 0.0, **dict.fromkeys(KINDS.values(), 0.0)}
    session = os.getsid(0)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = stat_of(folder)
            if int(fields[3]) != session:
                continue
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            kind = next((kind for text, kind in KINDS.items() if text in title), "front end")
            spent[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


class Served:
    """The engine of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self._output, self._asked = args.output, 0
        more: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
        if not args.cpu:
            more = {
                # Graphs without the compiler, which would take a minute of the start.
                "compilation_config": {
                    "mode": 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, max(args.requests) + 1, 16)],
                },
                "kernel_config": {"enable_flashinfer_autotune": False},
                "gpu_memory_utilization": 0.1,  # of which so much must be free as it starts
                "kv_cache_memory_bytes": KV_BYTES,
            }
        self._engine = LLM(
            args.model,
            load_format="dummy" if not args.cpu else "auto",
            skip_tokenizer_init=True,
            tensor_parallel_size=args.tp,
            max_model_len=PROMPT + args.output + 16,
            max_num_seqs=max(args.requests),
            enable_prefix_caching=False,
            disable_log_stats=True,
            dtype="bfloat16",
            seed=0,
            **more,
        )

    def measure(self, requests: int) -> dict[str, Any]:
        """The figures of so many requests, all begun together, and a checksum of each answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine: Any = self._engine.llm_engine
        wanted = SamplingParams(
            temperature=0,
            max_tokens=self._output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        answers: dict[str, list[int]] = {}
        for number in range(requests):
            prompt = [(7 * word + 13 * number) % 90 + 5 for word in range(PROMPT)]
            self._asked += 1
            answers[str(self._asked)] = []
            engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, wanted)
        before, times = cpu_seconds(), [time.perf_counter()]
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs:
                times.append(time.perf_counter())
            for output in outputs:
                answers.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        spent = {name: seconds - before[name] for name, seconds in cpu_seconds().items()}
        steps = len(times) - 1
        gaps = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)][SKIPPED:-SKIPPED]
        return {
            "mean": statistics.fmean(gaps),
            "p50": statistics.median(gaps),
            "gaps": [round(gap, 4) for gap in gaps],
            "cpu": 1e3 * sum(spent.values()) / steps,
            **{f"cpu {name}": 1e3 * seconds / steps for name, seconds in spent.items()},
            "answers": [zlib.crc32(repr(tokens).encode()) for tokens in answers.values()],
        }

    def queues(self) -> list[str]:
        """Whose each worker has."""
        return self._engine.collective_rpc(queue_of)


def serve(args: argparse.Namespace) -> None:
    """One engine: for every line of its input, a number of requests, a line with the figures."""
    served = Served(args)
    for requests in args.requests:
        served.measure(requests)
    say(READY, served.queues())
    for line in sys.stdin:
        if line.strip() == "settle":  # wake up, and let the other engine's readers go to sleep
            time.sleep(SETTLE_SECONDS)
            served.measure(1)
            say(ANSWER, 0)
        else:
            say(ANSWER, served.measure(int(line)))


def start(name: str, args: argparse.Namespace, model: Path) -> EngineProcess:
    """The engine of this name; it is not ready yet."""
    words = ["--tp", str(args.tp), "--model", str(model), "--output", str(args.output)]
    words += ["--requests", *map(str, args.requests)] + (["--cpu"] if args.cpu else [])
    environ = {**ENVIRON, TOGGLE: "0" if name == VLLM else "1"}
    return EngineProcess(name, __file__, words, environ)


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[dict[str, EngineProcess]]:
    """All engines, started at once."""
    with tempfile.TemporaryDirectory() as folder:
        kind, device = ("llama", "cpu") if args.cpu else ("dense", "cuda")
        model, _ = models.write_model(kind, Path(folder) / "model", device)
        made = {name: start(name, args, model) for name in (VLLM, OURS)}
        try:
            yield made
        finally:
            for engine in made.values():
                engine.end()


Rounds = list[dict[str, dict[int, dict[str, Any]]]]  # by engine, by requests: the figures


def one_round(
    made: Mapping[str, EngineProcess], batches: Sequence[int], number: int, end: float
) -> Any:
    """Every cell once on every engine; another one first each time."""
    order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in order:
        made[name].ask("settle", end)
        found[name] = {requests: made[name].ask(requests, end) for requests in batches}
    return found


def p99(gaps: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(gaps)[max(0, -(-99 * len(gaps) // 100) - 1)]


def rows_of(rounds: Rounds) -> list[dict[str, Any]]:
    """A row a figure and number of requests: medians of the rounds, and vLLM's figure divided by
    ours."""
    for of in rounds:
        for cells in of.values():
            for figures in cells.values():
                figures["p99"] = p99(figures["gaps"])
    rows: list[dict[str, Any]] = []
    for requests in rounds[0][OURS] if rounds else ():
        for key, label in FIGURES.items():
            values = {name: [of[name][requests][key] for of in rounds] for name in rounds[0]}
            medians = {name: statistics.median(of) for name, of in values.items()}
            pairs = zip(values[VLLM], values[OURS], strict=True)
            ratios = sorted(theirs / max(ours, 1e-3) for theirs, ours in pairs)
            better = statistics.median(ratios), ratios[0], ratios[-1]
            rows.append({"requests": requests, "figure": label, **medians, "better by": better})
        pooled = {
            name: p99([g for of in rounds for g in of[name][requests]["gaps"]])
            for name in rounds[0]
        }
        better = (pooled[VLLM] / pooled[OURS],) * 3
        label = "between two tokens, p99 of all rounds together, ms"
        rows.append({"requests": requests, "figure": label, **pooled, "better by": better})
    return rows


def equal_answers(rounds: Rounds) -> str:
    """Answers that are the same from all engines, of all rounds."""
    answers = [
        same
        for of in rounds
        for requests in of[OURS]
        for same in zip(*(cells[requests]["answers"] for cells in of.values()), strict=True)
    ]
    return f"{sum(len(set(same)) == 1 for same in answers)} of {len(answers)}"


def markdown(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The report as a page."""
    lines = pages.head("An engine with vLLM's message queue and with ours", facts)
    lines += ["Medians of the rounds; speedup: vLLM's / ours, median of the rounds' own ratios"]
    lines += ["(smallest to largest); above 1 is in our favour.", ""]
    found = []
    for row in rows:
        middle, least, most = row["better by"]
        speedup = f"{middle:.3f} ({least:.3f} to {most:.3f})"
        medians = [f"{row[name]:.3f}" for name in (VLLM, OURS)]
        found.append([str(row["requests"]), row["figure"], *medians, speedup])
    return lines + pages.table(["requests", "figure", "vLLM's", "ours", "speedup"], found)


def write(args: argparse.Namespace, rounds: Rounds, queues: Mapping[str, Any]) -> None:
    """The page and its JSON, which has each round too, but not its single steps."""
    import torch
    import vllm

    rows = rows_of(rounds)
    facts = {
        "date": pages.today(),
        "command": " ".join(["python", "benchmarks/queue_engine.py", *sys.argv[1:]]),
        "commit": args.commit,
        "device": f"{args.tp} workers, {os.cpu_count()} processors, "
        + ("CPUs" if args.cpu else torch.cuda.get_device_name()),
        "versions": f"vLLM {vllm.__version__}, torch {torch.__version__}",
        "rounds": len(rounds),
        "output tokens a request": args.output,
        "queue of each worker": json.dumps(queues),
        "equal answers": equal_answers(rounds),
    }
    each = [
        {
            engine: {
                requests: {key: figures[key] for key in FIGURES}
                for requests, figures in cells.items()
            }
            for engine, cells in of.items()
        }
        for of in rounds
    ]
    found = {"facts": facts, "rows": rows, "rounds": each}
    pages.write(args.out, f"queue_engine_tp{args.tp}", found, markdown(facts, rows))


def compare(args: argparse.Namespace) -> int:
    """Rounds until there are enough or the time is over; at least one, or it has failed."""
    end = time.monotonic() + args.seconds
    rounds: Rounds = []
    with engines(args) as made:
        queues = {name: engine.await_line(READY, end) for name, engine in made.items()}
        print(f"queues: {json.dumps(queues)}, {end - time.monotonic():.0f} s left", flush=True)
        with turn.turn(end):
            last, spent = min(end, time.monotonic() + args.measure_seconds), 0.0
            while len(rounds) < args.rounds and time.monotonic() + 1.2 * spent < last:
                begun = time.monotonic()
                rounds.append(one_round(made, args.requests, len(rounds), end))
                spent = time.monotonic() - begun
                write(args, rounds, queues)
                print(f"round {len(rounds)} took {spent:.1f} s", flush=True)
        for row in rows_of(rounds):
            print(json.dumps(row), flush=True)
    return 0 if rounds else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=300.0, help="bound for the whole run")
    parser.add_argument("--measure-seconds", type=float, default=100.0, help="of these, for rounds")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="at a time")
    return run_program(parser, serve, compare)


if __name__ == "__main__":
    sys.exit(main())
