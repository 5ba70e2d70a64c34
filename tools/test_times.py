#!/usr/bin/env python3
"""Say how long `make test` took, and which files took longest.

    python tools/test_times.py BEGAN REPORT.xml ...

BEGAN is when it began, in seconds of the epoch; each report is pytest's, of ``--junitxml``.  A
file's seconds are those of its tests, which run beside others.  It judges nothing: more than
``MOST_SECONDS`` are one more line.
"""

import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MOST_SECONDS = 420.0
NUM_FILES = 10


def seconds_by_file(reports: Iterable[Path]) -> Counter[str]:
    """Seconds of each file's tests; a run that broke off has left no report."""
    found: Counter[str] = Counter()
    for report in filter(Path.exists, reports):
        for case in ET.parse(report).iter("testcase"):
            found[case.get("classname", "")] += float(case.get("time", 0))
    return found


def lines(seconds: float, files: Counter[str]) -> list[str]:
    """What is said of a run."""
    told = [f"{taken:6.1f} s  {name}" for name, taken in files.most_common(NUM_FILES)]
    told.append(f"make test took {in_minutes(seconds)}; above are its slowest files")
    if seconds > MOST_SECONDS:
        told.append(
            f"that is more than {in_minutes(MOST_SECONDS)}: on two cores with nothing beside it, "
            "see docs/design/tests.md for what to leave to make long"
        )
    return told


def in_minutes(seconds: float) -> str:
    return "{} min {:02} s".format(*divmod(round(seconds), 60))


def main() -> None:
    began, *reports = sys.argv[1:]
    print("\n".join(lines(time.time() - float(began), seconds_by_file(map(Path, reports)))))


if __name__ == "__main__":
    main()
