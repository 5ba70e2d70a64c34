#!/usr/bin/env python3
"""Writes the digests of every function of vLLM's that a part depends on, for each vLLM in the
window, into ``vllm_commext/compat/known_sources.json``.

Wheels are fetched from pip's index, without what they depend on, and read. ``--source FOLDER ...``
names unzipped wheels instead; a version that is not among them keeps the digests that it has.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from matrix.columns import MatrixError, download, version_in

from vllm_commext.compat.evidence import KNOWN_SOURCES, compare, digest, short
from vllm_commext.compat.parts import PARTS
from vllm_commext.compat.versions import NEWEST, WINDOW

Table = dict[str, dict[str, str]]


def sources() -> list[str]:
    """Every function that some part depends on, once."""
    return sorted({symbol for part in PARTS for symbol in part.sources})


def roots(folders: list[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Each minor release with the folder that its package lies in."""
    if folders:
        yield from ((".".join(version_in(root).split(".")[:2]), root) for root in folders)
        return
    for release in WINDOW:
        yield release.minor, download(f"{release.minor}.0", folder)


def updated(known: Table, minor: str, root: Path) -> Table:
    """The table with a release's digests as they are now; what is not there has one, too."""
    made: Table = {}
    for symbol in sources():
        minors: dict[str, list[str]] = defaultdict(list)
        for found, of in known.get(symbol, {}).items():
            minors[found] += [one for one in of.split() if one != minor]
        minors[digest(root, symbol)].append(minor)
        made[symbol] = {found: " ".join(sorted(of)) for found, of in minors.items() if of}
    return made


def differences(root: Path) -> list[str]:
    """What of each part is not as in the newest release of the window."""
    lines: list[str] = []
    for part in PARTS:
        _, differing = compare(part, root, [NEWEST])
        if differing:
            lines.append(f"{part.name}: {', '.join(map(short, differing))}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, nargs="*", default=[], metavar="FOLDER")
    args = parser.parse_args()
    known: Table = json.loads(KNOWN_SOURCES.read_text()) if KNOWN_SOURCES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for minor, root in roots(args.source, Path(folder)):
                known = updated(known, minor, root)
        except MatrixError as error:
            print(f"known_sources: {error}", file=sys.stderr)
            return 2
    KNOWN_SOURCES.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{len(known)} functions of {len(WINDOW)} releases are in {KNOWN_SOURCES.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
