#!/usr/bin/env python3
"""Say how long `make test` took, and which files took longest.

    python tools/test_times.py BEGAN REPORT.xml ...

BEGAN is when it began, in seconds of the epoch; each report is pytest's, of ``--junitxml``.
"""

import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

NUM_FILES, MOST_MINUTES = 10, 7


def main() -> None:
    began, *reports = sys.argv[1:]
    files: dict[str, float] = defaultdict(float)
    for report in filter(Path.exists, map(Path, reports)):  # a run that broke off has left none
        for case in ET.parse(report).iter("testcase"):
            files[case.get("classname", "")] += float(case.get("time", 0))
    for name in sorted(files, key=files.__getitem__, reverse=True)[:NUM_FILES]:
        print(f"{files[name]:6.1f} s  {name}")
    minutes, seconds = divmod(round(time.time() - float(began)), 60)
    print(f"make test took {minutes} min {seconds:02} s; above are its slowest files")
    if minutes >= MOST_MINUTES:
        print(
            f"expected less than {MOST_MINUTES} min on two cores with nothing beside it: see "
            "docs/design/tests.md for what to leave to make long"
        )


if __name__ == "__main__":
    main()
