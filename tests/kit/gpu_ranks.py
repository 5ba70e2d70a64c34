"""Runs a script as the ranks of a group, for the most part a process a GPU, without NVLink
multicast."""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from tests.kit.servers import free_port
from vllm_commext.allreduce.machine import NO_MULTICAST

if TYPE_CHECKING:
    from vllm_commext.collective import Collective

GRACE_SECONDS = 30.0
CHECK_LINE = '{"check"'
ENVIRON: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "lo",
    **NO_MULTICAST,
    "VLLM_HOST_IP": "127.0.0.1",
}
ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    """The end of all ranks: each check's line of JSON, rank 0's output, and exit statuses by rank,
    negative for those that had to be killed."""

    lines: dict[str, Any]
    text: str
    codes: list[int]


def run_ranks(
    script: Path, world_size: int, checks: Sequence[str], seconds: float, under: Sequence[str] = ()
) -> Outcome:
    """Run ``script RANK WORLD_SIZE PORT CHECK ...`` on every rank, each ``under`` a command such as
    a sanitizer's, and leave no process behind; ``seconds`` are rank 0's."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*under, sys.executable, str(script), str(rank), str(world_size), port, *checks],
            env=_environ(),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        text = ranks[0].communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        ranks[0].kill()
        text = ranks[0].communicate()[0]
    finally:
        codes = end_together(ranks, GRACE_SECONDS)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith(CHECK_LINE)]
    return Outcome({line["check"]: line for line in lines}, text, codes)


class HasCollective(Protocol):
    collective: "Collective"


Given = TypeVar("Given", bound=HasCollective)


def run_checks(
    given: Given, checks: Mapping[str, Callable[[Given], object]], wanted: Sequence[str]
) -> None:
    """In a script that `run_ranks` started, on all ranks: one check after the other, all or those
    wanted, and on rank 0 the line of JSON of each: its name, seconds, figures, each rank's
    error."""
    import torch

    for name in wanted or list(checks):
        start, figures, error = time.monotonic(), None, ""
        try:
            figures = checks[name](given)
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the test shows it
            error = traceback.format_exc()
        errors = given.collective.run(lambda error=error: error)
        if given.collective.rank == 0:
            line = {
                "check": name,
                "seconds": round(time.monotonic() - start, 2),
                "figures": figures,
                "errors": {str(index): text for index, text in enumerate(errors) if text},
            }
            sys.stdout.write("\n" + json.dumps(line) + "\n")
            sys.stdout.flush()


def checks_of(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """A script's functions ``check_NAME`` by their names, in their order."""
    prefix = "check_"
    return {
        name.removeprefix(prefix): value
        for name, value in namespace.items()
        if name.startswith(prefix)
    }


def run_as_ranks(
    script: str,
    arguments: Sequence[str],
    world_size: int,
    seconds: float,
    more: Mapping[str, str] | None = None,
) -> int:
    """Run ``script ARGUMENTS --port PORT --rank RANK`` on every rank; what they write is shown. Its
    parser has `add_rank_arguments`. Returns 1 where a rank failed or had to be killed, else 0."""
    command = [sys.executable, script, *arguments, "--port", str(free_port())]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=_environ(more))
        for rank in range(world_size)
    ]
    return int(any(end_together(ranks, seconds)))


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)


def run_program(
    parser: argparse.ArgumentParser,
    script: str,
    run_rank: Callable[[argparse.Namespace], object],
    seconds: Callable[[argparse.Namespace], float],
    more: Mapping[str, str],
) -> int:
    """A program's ``main`` that runs as ranks, one a GPU, see `run_as_ranks`. The parser gets
    ``--tp``; after ``run_rank`` a rank's process ends at once, whatever threads libraries have
    left."""
    parser.add_argument("--tp", type=int, default=2, help="number of GPUs, a rank on each")
    add_rank_arguments(parser)
    args = parser.parse_args()
    if args.rank < 0:
        return run_as_ranks(script, sys.argv[1:], args.tp, seconds(args), more)
    run_rank(args)
    sys.stdout.flush()
    os._exit(0)


def _environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **ENVIRON, **(more or {}), "PYTHONPATH": python_path}


def end_together(ranks: Sequence["subprocess.Popen[Any]"], seconds: float) -> list[int]:
    """Wait until all ranks have ended, one has failed, or the time is over; then kill who is left.

    Returns:
        Exit statuses in the order of ranks; negative for those that had to be killed."""
    end = time.monotonic() + seconds
    try:
        codes = [process.poll() for process in ranks]
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.05)
            codes = [process.poll() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [process.wait(GRACE_SECONDS) for process in ranks]
