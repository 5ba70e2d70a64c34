#!/usr/bin/env python3
"""Write the tables of README.md and docs/performance.md, and docs/added_latency.svg, from the
result files.

python tools/readme_figures.py             # write all
python tools/readme_figures.py --check     # exit 1 where one differs; write nothing
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from readme_evidence import goodput, latency
from readme_picture import draw
from readme_rows import FIRST, FOUR, ROWS, TWO, TWO_H100, TWO_H100_0_33, Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "added_latency.svg"
GOODPUT = ("2026-11-26_goodput_two_h100", "2026-11-26_goodput_two_h100_again")
BARS = (
    ("first token", 1000, "first token, 1,000 tokens"),
    ("second token", 1000, "second token"),
    ("first token", 8000, "first token, 8,000 tokens"),
    ("second token", 8000, "second token"),
)
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
    """Where a result file's run is described, from docs/: its section of its benchmark's page.

    Raises:
        SystemExit: no page has one.
    """
    for page in sorted(RESULTS.glob("*.md")):
        if f'<a id="{file}"></a>' in page.read_text():
            return f"../{page.relative_to(ROOT)}#{file}"
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
        f"Two {about['GPU']}, {about['versions']}, one request at a time",
        f"Medians; whiskers: least and greatest round; no multicast; commit {about['commit']}",
    )
    return draw(results["rows"], BARS, lines)


def with_table(path: Path, text: str, mark: str, new: str) -> str:
    """The text of a page with another table between the two marks of this name.

    Raises:
        SystemExit: it does not have each mark once.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"readme_figures: expected {begin} and {end} once each in {path.name}")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{new}\n{end}{rest.partition(end)[2]}"


def wanted() -> dict[Path, str]:
    """Each file with the text that it should have."""
    readme = with_table(README, README.read_text(), "latency", latency(load(FIRST)))
    readme = with_table(README, readme, "goodput", goodput(*map(load, GOODPUT)))
    page = with_table(PERFORMANCE, PERFORMANCE.read_text(), "measured", tables())
    return {README: readme, PERFORMANCE: page, PICTURE: picture()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    args = parser.parse_args()
    pages = wanted()
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} differs from the result files")
        if not args.check:
            path.write_text(pages[path])
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
