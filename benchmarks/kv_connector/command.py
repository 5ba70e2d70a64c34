"""The command line: which parts run, at which sizes, and what they have to reach."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kv_connector import blocks, fence, latency, report, setup, stall, states
from kv_connector.report import Row, Target
from kv_connector.samples import Sample, in_child
from kv_connector.shapes import Shape
from tests.kit.tiny_model import write_tiny_model

PARTS = ("setup", "stall", "fence", "blocks", "states", "latency")
TRANSPORTS = {"CMA": {}, "TCP": {"UCX_TLS": "tcp"}}
SOON = 5


@dataclass(frozen=True)
class Sizes:
    """How large the parts are."""

    regions: int = 80
    blocks: int = 20_000
    rounds: int = 5
    pool: int = 65_536
    read: int = 40_000
    churned: int = 40_000
    turns: tuple[int, ...] = (SOON, 10, 20, 40)
    requests: int = 100
    pairs: int = 300
    seeds: tuple[int, ...] = (0, 1)


QUICK = Sizes(8, 2_000, 2, 8_192, 5_000, 20_000, (2, SOON), 20, 20, (0,))


@dataclass(frozen=True)
class Part:
    """A part: its title, what takes its samples, and the targets of its cases."""

    title: str
    measure: Callable[[], list[Sample]]
    targets: dict[str, Target]
    columns: tuple[str, str] = report.COLUMNS


def less(factor: float) -> Target:
    return Target(f"at least {factor:g}x less", 1 / factor)


def parts(args: argparse.Namespace, folder: Path) -> dict[str, Part]:
    sizes = QUICK if args.quick else Sizes(rounds=args.rounds)
    llama, granite = folder / "llama", folder / "granite"
    shape = Shape(sizes.regions, sizes.blocks)
    return {
        "setup": Part(
            f"Setting up a peer, {sizes.regions} regions x {sizes.blocks} blocks",
            lambda: in_child(setup.measure_setup, llama, shape, sizes.rounds),
            {setup.FIRST_PEER: less(300), setup.NEXT_PEER: less(300), setup.SPLIT: less(1000)},
        ),
        "stall": Part(
            f"Posting a read of {sizes.read} random blocks of 4 KB",
            lambda: _stalls(llama, sizes),
            {
                f"{transport}, {case}": less(10)
                for transport in TRANSPORTS
                for case in (stall.STALL, stall.OWN_STALL)
            },
        ),
        "fence": Part(
            "Proving that what was read was still the request's: our reads with and without fence",
            lambda: _fences(sizes),
            {
                fence.case("CMA", fence.ALONE): Target("at most 50 us", most=50.0),
                fence.case("CMA", fence.COST): Target("at most 50 us", most=50.0),
                fence.case("CMA", fence.LARGE): Target("at most 1.05x", 1.05),
            },
            fence.COLUMNS,
        ),
        "blocks": Part(
            f"Descriptors a request, pools of {sizes.churned} blocks",
            lambda: in_child(
                blocks.measure_blocks,
                *(llama, sizes.churned, sizes.turns, sizes.requests, sizes.seeds),
            ),
            {
                blocks.case(turn, caching=caching): less(1.2)
                for turn in sizes.turns
                for caching in (True, False)
            },
        ),
        "states": Part(
            "Descriptors of Mamba2 states, one rank to one rank",
            lambda: in_child(
                states.measure_states, granite, environ={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
            ),
            {states.case(count): less(4) for count in (1, 2)},
        ),
        "latency": Part(
            "A request of 200 prompt tokens, tiny dense model on CPU, TCP, our queue everywhere",
            lambda: latency.measure_latency(llama, folder, args.requests, args.starts),
            {
                f"{case}, median": Target("at most 1.05x", 1.05)
                for case in (latency.FIRST, latency.DECODE, latency.WHOLE)
            },
        ),
    }


def _stalls(model: Path, sizes: Sizes) -> list[Sample]:
    return [
        sample
        for transport, environ in TRANSPORTS.items()
        for sample in in_child(
            stall.measure_stall,
            *(model, transport, sizes.pool, sizes.read, sizes.rounds),
            environ=environ,
        )
    ]


def _fences(sizes: Sizes) -> list[Sample]:
    return [
        sample
        for transport, environ in TRANSPORTS.items()
        for sample in in_child(fence.measure_fence, transport, sizes.pairs, environ=environ)
    ]


def run(description: str) -> int:
    """Parse the command line, measure, report."""
    args = _arguments(description)
    chosen = args.only or [name for name in PARTS if not (args.quick and name == "latency")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="nixl-bench-") as name:
        folder = Path(name)
        for kind in ("llama", "granite"):
            write_tiny_model(folder / kind, kind)
        for key, part in parts(args, folder).items():
            if key in chosen:
                print(part.title, file=sys.stderr)
                targets = {} if args.quick else part.targets
                rows += report.rows_of(part.title, part.measure(), targets, part.columns)
                if args.out:
                    _write(rows, args.out)  # a later part may fail
    print(report.markdown(rows))
    return 0


def _arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, no servers")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--rounds", type=int, default=5, help="of setup and stall")
    parser.add_argument("--starts", type=int, default=3, help="of each pair of servers")
    parser.add_argument("--requests", type=int, default=60, help="for each start of the servers")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    return parser.parse_args()


def _write(rows: list[Row], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(report.markdown(rows))
    out.with_suffix(".json").write_text(report.as_json(rows))
