"""Tokens a second of a GPU against those of a user, as SVG.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#9aa5b1", "#d98c3f", "#2f7fc1", "#5aa469", "#a05195", "#c1432f", "#7a6a4f", "#222222")
WIDTH, PANEL, LEFT, TOP, LINE = 760, 260, 60, 30, 16
STYLE = 'font-family="sans-serif" font-size="12" fill="#333"'
Points = Mapping[str, Sequence[tuple[float, float]]]
"""Of each way, (tokens/s a user, tokens/s a GPU) in the order of rates."""


def points_of(rows: Sequence[Mapping[str, Any]], workload: str) -> dict[str, list[Any]]:
    """A user's rate is one over the median time per output token."""
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        if row["workload"] == workload and row["tpot"][0] > 0:
            point = (1 / row["tpot"][0], row["tokens/s a GPU"])
            found.setdefault(row["way"], []).append(point)
    return found


def draw(rows: Sequence[Mapping[str, Any]], about: Sequence[str]) -> str:
    """A panel a workload, a line a way, a dot a rate; up and to the right is better."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    colours = {way: COLOURS[place % len(COLOURS)] for place, way in enumerate(ways)}
    parts: list[str] = []
    y = 20
    for way, colour in colours.items():
        parts.append(f'<rect x="10" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(28, y, way))
        y += LINE
    for workload in dict.fromkeys(row["workload"] for row in rows):
        parts += _panel(workload, points_of(rows, workload), colours, y + TOP)
        y += TOP + PANEL + 3 * LINE
    for text in about:
        y += LINE
        parts.append(_text(10, y, text, "italic"))
    height = y + LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">'
    )
    back = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {STYLE} font-style="{style}">{escape(text)}</text>'


def _panel(title: str, points: Points, colours: Mapping[str, str], top: float) -> list[str]:
    every = [point for of in points.values() for point in of]
    most_x = 1.1 * max((x for x, _ in every), default=1.0)
    most_y = 1.1 * max((y for _, y in every), default=1.0)
    bottom, width = top + PANEL, WIDTH - LEFT - 30

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + width * point[0] / most_x, bottom - PANEL * point[1] / most_y

    axes = f"M{LEFT},{top} L{LEFT},{bottom} L{LEFT + width},{bottom}"
    parts = [
        _text(10, top - 8, f"{title}: tokens/s of a GPU against tokens/s of a user (median)"),
        f'<path d="{axes}" fill="none" stroke="#333"/>',
    ]
    for step in range(1, 5):
        x, y = place((most_x * step / 5, most_y * step / 5))
        parts += [
            _text(x - 10, bottom + LINE, f"{most_x * step / 5:.3g}"),
            _text(10, y + 4, f"{most_y * step / 5:,.0f}"),
        ]
    for way, of in points.items():
        placed = [place(point) for point in of]
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colours[way]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[way]}"/>' for x, y in placed
        ]
    return parts
