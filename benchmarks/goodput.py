"""Goodput at equal GPUs under open load: does it pay to disaggregate, and how far?

Engines are started once, one a GPU, and every contestant has as many of them, behind a proxy of
its own: `replicas`, each request to one engine that does all of it; `fixed`, prefill on one half,
decode on the other; `in-order`, both with as many first tokens in time as can be; `ordered`, placed
request by request so that the limits of `--told` (ms a token : ms to the first) are kept, one
contestant for each pair; `nixl`, as `fixed` with vLLM's NixlConnector; `p2p`, as `fixed` over
vLLM's `p2p` tier, both asked at once, and `in turn`; `--replica-step`: replicas without connector
with so many tokens a step; `--tp`: engines without connector, fewer of them, each of so many GPUs.
The first four share their engines.

In each round all contestants take turns with arrivals of the same times and lengths, never the same
tokens, in another order each time.  No round begins that would not end within `--budget-seconds`,
which count from the start of this program; what there is then is written.

    python benchmarks/goodput.py --out OUT
    python benchmarks/goodput.py --workloads mixed:4,6,8 conversation:1,2 --told 10:1000,20:1000 \
        --replica-step 512 --kv-gib 14 --budget-seconds 560 --out OUT --server-args \
        --compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
    python benchmarks/goodput.py --again OUT.jsonl --limits 12:800 --out OTHER

Writes OUT.json and OUT.md after every round, and every request to OUT.jsonl.  Without GPUs
it runs with a tiny model on two servers, to try it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pages
from engines import Setup
from goodputs import contestants, plays, report
from goodputs.contestants import NAMES, Contestant, limits_of
from goodputs.engines import MODEL, EngineSet, Places, started, stop_all
from goodputs.rounds import TRACE, Load, Rounds, Runner
from goodputs.shapes import WORKLOADS
from machine import load_average, machine

from tests.kit.servers import Server
from vllm_commext.bench.workload import MIXED

STARTED = time.monotonic()
STOP_SECONDS = 40.0
"""That are kept of the budget for the engines' end."""
VOCABULARY = {"cpu": 256, "cuda": 32000, MODEL: 32000}


def gpus_here() -> list[str]:
    """Numbers of the GPUs."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--contestants", nargs="+", choices=NAMES, default=["replicas", "fixed", "ordered"])
    add("--replica-step", type=int, action="append", default=[], help="a contestant more each")
    add("--tp", type=int, action="append", default=[], help="a contestant more each: engines of TP")
    add("--told", type=limits_of, default=limits_of("10:1000,15:1000,25:1000"), metavar="LIMITS")
    add("--limits", type=limits_of, help="to count by; default: those of --told")
    add("--workloads", nargs="+", default=[f"{MIXED}:4"], metavar="NAME:RATE[,RATE]")
    add("--trace", type=Path, help=f"file in Mooncake's format, for the workload {TRACE}")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=16.0, help="of arrivals in a round")
    add("--wait-seconds", type=float, default=20.0, help="for answers after the last arrival")
    add("--warm-up-seconds", type=float, default=8.0)
    add("--budget-seconds", type=float, default=float("inf"))
    add("--seed", type=int, default=1)
    add("--cpu", action="store_true", help="tiny servers on CPUs, one for each of --gpus, or two")
    add("--stand-ins", type=int, help="so many of the simulator's engines in real time, no vLLM")
    add("--gpus", nargs="+", help="default: all")
    add("--prefills", type=int, nargs="+", help="a fixed way for each, that many prefill; or half")
    add("--max-num-batched-tokens", type=int, help="default: 2048")
    add("--max-model-len", type=int, help="default: 33280; longer requests are cut")
    add("--max-num-seqs", type=int, default=128)
    add("--kv-gib", type=float, default=30.0, help="KV cache of each engine on a GPU")
    add("--connector-extra", type=json.loads, default={}, metavar="JSON")
    add("--tier", type=int, nargs=2, default=(), help="blocks of p2p's chunks, NIXL's threads")
    add("--start-seconds", type=float, default=400.0, help="for an engine to become ready")
    add("--commit", default="?")
    add("--again", type=Path, metavar="FILE.jsonl", help="tables of an earlier run; runs nothing")
    add("--logs", type=Path, help="keep the servers' logs there")
    add("--out", type=Path, required=True)
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="for every vLLM; the last")
    args = parser.parse_args()
    args.limits = args.limits or args.told
    args.device = "cpu" if args.cpu or not gpus_here() else "cuda"
    if args.stand_ins:
        args.device, args.gpus = MODEL, [""] * args.stand_ins
    return args


def cells(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Workloads and their rates, as given."""
    found = [text.partition(":")[::2] for text in args.workloads]
    if unknown := [name for name, _ in found if name not in (*WORKLOADS, TRACE)]:
        raise SystemExit(f"--workloads: expected some of {[*WORKLOADS, TRACE]}, got {unknown}")
    return [(name, rates.split(",")) for name, rates in found]


def setup_of(args: argparse.Namespace, folder: Path) -> Setup:
    return Setup(
        args.device,
        folder,
        *models.by_device(folder / "model", args.device),
        max_tokens=args.max_model_len or (1024 if args.device == "cpu" else 33280),
        max_requests=args.max_num_seqs,
        start_seconds=args.start_seconds,
        server_args=args.server_args,
    )


def places_of(args: argparse.Namespace) -> Places:
    return Places(
        args.gpus or (["", ""] if args.device == "cpu" else gpus_here()),
        int(args.kv_gib * (1 << 30)),
        args.connector_extra,
        args.tier,
    )


class Output:
    """What is written after every round."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any], num_gpus: int) -> None:
        self._args = args
        self.about = about
        self._num_gpus = num_gpus
        self.plays: list[plays.Play] = []
        self._requests = args.out.with_suffix(".jsonl")
        args.out.parent.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        self._requests.write_text("")

    def add(self, found: Sequence[plays.Play]) -> None:
        plays.append(self._requests, found)
        self.plays += found
        self.write()

    def write(self) -> str:
        """All files but that of requests; returns the page."""
        out, limits = self._args.out, self._args.limits
        self.about["load average at the end"] = load_average()
        found = report.content(self.plays, limits, self.about, self._num_gpus)
        lines = report.markdown(self.plays, limits, self.about, self._num_gpus)
        return pages.write(out.parent, out.name, found, lines)


def measure(args: argparse.Namespace, rounds: Rounds, output: Output) -> None:
    """All cells, round by round, while the budget lasts."""
    chosen = [(name, float(rate)) for name, rates in cells(args) for rate in rates]
    print(f"warm-up of {args.warm_up_seconds:g} s each", flush=True)
    rounds.warm_up(*chosen[len(chosen) // 2], args.warm_up_seconds)
    turns = len(chosen) * args.rounds
    print(f"{turns} turns of all contestants, {rounds.turn_seconds():.0f} s each", flush=True)
    left_out: list[str] = []
    for number in range(args.rounds):
        for name, rate in chosen:
            told = f"round {number + 1} of {args.rounds}, {name}, {rate:.3g} requests/s"
            print(f"{told}, {rounds.seconds_left():.0f} s left", flush=True)
            if found := rounds.round(name, rate, number):
                output.add(found)
            else:
                left_out.append(told)
                print("  left out: it would not end within the budget", flush=True)
    output.about["left out"] = "; ".join(left_out) or "nothing"


def run(args: argparse.Namespace, made: Sequence[Contestant], folder: Path, output: Output) -> None:
    """Start engines and proxies, measure, and stop them."""
    sets: list[EngineSet] = list(dict.fromkeys(one.engines for one in made))
    setup, places = setup_of(args, folder), places_of(args)
    with started(setup, places, sets) as engines:
        made = [one for one in made if one.engines in engines]
        proxies: list[Server] = []
        try:
            for one in made:
                proxies.append(contestants.proxy(one, engines, folder))
                proxies[-1].start()
            for server in proxies:
                server.wait_ready()
            runners = [
                Runner(one, server, engines[one.engines])
                for one, server in zip(made, proxies, strict=True)
            ]
            output.about["seconds to start"] = f"{time.monotonic() - STARTED:.0f}"
            scale = setup.max_tokens / 33280 if args.device == "cpu" else 1.0
            load = Load(
                args.seconds, args.wait_seconds, scale, setup.max_tokens - 8, args.seed, args.trace
            )
            end = STARTED + args.budget_seconds - STOP_SECONDS
            measure(args, Rounds(load, runners, VOCABULARY[args.device], end), output)
        finally:
            stop_all(proxies)


def again(args: argparse.Namespace) -> str:
    """Tables of the requests of an earlier run, with other limits perhaps."""
    earlier = json.loads(args.again.with_suffix(".json").read_text())["about"]
    output = Output(args, earlier, int(earlier["GPUs"]))
    output.plays = plays.read(args.again)
    return output.write()


def main() -> int:
    args = arguments()
    if args.again:
        print(again(args))
        return 0
    made = contestants.make(
        args.contestants,
        args.max_num_batched_tokens or 2048,
        args.replica_step,
        args.told,
        args.tp,
        args.prefills or (),
    )
    num_gpus = len(args.gpus or (["", ""] if args.device == "cpu" else gpus_here()))
    about = {
        "machine": machine("nixl", "torch", cuda=args.device == "cuda"),
        "GPUs": num_gpus,
        "commit": args.commit,
        "command": shlex.join(["python", *sys.argv]),
        "arrivals": f"{args.seconds:g} s a round, the same in each",
        "warm-up": f"{args.warm_up_seconds:g} s each",
        "load average at the start": load_average(),
    }
    output = Output(args, about, num_gpus)
    output.begin()
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        place = args.logs or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        try:
            run(args, made, place, output)
        finally:
            print(output.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
