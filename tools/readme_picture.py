"""The README's picture: milliseconds that disaggregation adds to one server's, as SVG made from a
result file of `benchmarks/handover.py`.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

ENGINES = {
    "vLLM's": ("vLLM's NixlConnector", "#d98c3f"),
    "ours": ("vllm_commext, asked alike", "#9cc3e0"),
    "ours, proxy, streamed": ("vllm_commext, its proxy", "#2f7fc1"),
}
PLAIN = "plain"
WIDTH, LEFT, SCALE, BAR, GAP = 760, 180, 500, 20, 14
STEP_MS = 50
STYLE = 'font-family="sans-serif" font-size="12" fill="#333"'
LINE = 'stroke="#333" stroke-width="1"'
GRID = 'stroke="#ddd" stroke-width="1"'


def added(
    rows: Sequence[Mapping[str, Any]], figure: str, tokens: int, engine: str
) -> tuple[float, float, float]:
    """What an engine's median, least and greatest round take more than one server's median, ms."""
    found = {(row["tokens"], row["engine"]): row for row in rows if row["at once"] == 1}
    one = found[tokens, PLAIN][figure]
    row = found[tokens, engine]
    rounds = [each[figure] for each in row["rounds"]]
    return row[figure] - one, min(rounds) - one, max(rounds) - one


def draw(
    rows: Sequence[Mapping[str, Any]],
    bars: Sequence[tuple[str, int, str]],
    about: Sequence[str],
) -> str:
    """Horizontal bars on one axis, with a whisker from the least to the greatest round.

    Args:
        rows: of the result file, one request at a time.
        bars: figure, prompt length in tokens and label of each group; a bar an engine.
        about: the lines below: hardware, versions, commit.
    """
    groups = [
        (label, [added(rows, figure, tokens, engine) for engine in ENGINES])
        for figure, tokens, label in bars
    ]
    most = max(top for _, found in groups for _, _, top in found)
    end = STEP_MS * -(-int(most + 1) // STEP_MS)
    unit = SCALE / end
    parts = [
        f'<text x="10" y="20" {STYLE} font-weight="bold">Milliseconds more than one server</text>'
    ]
    for x, (name, colour) in zip((10, 190, 400), ENGINES.values(), strict=True):
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="42" {STYLE}>{escape(name)}</text>')
    top = 58
    y = top + 6
    bottom = y + len(groups) * (BAR * len(ENGINES) + GAP)
    for tick in range(0, end + 1, STEP_MS):
        x = LEFT + tick * unit
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" {GRID}/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" {STYLE} text-anchor="middle">{tick}</text>'
        )
    for label, found in groups:
        middle = y + BAR * len(ENGINES) // 2 + 2
        parts.append(f'<text x="10" y="{middle}" {STYLE}>{escape(label)}</text>')
        for (_, colour), one in zip(ENGINES.values(), found, strict=True):
            parts += _bar(y, unit, colour, one)
            y += BAR
        y += GAP
    y = bottom + 40
    for text in about:
        parts.append(f'<text x="10" y="{y}" {STYLE} font-style="italic">{escape(text)}</text>')
        y += 16
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    back = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])


def _bar(y: float, unit: float, colour: str, found: tuple[float, float, float]) -> list[str]:
    """A bar with its whisker, and its value behind both."""
    value, least, most = found
    middle = y + (BAR - 4) / 2
    end, *whisker = (LEFT + each * unit for each in (value, least, most))

    def line(x1: float, y1: float, x2: float, y2: float) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {LINE}/>'

    return [
        f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 4}" fill="{colour}"/>',
        line(whisker[0], middle, whisker[1], middle),
        *(line(x, middle - 4, x, middle + 4) for x in whisker),
        f'<text x="{max(end, *whisker) + 8:.1f}" y="{middle + 4:.1f}" {STYLE}>+{value:.0f}</text>',
    ]
