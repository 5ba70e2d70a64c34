#!/usr/bin/env python3
"""Builds the sdist and the manylinux wheel into dist/, and proves them.

Two builds in different folders must give the same bytes (SOURCE_DATE_EPOCH is the last commit's
time). What is in them is compared with the tree. Then both are installed in new environments of
every Python from 3.11 to 3.13 that this machine has, with and without a C compiler, always without
CUDA and vLLM: importing, the doctor, a round trip through the native queue, and uninstalling. A
Python that is not here is skipped, and the table says so. Exit status: 0, or 1 for any problem.
"""

import argparse
import ast
import shutil
import sys
import tempfile
import time
from pathlib import Path

from wheels.build import Artefacts, WheelError, build_twice, digest
from wheels.contents import problems
from wheels.environments import CASES, VERSIONS, find_python, try_case

ROOT = Path(__file__).resolve().parent.parent


def version_of(root: Path) -> str:
    """``vllm_commext.__version__``, the one place where the version stands."""
    tree = ast.parse((root / "vllm_commext" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise WheelError("expected __version__ = '...' in vllm_commext/__init__.py, found none")


def check_environments(artefacts: Artefacts, folder: Path, version: str, wanted: list[str]) -> bool:
    """Print the table; whether no case failed and at least one ran."""
    ran = failed = 0
    for name in wanted:
        python = find_python(name)
        if python is None:
            print(f"SKIP  Python {name}: not on PATH, nor in pyenv's or uv's folder")
            continue
        for number, case in enumerate(CASES):
            started = time.monotonic()
            problem = try_case(python, folder / f"{name}-{number}", artefacts, case, version)
            seconds = time.monotonic() - started
            mark = "FAIL" if problem else "ok"
            print(f"{mark:<5} Python {name:<5} {case.name} ({seconds:.0f} s)", flush=True)
            if problem:
                print(f"      {problem}")
            ran += 1
            failed += bool(problem)
    print(f"{ran - failed} of {ran} installations went as they should")
    return ran > 0 and failed == 0


def make(out: Path, wanted: list[str], folder: Path) -> bool:
    """Whether all held; the files are in `out` as soon as they are known to be reproducible."""
    version = version_of(ROOT)
    built = build_twice(ROOT, folder)
    out.mkdir(parents=True, exist_ok=True)
    for path in (built.sdist, built.wheel):
        shutil.copy(path, out)
        print(f"{digest(path)}  {out / path.name}")
    print("ok    two builds in different folders are the same to the byte")
    found = problems(built, version)
    for problem in found:
        print(f"FAIL  {problem}")
    if not found:
        print("ok    limited API of 3.10, manylinux tag, contents as in the tree", flush=True)
    return check_environments(built, folder, version, wanted) and not found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument(
        "--python",
        action="append",
        choices=VERSIONS,
        help="only this version; may be repeated; default: each of them",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commext-wheels-") as folder:
        try:
            held = make(args.out, args.python or list(VERSIONS), Path(folder))
        except WheelError as error:
            print(f"FAIL  {error}", file=sys.stderr)
            return 1
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
