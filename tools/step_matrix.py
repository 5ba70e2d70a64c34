"""Whether the codec of steps serves every supported vLLM, also those that are not installed.

    python tools/step_matrix.py [--source FOLDER ...] [--steps 2000]

Of each version the classes of a step are made anew from the text of its wheel: the same names and
fields, without what they do. Steps with anything in any field then go through the codec and have to
arrive as pickle makes them. One line a version; fails if one is not served.
"""

import argparse
import dataclasses
import enum
import pickle
import random
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrix.columns import download, version_in
from matrix.source_view import SourceView

from vllm_commext.compat.versions import WINDOW
from vllm_commext.shm.codec import MARK, Decoder, Encoder, StepClasses

PATHS = (
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.core.sched.output:NewRequestData",
    "vllm.v1.core.sched.output:CachedRequestData",
    "vllm.v1.outputs:ModelRunnerOutput",
)
MODULE = "commext_step_classes"  # where pickle finds them
NAMES = [f"cmpl-{number:032x}-0" for number in range(24)]


class Status(enum.Enum):
    """As a worker says how a call went."""

    SUCCESS = enum.auto()
    FAILURE = enum.auto()


def stand_ins(root: Path) -> StepClasses:
    """Of the vLLM whose text is in this folder; their methods do nothing."""
    view = SourceView(root)
    return StepClasses(*(view.resolve(path) for path in PATHS), Status)


def with_their_fields(classes: StepClasses) -> StepClasses:
    """Plain dataclasses with the same fields, in their order."""
    home = types.ModuleType(MODULE)
    sys.modules[MODULE] = home
    made: list[Any] = []
    for kind, fields, _ in classes.kinds:
        made.append(dataclasses.make_dataclass(kind.__name__, fields))
        made[-1].__module__ = MODULE
        setattr(home, kind.__name__, made[-1])
    return StepClasses(*made, Status)


class Steps:
    """Calls and answers whose fields hold anything; names of requests mostly those of before."""

    def __init__(self, classes: StepClasses, seed: int) -> None:
        self._classes, self._random = classes, random.Random(seed)
        self._names = NAMES[:8]

    def messages(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            self._change_names()
            if self._random.random() < 0.5:
                made = self._made(self._classes.scheduled)
                made.scheduled_new_reqs = [self._made(self._classes.new)]
                made.scheduled_cached_reqs = self._made(self._classes.cached)
                yield "execute_model", (made,), {}, 0
            else:
                yield Status.SUCCESS, self._made(self._classes.output)

    def _change_names(self) -> None:
        choice = self._random.random()
        if choice < 0.2 and self._names:
            self._names = self._names[1:]
        elif choice < 0.4:
            self._names = [*self._names, self._random.choice(NAMES)]
        elif choice < 0.45:
            self._names = self._random.sample(NAMES, 10)

    def _made(self, kind: Any) -> Any:
        made = object.__new__(kind)
        for name in kind.__dataclass_fields__:
            made.__dict__[name] = self._value(2)
        return made

    def _value(self, depth: int) -> Any:
        pick, names = self._random, self._names
        choices: list[Any] = [
            lambda: None,
            lambda: pick.choice([True, False, 1.5, -(2**40), 2**70, 7, "text", b"bytes"]),
            lambda: pick.choice(names) if names else "",
            lambda: list(names),
            lambda: {name: pick.randrange(3) for name in names},
            lambda: {name: [pick.randrange(9)] for name in names},
            lambda: [pick.randrange(-9, 2**31) for _ in names],
            lambda: [[pick.randrange(99)] for _ in names],
            lambda: {pick.choice(NAMES)},
        ]
        if depth:
            choices += [
                lambda: [self._value(depth - 1) for _ in range(3)],
                lambda: (self._value(depth - 1), self._value(depth - 1)),
                lambda: {"key": self._value(depth - 1), 5: self._value(depth - 1)},
            ]
        return pick.choice(choices)()


def look_at(root: Path, steps: int) -> str:
    """What is wrong with the version whose text is in this folder; empty if it is served."""
    found = stand_ins(root)
    if problem := found.problem():
        return problem
    classes = with_their_fields(found)
    encoder, decoder = Encoder(classes), Decoder(classes)
    for number, message in enumerate(Steps(classes, seed=1).messages(steps)):
        record = encoder.encode(message)
        assert isinstance(record, bytes)
        if record[:1] != MARK:
            return f"step {number} was pickled"
        if number % 50 == 49:
            encoder.forget()  # as if it had not been sent
            continue
        got = repr(decoder.decode(record))
        if got != repr(pickle.loads(pickle.dumps(message))):
            return f"step {number} arrived as {got[:200]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, nargs="*", help="folders that hold a vLLM's files")
    parser.add_argument("--steps", type=int, default=2000, help="of each version")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        roots = iter(args.source) if args.source else _of_the_window(Path(folder))
        for root in roots:
            problem = look_at(root, args.steps)
            failed |= bool(problem)
            sys.stdout.write(f"{version_in(root)}: {problem or 'served'}\n")
            sys.stdout.flush()
    return int(failed)


def _of_the_window(folder: Path) -> Iterator[Path]:
    for release in WINDOW:
        yield download(f"{release.minor}.0", folder)


if __name__ == "__main__":
    sys.exit(main())
