"""The pictures of docs/images, drawn from the tables and files of benchmarks/results."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
WIDTH = 760
TEXT, GRID = "#333", "#ddd"
COLORS = ("#8a8a8a", "#d98c3f", "#2f7fc1")


@dataclass
class Svg:
    """Shapes in pixels from the upper left corner."""

    height: int
    shapes: list[str] = field(default_factory=list[str])

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        fill: str = TEXT,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="12" fill="{fill}"'
            f' text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = TEXT) -> None:
        self.shapes.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}"/>')

    def path(self, points: Sequence[tuple[float, float]], color: str) -> None:
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{steps}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )

    def whole(self) -> str:
        size = f'width="{WIDTH}" height="{self.height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {self.height}">'
        )
        return "\n".join((head, f'<rect {size} fill="white"/>', *self.shapes, "</svg>", ""))


@dataclass(frozen=True)
class Bar:
    """A median or share with the least and the most of its rounds."""

    value: float
    least: float
    most: float


def table_rows(page: str, anchor: str, heading: str = "") -> Iterator[dict[str, str]]:
    """The rows of the first table after an anchor, and after a line that begins with *heading*.

    Raises:
        ValueError: The page has no such place, or no table there.
    """
    text = (RESULTS / page).read_text(encoding="utf-8")
    at = text.find(f'<a id="{anchor}">')
    at = text.find(f"\n{heading}", at) if at >= 0 else at
    found = re.search(r"(?:^\|.*\n)+", text[at:], re.MULTILINE) if at >= 0 else None
    if found is None:
        raise ValueError(f"{page}: expected a table after {anchor!r} and {heading!r}, found none")
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()
    ]
    return (dict(zip(head, row, strict=True)) for row in rows)


def share(cell: str) -> Bar:
    """Of a cell such as `90 (88-91)`."""
    value, least, most = (float(one) for one in re.findall(r"[\d.]+", cell))
    return Bar(value, least, most)


def grouped(
    title: str,
    names: Sequence[str],
    groups: Sequence[tuple[str, Sequence[Bar | None]]],
    most: float,
    unit: str,
) -> Svg:
    """Horizontal bars, a group each row, with whiskers from the least to the most round."""
    bar, gap, left, right = 15, 16, 230, 60
    heights = [bar * sum(one is not None for one in bars) + gap for _, bars in groups]
    svg = Svg(64 + sum(heights) + 24)
    svg.text(10, 20, title, bold=True)
    for place, name in enumerate(names):
        svg.bar(10 + 185 * place, 32, 12, 12, COLORS[place])
        svg.text(28 + 185 * place, 42, name)
    scale = (WIDTH - left - right) / most
    for mark in range(5):
        x = left + scale * most * mark / 4
        svg.line(x, 58, x, 64 + sum(heights), GRID)
        svg.text(x, 64 + sum(heights) + 16, f"{most * mark / 4:g}{unit}", anchor="middle")
    y = 64.0
    for (name, bars), height in zip(groups, heights, strict=True):
        svg.text(10, y + (height - gap) / 2 + 4, name)
        for color, one in zip(COLORS, bars, strict=False):
            if one is not None:
                svg.bar(left, y + 1, scale * one.value, bar - 2, color)
                svg.line(
                    left + scale * one.least, y + bar / 2, left + scale * one.most, y + bar / 2
                )
                label = f"{one.value:g}"
                if scale * (one.most - one.value) > 30:  # else it reads as the line's end
                    svg.text(left + 36, y + bar - 3, label, anchor="end", fill="white")
                else:
                    svg.text(left + scale * max(one.most, one.value) + 6, y + bar - 3, label)
                y += bar
        y += gap
    return svg


LIMITS = (12, 25)
WORKLOADS = ("Bursts", "Documents", "The mixed load", "Conversations")


def goodput() -> Svg:
    """Replicas, fixed roles, and adaptive placement that was given the limit."""
    groups: list[tuple[str, list[Bar | None]]] = []
    for workload in WORKLOADS:
        rows = {row["way"]: row for row in table_rows("goodput.md", "2026-11-30_limits", workload)}
        for limit in LIMITS:
            ways = ("replicas", "fixed", f"ordered {limit}/1000")
            bars = [share(rows[way][f"good, {limit} ms, 1000 ms"]) for way in ways]
            name = workload.removeprefix("The ").lower()
            groups.append((f"{name}, {limit} ms per token", [*bars]))
    title = "Percent within 1 s to the first token and the limit per token; lines: range of rounds"
    return grouped(title, ("replicas", "fixed roles", "adaptive"), groups, 100, "%")


def added_latency() -> Svg:
    """Latency that a hand-over adds to a plain server's median; whiskers show the rounds."""
    rows = list(table_rows("handover.md", "2026-11-28_handover_compiled"))
    found = {(row["tokens"], row["engine"]): row for row in rows}
    groups: list[tuple[str, list[Bar | None]]] = []
    for column in ("first token", "second token"):
        for tokens in ("1000", "8000"):
            plain = share(found[tokens, "plain"][column]).value
            bars: list[Bar | None] = []
            for engine in ("vLLM's", "ours", "ours, proxy, streamed"):
                one = share(found[tokens, engine][column])
                bars.append(Bar(*(round(x - plain, 1) for x in (one.value, one.least, one.most))))
            groups.append((f"{column}, {int(tokens):,}-token prompt", bars))
    names = ("NixlConnector", "our connector", "our connector and our proxy")
    title = "Milliseconds more than with one server; medians; lines: range of rounds"
    return grouped(title, names, groups, 240, "")


def kill_and_drain() -> Svg:
    """Tokens of all streams in each 100 ms, around a drain and around a kill."""
    found = json.loads((RESULTS / "moves.json").read_text(encoding="utf-8"))
    svg = Svg(2 * 150 + 40)
    for place, row in enumerate(found["rows"]):
        top, counts = 34 + 150 * place, row["tokens by window"]
        wide = [sum(counts[n : n + 5]) for n in range(0, len(counts), 5)]
        scale_x, scale_y = (WIDTH - 80) / (len(wide) - 1), 100 / max(wide)
        what = {"drain": "is drained", "kill": "gets SIGKILL"}[row["fault"]]
        svg.text(10, top - 14, f"{row['streams']} streams: their engine {what} at 0 s", bold=True)
        svg.text(10, top + 4, f"{10 * max(wide)}/s")
        for second in range(-2, 7, 2):
            x = 60 + scale_x * 10 * (second + 2)
            svg.line(min(x, WIDTH - 20), top, min(x, WIDTH - 20), top + 100, GRID)
            svg.text(min(x, WIDTH - 20), top + 114, f"{second} s", anchor="middle")
        points = [(60 + scale_x * n, top + 100 - scale_y * one) for n, one in enumerate(wide)]
        svg.path(points, COLORS[-1])
    return svg


ROWS = {"queue": 0, "prefill": 1, "ask": 2, "first token": 2, "decode": 2}
SHADES = {"queue": "#8a8a8a", "prefill": "#d98c3f", "ask": "#8a8a8a", "first token": "#9cc3e0"}
MEANINGS = {"queue": "queue", "prefill": "computes the prompt", "ask": "asked", "decode": "decodes"}
MEANINGS["first token"] = "reads the chunks as they are finished"


def one_request() -> Svg:
    """Time from left to right, one row for each of proxy, P, D and client."""
    found = json.loads((RESULTS / "one_request.json").read_text(encoding="utf-8"))
    end = max(*(part[3] for part in found["parts"]), *found["client"])
    left, svg = 90, Svg(214)
    scale = (WIDTH - left - 20) / end
    tokens = f"{found['prompt_tokens']:,} tokens, answer of {found['tokens']}"
    svg.text(10, 20, f"One streamed request, milliseconds: prompt of {tokens}", bold=True)
    for row, name in enumerate(("proxy", "P", "D", "client")):
        svg.text(10, 54 + 36 * row, name)
    for mark in range(6):
        x = left + scale * end * mark / 5
        svg.line(x, 36, x, 180, GRID)
        svg.text(x, 196, f"{1e3 * end * mark / 5:.0f}", anchor="middle")
    for name, _, began, ended in found["parts"]:
        y, width = 40 + 36 * ROWS[name], max(scale * (ended - began), 1.5)
        svg.bar(left + scale * began, y, width, 18, SHADES.get(name, COLORS[-1]))
        if width > 130:
            svg.text(left + scale * began + 6, y + 13, MEANINGS[name])
    for at in found["client"]:
        svg.line(left + scale * at, 148, left + scale * at, 166)
    return svg


PANELS = ("memory, MiB", "descriptors", "threads", "milliseconds in five minutes")
SOAK_COLORS = (*COLORS[:2], "#b5a33c", COLORS[2], "#7d4fb5")
SETTLES = 1800.0


def growth(points: Sequence[tuple[float, float]]) -> str:
    """Per hour by least squares without the first `SETTLES` seconds; "" of a short life."""
    late = [point for point in points if point[0] - points[0][0] >= SETTLES]
    if not late or late[-1][0] - late[0][0] < SETTLES:
        return ""
    return f", {3600 * linear_regression(*zip(*late, strict=True)).slope:+.2f} an hour"


def soak() -> Svg:
    """Memory, descriptors, threads and latency over time; a line for each life of a server, whose
    longest one gives the median and the growth."""
    text = (RESULTS / "soak.jsonl").read_text(encoding="utf-8")
    samples = [json.loads(line) for line in text.splitlines()]
    last, height, svg = samples[-1], 120, Svg(len(PANELS) * 170 + 24)
    end, answers = last["seconds"], ", ".join(f"{n:,} {of}" for of, n in last["requests"].items())
    svg.text(10, 18, f"{end / 3600:.1f} h, {last['faults']} faults; answers: {answers}", bold=True)
    for place, title in enumerate(PANELS):
        lives = defaultdict[tuple[str, int, int], list[tuple[float, float]]](list)
        for one in samples:
            for name, (start, *held) in one["processes"].items():
                if place < len(held) and held[0]:
                    lives[name, one["run"], start].append((one["seconds"], held[place]))
            for name in ("first_token_ms", "short_ms") if place == len(PANELS) - 1 else ():
                for of, value in zip(("median", "p99"), one[name], strict=False):
                    lives[f"{name[:-3]} {of}", one["run"], 0].append((one["seconds"], value))
        top, most = 50 + 170 * place, max(y for points in lives.values() for _, y in points)
        names = sorted({name for name, *_ in lives})
        svg.text(10, top - 8, f"{title}: up to {most:,.0f}")
        for mark in range(5):
            svg.line(10 + 120 * mark, top, 10 + 120 * mark, top + height, GRID)
            svg.text(10 + 120 * mark, top + height + 14, f"{mark * end / 14_400:.1f} h")
        for (name, *_), points in lives.items():
            steps = [(10 + 480 * x / end, top + height * (1 - y / most)) for x, y in points]
            svg.path(steps, SOAK_COLORS[names.index(name)])
        for row, name in enumerate(names):
            longest = max((points for (of, *_), points in lives.items() if of == name), key=len)
            svg.bar(510, top + 20 * row, 12, 12, SOAK_COLORS[row])
            middle = f": {median(y for _, y in longest):,.0f}"
            svg.text(528, top + 10 + 20 * row, name + middle + growth(longest) * (place < 3))
    return svg


def files() -> dict[Path, str]:
    """Each picture's file with the text that it should have."""
    drawn = (added_latency, goodput, kill_and_drain, one_request, soak)
    return {IMAGES / f"{draw.__name__}.svg": draw().whole() for draw in drawn}
