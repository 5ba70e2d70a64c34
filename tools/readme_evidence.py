"""The README's own tables: what disaggregation takes beside one server, and how many requests are
in time at equal GPUs.  Pure: a table is a function of a result file's content."""

from collections.abc import Mapping
from typing import Any

from readme_picture import ENGINES, PLAIN
from readme_rows import number

Results = Mapping[str, Any]
FIGURES = (
    ("first token", 1000, "first token, prompt of 1,000 tokens", True),
    ("first token", 8000, "first token, 8,000 tokens", True),
    ("second token", 8000, "second token, 8,000 tokens", True),
    ("TPOT", 8000, "time per output token, 8,000 tokens", False),
    ("CPU", 8000, "CPU time of all processes for an output token", False),
)
"""Figure, prompt length, label, and whether what it adds to one server's is shown."""
LIMIT = "15 ms, 1000 ms"
WAYS = {
    "replicas": "two replicas",
    "nixl": "`NixlConnector` 1P1D",
    "fixed": "vllm_commext 1P1D",
    "adaptive": "vllm_commext adaptive",
}
WORKLOADS = {
    "mixed": "prompts of 4,000, answers of 160",
    "document": "prompts of 8,000, answers of 256",
}


def latency(results: Results) -> str:
    """Rows of one server, vLLM's connector and this package, milliseconds."""
    found = {(row["tokens"], row["engine"]): row for row in results["rows"] if row["at once"] == 1}
    lines = ["| milliseconds | one server | `NixlConnector` | vllm_commext |", "|---|---|---|---|"]
    for figure, tokens, label, is_added in FIGURES:
        one = found[tokens, PLAIN][figure]
        cells = [number(one)]
        for engine in ENGINES:
            value = found[tokens, engine][figure]
            cells.append(number(value) + (f" (+{number(value - one)})" if is_added else ""))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goodput(*runs: Results) -> str:
    """Percent of requests within the limits, a row a run, workload and rate; "-" for the one way
    that a later run may be without."""
    lines = [f"| requests in time | {' | '.join(WAYS.values())} |", f"|---|{'---|' * len(WAYS)}"]
    for place, run in enumerate(runs, 1):
        for (workload, rate), at in _shares(run).items():
            if len(at) >= len(WAYS) - (place > 1):
                label = f"{WORKLOADS[workload]}, {rate:g}/s" + (f", run {place}" * (place > 1))
                lines.append(f"| {label} | {' | '.join(at.get(way, '-') for way in WAYS)} |")
    return "\n".join(lines)


def _shares(run: Results) -> dict[tuple[str, float], dict[str, str]]:
    """Percent of requests within the limits, by workload and rate, and by way."""
    cells: dict[tuple[str, float], dict[str, str]] = {}
    for row in run["rows"]:
        way = row["way"].partition(" ")[0]
        is_told = "/" not in row["way"] or row["way"].endswith("15/1000")
        if way in WAYS and is_told and LIMIT in row["good"]:
            share = sum(row["good"][LIMIT]) / row["requests"]
            at = cells.setdefault((row["workload"], row["rate"]), {})
            at[way] = f"{share:.0%}".replace("%", " %")
    return cells
