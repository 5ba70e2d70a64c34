#!/usr/bin/env python3
"""Prints one table: every API check and monkey-patched symbol against every vLLM in the window.

A version is imported where an environment of it is here (``.venv-X.Y.Z``, or ``.venv``), else its
wheel is fetched from pip's index, without what it depends on, and its text is read. A new version
needs one row in ``vllm_commext/compat/versions.py``. ``--source FOLDER`` and ``--environment
FOLDER`` name unzipped wheels and environments instead. Exit status: 0; 1 where an API has moved,
which is then said line by line; 2 where a version could not be had.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from matrix.columns import (
    ROOT,
    Column,
    MatrixError,
    column,
    download,
    from_environment,
    from_text,
    moved,
    table,
)

from vllm_commext.compat.api_probes import INSTALLED
from vllm_commext.compat.hooks import vllm_version
from vllm_commext.compat.versions import WINDOW

LEGEND = """
`holds`: as expected. `MOVED`: see below. `early`: it is there before its row's version. `there`: a
name that can be patched. `-`: not in this vLLM yet or, where it is imported, in a module that
needs a package which is not installed."""


def environment_of(version: str) -> Path | None:
    """The Python of an environment that `tools/cpu_env.py` made for this version."""
    for folder in (ROOT / f".venv-{version}", ROOT / ".venv"):
        for metadata in folder.glob(f"lib/python*/site-packages/vllm-{version}*.dist-info"):
            if metadata.is_dir():
                return folder / "bin" / "python"
    return None


def of_the_window(folder: Path) -> Iterator[Column]:
    for release in WINDOW:
        version = f"{release.minor}.0"
        python = environment_of(version)
        if python is not None:
            yield from_environment(python)
        else:
            yield from_text(download(version, folder))


def columns(args: argparse.Namespace, folder: Path) -> list[Column]:
    named = [from_environment(path / "bin" / "python") for path in args.environment]
    named += [from_text(path) for path in args.source]
    found = named or list(of_the_window(folder))
    return sorted(found, key=lambda one: [int(part) for part in one.version.split(".")[:3]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--source", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--probe", action="store_true", help="print this Python's column as JSON")
    args = parser.parse_args()
    if args.probe:
        version = vllm_version().partition("+")[0]
        print(json.dumps(dataclasses.asdict(column(version, "imported", INSTALLED))))
        return 0
    with tempfile.TemporaryDirectory(prefix="commext-matrix-") as folder:
        try:
            found = columns(args, Path(folder))
        except MatrixError as error:
            print(f"api_matrix: {error}", file=sys.stderr)
            return 2
    print(f"{table(found)}\n{LEGEND}")
    print("\n" + ("\n".join(moved(found)) or "Nothing has moved."))
    return 1 if moved(found) else 0


if __name__ == "__main__":
    sys.exit(main())
