"""The README's own tables: what disaggregation takes beside one server, and how many requests are
in time at equal GPUs.  Pure: a table is a function of a result file's content."""

from collections.abc import Mapping, Sequence
from typing import Any

from readme_picture import ENGINES, PLAIN
from readme_rows import number

Results = Mapping[str, Any]
FIGURES = (
    ("first token", 1000, "first token, prompt of 1,000 tokens", True),
    ("first token", 8000, "first token, 8,000 tokens", True),
    ("second token", 8000, "second token, 8,000 tokens", True),
    ("TPOT", 8000, "time per output token, 8,000 tokens", False),
)
"""Figure, prompt length, label, and whether what it adds to one server's is shown."""
HEAD = (
    "| milliseconds | one server | `NixlConnector` | vllm_commext, asked alike | behind our proxy |"
)
LIMITS = {f"{each} ms, 1000 ms": f"{each} ms a token" for each in (10, 15, 25)}
WAYS = {
    "replicas": "two replicas",
    "nixl": "`NixlConnector` 1P1D",
    "fixed": "vllm_commext 1P1D",
    "adaptive": "vllm_commext adaptive, `--tpot-ms 15`",
}
TOLD = "15/1000"


def latency(results: Results) -> str:
    """Rows of one server and of what splits prompts from answers, milliseconds."""
    found = {(row["tokens"], row["engine"]): row for row in results["rows"] if row["at once"] == 1}
    lines = [HEAD, "|---|---|---|---|---|"]
    for figure, tokens, label, is_added in FIGURES:
        one = found[tokens, PLAIN][figure]
        cells = [number(one)]
        for engine in ENGINES:
            value = found[tokens, engine][figure]
            cells.append(number(value) + (f" (+{number(value - one)})" if is_added else ""))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goodput(*runs: Results) -> str:
    """Percent of requests within the limits, a row a run and limit, with its rates in their order;
    "-" for a way that a run is without."""
    head = f"| share with the first token within 1 s and, at most, | {' | '.join(WAYS.values())} |"
    lines = [head, f"|---|{'---|' * len(WAYS)}"]
    for place, run in enumerate(runs, 1):
        rates = sorted({row["rate"] for row in run["rows"]})
        label = f"{'; '.join(f'{rate:g}' for rate in rates)} requests/s, run {place}"
        for limit, meaning in LIMITS.items():
            shares = _shares(run, limit)
            cells = [_cell([shares.get((way, rate), "-") for rate in rates]) for way in WAYS]
            lines.append(f"| {meaning}, {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(shares: Sequence[str]) -> str:
    return "-" if set(shares) == {"-"} else f"{'; '.join(shares)} %"


def _shares(run: Results, limit: str) -> dict[tuple[str, float], str]:
    """Percent of requests within the limits, by way and rate."""
    found: dict[tuple[str, float], str] = {}
    for row in run["rows"]:
        way = row["way"].partition(" ")[0]
        is_told = "/" not in row["way"] or row["way"].endswith(TOLD)
        if way in WAYS and is_told:
            found[way, row["rate"]] = f"{sum(row['good'][limit]) / row['requests']:.0%}"[:-1]
    return found
