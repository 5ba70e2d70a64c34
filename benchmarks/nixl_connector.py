"""Our NIXL connector against the one in the installed vLLM, in one run.

Both work on the same caches in the same processes and take turns, so that what else the machine
does meets both.  vLLM's side is its own worker class, built without a model: its constructor, its
registration, its handshake and its reads are what runs.  Only ratios of one run mean anything.

    python benchmarks/nixl_connector.py --out benchmarks/results/mine

writes mine.md and mine.json.  ``--quick`` runs small sizes; ``--only`` runs some of the parts:

    stall  how long the engine's thread stands still while a large read is posted
    fence  what the proof costs that blocks were still the request's when they were read
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from kv_connector import fence, report, stall
from kv_connector.report import Row
from kv_connector.samples import Sample, in_child

from tests.kit.tiny_model import write_tiny_model

PARTS = ("stall", "fence")
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"CMA": {}, "TCP": {"UCX_TLS": "tcp"}}


@dataclass(frozen=True)
class Sizes:
    """Rounds of stalls; blocks of a pool, and of a read of it; pairs of reads with and without
    fence."""

    rounds: int = 5
    pool: int = 65_536
    read: int = 40_000
    pairs: int = 300


QUICK = Sizes(2, 8_192, 5_000, 20)


@dataclass(frozen=True)
class Part:
    """One part: its title, what takes its samples, and the heads of its two columns."""

    title: str
    measure: Callable[[], list[Sample]]
    columns: tuple[str, str] = report.COLUMNS


def by_transport(measure: Callable[..., list[Sample]], *arguments: Any) -> list[Sample]:
    """Samples of a function that takes the transport first, each in a process of its own."""
    return [
        sample
        for transport, environ in TRANSPORTS.items()
        for sample in in_child(measure, transport, *arguments, environ=environ)
    ]


def parts(sizes: Sizes, model: Path) -> dict[str, Part]:
    read = (model, sizes.pool, sizes.read, sizes.rounds)
    return {
        "stall": Part(
            f"Posting a read of {sizes.read} random blocks of 4 KB",
            lambda: by_transport(stall.measure_stall, *read),
        ),
        "fence": Part(
            "Proving that what was read was still the request's: our reads with and without fence",
            lambda: by_transport(fence.measure_fence, sizes.pairs),
            fence.COLUMNS,
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5, help="of stalls")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="nixl-bench-") as folder:
        model = write_tiny_model(Path(folder) / "llama", "llama")
        for key, part in parts(QUICK if args.quick else Sizes(rounds=args.rounds), model).items():
            if key in (args.only or (key,)):
                print(part.title, file=sys.stderr)
                rows += report.rows_of(part.title, part.measure(), part.columns)
                if args.out:
                    report.write(rows, args.out)  # a later part may fail
    print("\n".join(report.markdown(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
