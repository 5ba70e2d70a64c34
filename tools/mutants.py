#!/usr/bin/env python3
"""Flips one operator or constant at a time and counts how many flips the unit tests notice.

    python tools/mutants.py --sample 60 --seed 1 --out mutants.md

For each target the project is copied to a folder of its own. The tests must pass there without a
change; then one mutant of a sample after another is written there, and the tests run until the
first one fails. The exit status is 1 where a target's tests notice less than 90 %.
"""

import argparse
import ast
import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIN_SHARE = 0.9
WARM = ("hypothesis", "msgspec", "numpy", "pytest", "torch", "zmq")
"""What the tests import of others: imported once, before each run is forked."""
FIRST_SECONDS, LEAST_SECONDS, SLOWER = 600.0, 60.0, 10
"""Bounds of the first run, and of each other: a mutant may hang, a busy machine is slow."""
FORK = multiprocessing.get_context("fork")
POLL_SECONDS = 0.02
OUTCOMES = KILLED, HUNG, SURVIVED = "killed", "hung", "survived"
FOREIGN = 99
"""Exit status of tests that ran with other code than the copy's."""
LEFT_OUT = ("annotation", "returns", "decorator_list")
NIXL = "vllm_commext/nixl"
TARGETS = {
    "planner": (
        f"{NIXL}/geometry/*.py",
        "nixl/test_topology.py nixl/test_layout.py nixl/test_lanes.py nixl/test_request_blocks.py "
        "nixl/test_descriptors.py nixl/test_mamba.py nixl/test_plan*.py nixl/test_pipeline.py",
    ),
    "fence": (f"{NIXL}/prefill/fence.py", "nixl/test_fence.py"),
    "leases": (f"{NIXL}/prefill/leases.py", "nixl/test_leases.py"),
    "records": (
        f"{NIXL}/decode/load_state.py {NIXL}/prefill/prefill_state.py",
        "nixl/test_request_phases.py nixl/test_pr*.py nixl/test_quarantine.py",
    ),
    "client": (f"{NIXL}/wire/client.py", "nixl/test_client*.py"),
    "codec": ("vllm_commext/shm/codec.py", "shm/test_codec.py shm/test_steps.py"),
    "ring": (
        "vllm_commext/shm/ring.py vllm_commext/shm/segment.py",
        "shm/test_segment.py shm/test_ring.py shm/test_ring_processes.py",
    ),
    "dispatcher": (
        "vllm_commext/allreduce/dispatcher.py vllm_commext/allreduce/table.py",
        "allreduce/test_dispatcher.py allreduce/test_tables.py",
    ),
}
"""Name to files, and to the tests below tests/unit that cover them; patterns, apart by a space."""

_ORDERED = ((ast.Lt, ast.LtE, ast.GtE), (ast.LtE, ast.Lt, ast.Gt))
_ORDERED += ((ast.Gt, ast.GtE, ast.LtE), (ast.GtE, ast.Gt, ast.Lt))
_PAIRS = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or))
_PAIRS += ((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift))
_PAIRS += ((ast.BitAnd, ast.BitOr),)
_SINGLE = ((ast.Div, ast.Mult), (ast.Mod, ast.Mult), (ast.BitXor, ast.BitAnd), (ast.USub, ast.UAdd))
FLIPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    **{one: others for one, *others in _ORDERED},
    **{one: (other,) for pair in _PAIRS for one, other in (pair, pair[::-1])},
    **{one: (other,) for one, other in _SINGLE},
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A file with one change, which is named by its line and what stood and stands there."""

    path: str
    line: int
    before: str
    change: str
    number: int

    def of(self, text: str) -> str:
        tree = ast.parse(text)
        node, field, value = places_of(tree)[self.number]
        setattr(node, field, value)
        return ast.unparse(tree)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """This node and all below it, except annotations, decorators, the texts of messages, and
    numbers that a module gives a name to (bounds: tests take the number from there)."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_bound = isinstance(node, ast.Module) and isinstance(child, ast.Assign)
            is_left_out = name in LEFT_OUT or isinstance(child, ast.JoinedStr) or is_bound
            if isinstance(child, ast.AST) and not is_left_out:
                yield from nodes(child)


def changes(node: ast.AST) -> list[tuple[str, object]]:
    """Fields of this node with what can be put there."""
    match node:
        case ast.Compare(ops=ops):
            return [
                ("ops", [*ops[:place], other(), *ops[place + 1 :]])
                for place, op in enumerate(ops)
                for other in FLIPPED[type(op)]
            ]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [("operand", ast.UnaryOp(ast.Not(), operand))]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) | ast.UnaryOp(op=op):
            return [("op", other()) for other in FLIPPED.get(type(op), ())]
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            return [("func", ast.Name(CALLED[name]))]
        case ast.Constant(value=bool(value)):
            return [("value", not value)]
        case ast.Constant(value=int(value) | float(value)):
            return [("value", value + 1)]
    return []


def places_of(tree: ast.AST) -> list[tuple[Any, str, object]]:
    """Every node with a field that can be changed, and to what."""
    return [(node, *change) for node in nodes(tree) for change in changes(node)]


def mutants_of(path: str, text: str, chosen: Sequence[int]) -> list[Mutant]:
    """The mutants of a file with these numbers."""
    places = places_of(ast.parse(text))
    lines = text.splitlines()
    found: list[Mutant] = []
    for number in chosen:
        node, field, value = places[number]
        kept, before = getattr(node, field), ast.unparse(node)
        setattr(node, field, value)
        change = f"{before} -> {ast.unparse(node)}"
        found.append(Mutant(path, node.lineno, lines[node.lineno - 1].strip(), change, number))
        setattr(node, field, kept)
    return found


def matching(patterns: str, folder: str = "") -> list[str]:
    """Paths from the project's root, each pattern with at least one.

    Raises:
        SystemExit: nothing is there for a pattern.
    """
    found: set[str] = set()
    for pattern in patterns.split():
        paths = {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern)}
        if not paths:
            raise SystemExit(f"mutants: expected files for {folder}{pattern}, found none")
        found |= paths
    return sorted(found)


def sample_of(files: Sequence[str], size: int, seed: int) -> tuple[list[Mutant], int]:
    """Mutants drawn from all of these files, and how many there are."""
    texts = {path: (ROOT / path).read_text() for path in files}
    places = [
        (path, number)
        for path, text in texts.items()
        for number in range(len(places_of(ast.parse(text))))
    ]
    random.Random(f"{seed}").shuffle(places)
    drawn = sorted(places[:size])
    return [
        mutant
        for path, text in texts.items()
        for mutant in mutants_of(path, text, [number for one, number in drawn if one == path])
    ], len(places)


def run_pytest(folder: Path, tests: Sequence[str]) -> None:
    """In a child of its own: the copy's tests on the copy's code; ends with pytest's status."""
    os.setsid()
    os.chdir(folder)
    output = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder)]
    shutil.rmtree(".hypothesis", ignore_errors=True)  # no mutant has the examples of another
    pytest = importlib.import_module("pytest")
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--rootdir={folder}"]
    status = int(pytest.main([*arguments, *tests]))
    if not str(sys.modules["vllm_commext"].__file__).startswith(str(folder)):
        status = FOREIGN
    sys.stdout.flush()
    os._exit(status)


class Run:
    """The tests of one copy, under way in a process group of their own."""

    def __init__(self, folder: Path, tests: Sequence[str], seconds: float) -> None:
        self.begun = time.monotonic()
        self._deadline = self.begun + seconds
        self._process = FORK.Process(target=run_pytest, args=(folder, tests))
        self._process.start()

    def outcome(self) -> str | None:
        """None while it runs, and not for longer than its bound."""
        hung = time.monotonic() > self._deadline
        if self._process.is_alive() and not hung:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        if hung:
            return HUNG
        return SURVIVED if self._process.exitcode == 0 else KILLED


def check(tests: Sequence[str], mutants: Sequence[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """Each mutant with its outcome.

    Raises:
        SystemExit: the tests fail without any.
    """
    found: list[tuple[Mutant, str]] = []
    waiting = list(mutants)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        free = [Path(place) / str(number) for number in range(jobs)]
        for folder in free:
            for name in ("vllm_commext", "tests", "tools", "docs", "csrc"):
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / name, ignore=ignore)
            shutil.copy(ROOT / "pyproject.toml", folder)
        first = Run(free[0], tests, FIRST_SECONDS)
        while (outcome := first.outcome()) is None:
            time.sleep(POLL_SECONDS)
        if outcome != SURVIVED:
            raise SystemExit(f"mutants: without any: {(free[0] / 'log').read_text()[-3000:]}")
        seconds = max(LEAST_SECONDS, SLOWER * (time.monotonic() - first.begun))
        running: list[tuple[Run, Mutant, Path]] = []
        while waiting or running:
            while waiting and free:
                mutant, folder = waiting.pop(), free.pop()
                (folder / mutant.path).write_text(mutant.of((ROOT / mutant.path).read_text()))
                running.append((Run(folder, tests, seconds), mutant, folder))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                run, mutant, folder = one
                if (outcome := run.outcome()) is not None:
                    running.remove(one)
                    found.append((mutant, outcome))
                    shutil.copy(ROOT / mutant.path, folder / mutant.path)
                    free.append(folder)
    return sorted(found, key=lambda one: (one[0].path, one[0].line))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all without any")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each target")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--out", type=Path, help="file for the report")
    args = parser.parse_args()
    for name in WARM:
        importlib.import_module(name)
    lines = [f"| target | mutants | tried | {' | '.join(OUTCOMES)} | share |", "|---" * 7 + "|"]
    survivors: list[str] = []
    is_low = False
    for name in args.targets or TARGETS:
        files, tests = TARGETS[name]
        mutants, num_all = sample_of(matching(files), args.sample, args.seed)
        found = check(matching(tests, "tests/unit/"), mutants, args.jobs)
        count = Counter(outcome for _, outcome in found)
        share = 1 - count[SURVIVED] / max(1, len(found))
        is_low |= share < MIN_SHARE
        cells = (name, num_all, len(found), *(count[one] for one in OUTCOMES), f"{share:.0%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
        left = [mutant for mutant, outcome in found if outcome == SURVIVED]
        rows = [f"- `{one.path}:{one.line}`: `{one.before}`: `{one.change}`" for one in left]
        print(lines[-1], *rows, sep="\n", flush=True)
        survivors += rows
    if args.out is not None:
        args.out.write_text("\n".join([*lines, "", *survivors]).rstrip() + "\n")
    raise SystemExit(is_low)


if __name__ == "__main__":
    main()
