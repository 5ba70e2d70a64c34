"""Asks Prometheus every query of a Grafana dashboard once: which have data, and which it refuses.

python3 queries.py PROMETHEUS_URL DASHBOARD.json; exit status 1 where a query is refused.
"""

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 10


def get(url: str, **parameters: str) -> Any:
    """The `data` of an answer of Prometheus' HTTP API."""
    with urllib.request.urlopen(
        f"{url}?{urllib.parse.urlencode(parameters)}", timeout=TIMEOUT_SECONDS
    ) as answer:
        return json.load(answer)["data"]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    url, dashboard = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    for target in get(f"{url}/api/v1/targets")["activeTargets"]:
        labels = target["labels"]
        say(f"{target['health']:5} {labels['job']} {labels.get('role', '')} {labels['instance']}")
    refused, with_data, count = 0, 0, 0
    for panel in dashboard["panels"]:
        for query in panel.get("targets", []):
            count += 1
            text = query["expr"].replace("$__rate_interval", "1m")
            try:
                found = get(f"{url}/api/v1/query", query=text)["result"]
            except urllib.error.HTTPError as error:
                refused += 1
                say(f"refused: {panel['title']}: {text}: {error.read().decode()}")
                continue
            with_data += bool(found)
    say(f"{count} queries: {with_data} with data, {refused} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
