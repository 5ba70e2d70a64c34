#!/usr/bin/env python3
"""Whether the unit tests notice a defect: flips one operator or constant at a time and counts.

    python tools/mutants.py --sample 60 --seed 1 --out mutants.md

For each target of ``mutants_table.py`` the project is copied to a folder of its own. The tests must
pass there with the files as ``ast.unparse`` writes them; then one mutant of a sample after another
is written there, and the tests run until the first one fails. A mutant that behaves as the original
does stands in the table with the reason. The exit status is 1 where the tests of a target kill less
than they must.
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

from mutants_table import CALLED, CAPACITIES, CAPACITY, EQUIVALENT, FLIPPED, TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent
MIN_SHARE = 0.9
"""Of a target's mutants that are not equivalent: so many must die."""
WARM = ("hypothesis", "msgspec", "numpy", "pytest", "torch", "zmq")
"""What the tests import of others: imported once, before each run is forked."""
FIRST_SECONDS, LEAST_SECONDS, SLOWER = 600.0, 60.0, 10
"""Bounds of the first run, and of each other: a mutant may hang, a busy machine is slow."""
FORK = multiprocessing.get_context("fork")
POLL_SECONDS = 0.02
OUTCOMES = KILLED, HUNG, SURVIVED, SAME = "killed", "hung", "survived", "equivalent"
FOREIGN = 99
"""Exit status of tests that ran with other code than the copy's."""

LEFT_OUT = ("annotation", "returns", "decorator_list")


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

    @property
    def reason(self) -> str | None:
        """Why it is equivalent, if it is known to be."""
        is_number = self.change.partition(" -> ")[0].isdigit()
        if is_number and self.before.partition(" = ")[0] in CAPACITIES.get(self.path, ()):
            return CAPACITY
        return EQUIVALENT.get((self.path, self.before, self.change))


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """This one and all below it but annotations, decorators and the texts of messages."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_left_out = name in LEFT_OUT or isinstance(child, ast.JoinedStr)
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
    tree = ast.parse(text)
    lines = text.splitlines()
    places = places_of(tree)
    found: list[Mutant] = []
    for number in chosen:
        node, field, value = places[number]
        line, kept, before = node.lineno, getattr(node, field), ast.unparse(node)
        setattr(node, field, value)
        change = f"{before} -> {ast.unparse(node)}"
        found.append(Mutant(path, line, lines[line - 1].strip(), change, number))
        setattr(node, field, kept)
    return found


def sample_of(target: Target, size: int, seed: int) -> tuple[list[Mutant], int]:
    """Mutants drawn from all of a target's files, and how many there are."""
    texts = {path: (ROOT / path).read_text() for path in target.files}
    places = [
        (path, number)
        for path, text in texts.items()
        for number in range(len(places_of(ast.parse(text))))
    ]
    random.Random(f"{seed}").shuffle(places)
    drawn = sorted(places[:size])
    found: list[Mutant] = []
    for path, text in texts.items():
        found += mutants_of(path, text, [number for one, number in drawn if one == path])
    return found, len(places)


def copy_project(folder: Path, target: Target) -> None:
    """What the target's tests need, the target's files as they are written for each mutant."""
    for name in ("vllm_commext", "tests", "tools", "docs", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in target.files:
        (folder / path).write_text(ast.unparse(ast.parse((ROOT / path).read_text())))


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

    def __init__(self, folder: Path, target: Target, seconds: float) -> None:
        self.begun = time.monotonic()
        self._deadline = self.begun + seconds
        self._process = FORK.Process(target=run_pytest, args=(folder, target.tests))
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


def check(target: Target, mutants: Sequence[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """What became of each mutant.

    Raises:
        SystemExit: the tests fail without any.
    """
    found = [(mutant, SAME) for mutant in mutants if mutant.reason is not None]
    waiting = [mutant for mutant in mutants if mutant.reason is None]
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        free = [Path(place) / str(number) for number in range(jobs)]
        for folder in free:
            copy_project(folder, target)
        first = Run(free[0], target, FIRST_SECONDS)
        while (outcome := first.outcome()) is None:
            time.sleep(POLL_SECONDS)
        if outcome != SURVIVED:
            said = (free[0] / "log").read_text()[-3000:]
            raise SystemExit(f"the tests fail without any mutant: {said}")
        seconds = max(LEAST_SECONDS, SLOWER * (time.monotonic() - first.begun))
        running: list[tuple[Run, Mutant, Path, str]] = []
        while waiting or running:
            while waiting and free:
                mutant, folder = waiting.pop(), free.pop()
                original = (folder / mutant.path).read_text()
                (folder / mutant.path).write_text(mutant.of((ROOT / mutant.path).read_text()))
                running.append((Run(folder, target, seconds), mutant, folder, original))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                run, mutant, folder, original = one
                if (outcome := run.outcome()) is not None:
                    running.remove(one)
                    found.append((mutant, outcome))
                    (folder / mutant.path).write_text(original)
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
    lines = ["| target | mutants | tried |" + "".join(f" {one} |" for one in OUTCOMES) + " share |"]
    lines.append("|---" * (4 + len(OUTCOMES)) + "|")
    survivors: list[str] = []
    is_low = False
    for name in args.targets or TARGETS:
        mutants, num_all = sample_of(TARGETS[name], args.sample, args.seed)
        found = check(TARGETS[name], mutants, args.jobs)
        count = Counter(outcome for _, outcome in found)
        num_died = count[KILLED] + count[HUNG]
        share = num_died / max(1, num_died + count[SURVIVED])
        is_low |= share < MIN_SHARE
        cells = (name, num_all, len(mutants), *(count[one] for one in OUTCOMES), f"{share:.0%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
        left = [mutant for mutant, outcome in found if outcome == SURVIVED]
        told = [f"- `{one.path}:{one.line}`: `{one.before}`: `{one.change}`" for one in left]
        print(lines[-1], *told, sep="\n", flush=True)
        survivors += told
    if args.out is not None:
        args.out.write_text("\n".join([*lines, "", *survivors]).rstrip() + "\n")
    raise SystemExit(is_low)


if __name__ == "__main__":
    main()
