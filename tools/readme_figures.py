#!/usr/bin/env python3
"""Write the README's tables of measurements and docs/first_token.svg from the result files.

python tools/readme_figures.py             # write both
python tools/readme_figures.py --check     # exit 1 where either differs; write nothing
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from readme_picture import draw
from readme_rows import FIRST, FOUR, LENGTHS, ROWS, TWO, TWO_H100, TWO_H100_0_33, Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "first_token.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
ON_GPUS = (TWO_H100, TWO_H100_0_33, TWO, FOUR)


def load(name: str) -> Any:
    """A result file's content.

    Raises:
        SystemExit: there is no such file.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(
            f"readme_figures: expected {path.relative_to(ROOT)}, which a row of "
            "tools/readme_rows.py names; it is not there"
        )
    return json.loads(path.read_text())


def label(file: str) -> str:
    """What a link to a result file is called: its name without the date."""
    return file.split("_", 1)[1]


def link(file: str) -> str:
    """Where a result file's run is described: its section of its benchmark's page.

    Raises:
        SystemExit: no page has one.
    """
    for page in sorted(RESULTS.glob("*.md")):
        if f'<a id="{file}"></a>' in page.read_text():
            return f"{page.relative_to(ROOT)}#{file}"
    raise SystemExit(f"readme_figures: expected a page with the section {file}, found none")


def line(row: Row) -> str:
    baseline, ours, speedup = row.cells(load(row.file))
    return f"| {row.what} | {baseline} | {ours} | {speedup} | [run][{label(row.file)}] |"


def tables() -> str:
    """A table for each hardware, and what the links mean."""
    parts: list[str] = []
    for where, rows in groupby(ROWS, key=lambda row: row.where):
        baseline = "vLLM 0.33" if where == TWO_H100_0_33 else "vLLM 0.32"
        baseline += ", multicast off" * (where in ON_GPUS)
        head = f"| {where} | {baseline} | vllm_commext | speedup | |\n|---|---|---|---|---|"
        parts.append("\n".join([head, *map(line, rows)]))
    files = sorted({row.file for row in ROWS})
    links = "\n".join(f"[{label(name)}]: {link(name)}" for name in files)
    return "\n\n".join([*parts, links])


def picture() -> str:
    results = load(FIRST)
    about = results["about"]
    lines = (
        f"{about['GPU']}, {about['versions']}, commit {about['commit']}, medians, no multicast",
        "vllm_commext behind its proxy, prompts read while they are computed",
    )
    return draw(results["rows"], LENGTHS, lines)


def with_tables(text: str, new: str) -> str:
    """The README's text with other tables between the two marks.

    Raises:
        SystemExit: it does not have each mark once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"readme_figures: expected {BEGIN} and {END} once each in README.md")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{new}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    args = parser.parse_args()
    wanted = {README: with_tables(README.read_text(), tables()), PICTURE: picture()}
    stale = [
        path for path, text in wanted.items() if not path.is_file() or path.read_text() != text
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)} differs from the result files")
        if not args.check:
            path.write_text(wanted[path])
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
