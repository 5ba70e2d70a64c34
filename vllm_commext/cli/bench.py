"""``vllm-commext bench``: which of two servers keeps more requests within limits, under open load.

Rounds are interleaved, the same arrivals on each endpoint in turn; how much equal rounds differ is
the noise beside which two endpoints are compared.
"""

import argparse
import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_commext.bench import figures
from vllm_commext.cli import above_zero, rounds, shapes
from vllm_commext.cli.rounds import Contestant
from vllm_commext.errors import ConfigError
from vllm_commext.limits import Limits

HELP = "measure how many requests meet your latency limits, of servers or shapes, with the noise"

WORKLOADS = ("document", "mixed", "short")
_positive = above_zero(float, "a number above 0")
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    told = "a server or proxy, http://HOST:PORT; repeat it: the others are compared with the first"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--endpoint", action="append", metavar="URL", help=told)
    told = "instead: start the model in each way to use the GPUs, one after the other, and compare"
    what.add_argument("--shapes", metavar="MODEL", help=told)
    add("--gpus", metavar="N,N", help="GPUs for --shapes; default: all of this host")
    add("--engines", type=int, metavar="N", help="engines on CPUs for --shapes, without GPUs")
    told = "default: %(default)s"
    add("--workload", choices=WORKLOADS, default="mixed", help=told)
    for flag, default, told in (
        ("--rate", 2.0, "requests a second"),
        ("--seconds", 30.0, "of arrivals a round"),
        ("--tpot-ms", 25.0, "a good request's time per output token"),
        ("--ttft-ms", 1000.0, "and to the first"),
        ("--wait", 30.0, "seconds for answers after a round's last arrival; later ones fail"),
        ("--scale", 1.0, "times the workload's tokens"),
    ):
        add(flag, type=_positive, default=default, help=f"{told}; default: %(default)g")
    add("--warm-up", type=float, default=5.0, metavar="SECONDS", help="default: %(default)g")
    add("--rounds", type=int, default=3, help="for each endpoint; default: %(default)s")
    add("--vocab-size", type=int, default=0, help="default: what the model says, else 10,000")
    add("--seed", type=int, default=1, help="of arrivals; tokens are new in every run")
    add("--api-key-file", default="", metavar="FILE", help="holds the key that the endpoints need")
    for flag, told in (
        ("--trace", "JSON lines as Mooncake's, instead of a workload"),
        ("--json", "also write every request's times there"),
        (
            "--export-trace",
            "also write the arrivals of a round there, for vllm bench serve --dataset-name "
            "timed_trace",
        ),
    ):
        add(flag, type=Path, metavar="FILE", help=told)


def run(args: argparse.Namespace) -> int:
    """0: measured; 1: an endpoint is worse than the first, or most requests failed."""
    try:
        importlib.import_module("vllm_commext.bench.client")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'aiohttp>=3.10' brings it") from error
    endpoints = args.endpoint or []
    if len(endpoints) > len(NAMES) or args.rounds < 1:
        raise ConfigError(
            f"expected at most {len(NAMES)} endpoints and 1 round or more, got {len(endpoints)} "
            f"and {args.rounds}"
        )
    for option, path in (("--json", args.json), ("--export-trace", args.export_trace)):
        if path and not _can_be_written(path):
            raise ConfigError(f"{option} {path}: expected a file that can be written")
    if args.shapes:
        return shapes.run(args)
    return asyncio.run(_run(args, dict(zip(NAMES, endpoints, strict=False))))


def _can_be_written(path: Path) -> bool:
    """Return whether a file is there, or could be made; makes none."""
    if os.access(path, os.F_OK):
        return os.access(path, os.W_OK) and not path.is_dir()
    return os.access(path.parent, os.W_OK | os.X_OK) and path.parent.is_dir()


async def _run(args: argparse.Namespace, urls: Mapping[str, str]) -> int:
    contestants = await rounds.play(args, urls)
    found = _verdicts(contestants, rounds.limits_of(args))
    rounds.tell(args, contestants, found)
    num = sum(map(len, contestants[0].rounds))
    mostly_failed = [2 * rounds.num_failed(one) > num for one in contestants]
    return int(any(mostly_failed) or any(is_bad for _, is_bad in found))


def _verdicts(contestants: Sequence[Contestant], limits: Limits) -> list[tuple[str, bool]]:
    """A sentence for each endpoint but the first, and whether that is worse."""
    first, *others = contestants
    compared = [(one.name, figures.compare(first.rounds, one.rounds, limits)) for one in others]
    return [
        (figures.verdict((first.name, name), one), one.differs and one.ratio < 1)
        for name, one in compared
    ]
