"""Our message queue against the installed vLLM's, `multiprocessing.Pipe` and ZMQ, in one run.

The writer sends to all readers over one queue, and each answers with the same object over a queue
of its own (for throughput, only the last one is answered). A step is what
vLLM's engine sends for one, a SchedulerOutput and then the call for sampling, and what a worker
answers, None and then the ModelRunnerOutput; in one call: only the first and the last of it. Every
figure is the median over rounds in which all variants take turns, so that what else the machine
does meets all of them. Only ratios of one run mean anything.

    python benchmarks/shm_queue.py --out benchmarks/results/mine
    python benchmarks/shm_queue.py --quick
    python benchmarks/shm_queue.py --placements "one core" busy --variants ours vllm

`--out mine` writes mine.md and mine.json. Placements: `free`, `pinned` (writer and readers over the
first cores), `one core` (all on one), `busy` (free, beside two processes that never rest).
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import repository  # noqa: F401
from message_queue.cases import (
    GAPS_SECONDS,
    STEP_GAPS_SECONDS,
    TENSORS,
    Cell,
    groups,
    one_round,
    step_encoding_us,
)
from message_queue.links import PLACEMENTS, VARIANTS, linked, placed
from message_queue.report import markdown, save


def run(args: argparse.Namespace, placement: str, n_readers: int) -> list[Cell]:
    """All rounds of one placement and number of readers; all variants live side by side."""
    cells: list[Cell] = []
    with ExitStack() as stack:
        links = {
            name: stack.enter_context(linked(name, n_readers, placement)) for name in args.variants
        }
        stack.enter_context(placed(placement))
        measurements = list(
            groups(
                *(args.tensors, args.gaps, args.step_gaps),
                *(args.seconds, args.pace_seconds),
            )
        )
        for number in range(args.rounds):
            cells += one_round(
                links, measurements, placement, n_readers, with_silence=bool(args.gaps)
            )
            print(f"{placement}, {n_readers} readers: {number + 1} rounds", file=sys.stderr)
    return cells


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 short rounds; for a first look")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=["free", "pinned"])
    parser.add_argument(
        "--tensors", type=int, nargs="*", default=list(TENSORS), help="in bytes, sent in calls"
    )
    parser.add_argument("--gaps", type=float, nargs="*", default=list(GAPS_SECONDS))
    parser.add_argument(
        "--step-gaps",
        type=float,
        nargs="*",
        default=list(STEP_GAPS_SECONDS),
        help="seconds that the worker computes in each step",
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="of each round trip's case")
    parser.add_argument(
        "--pace-seconds", type=float, default=1.0, help="of each gap's case, or 100 samples"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.readers, args.placements = 2, [1, 4], ["free"]
        args.seconds, args.pace_seconds, args.gaps = 0.1, 0.4, [0.002, 0.01]
        args.step_gaps = [0.01]
    return args


def main() -> int:
    args = arguments()
    alone = step_encoding_us()
    cells: list[Cell] = []
    for placement in args.placements:
        for n_readers in args.readers:
            cells += run(args, placement, n_readers)
            if args.out:
                save(cells, alone, args.rounds, args.variants, args.out)
    print(markdown(cells, alone, args.rounds, args.variants))
    return 0


if __name__ == "__main__":
    sys.exit(main())
