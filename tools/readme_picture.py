"""The README's picture: first token and time per output token beside vLLM, as SVG made from a
result file of `benchmarks/handover.py`.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

ENGINES = {
    "plain": ("one vLLM server, no hand-over", "#9aa5b1"),
    "vLLM's": ("prefill and decode, vLLM's NixlConnector", "#d98c3f"),
    "ours, proxy, streamed": ("prefill and decode, vllm_commext", "#2f7fc1"),
}
WIDTH, LABEL, BAR_SPACE, GAP, BAR = 760, 112, 500, 14, 16
STYLE = 'font-family="sans-serif" font-size="12" fill="#333"'


def draw(rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], about: Sequence[str]) -> str:
    """Horizontal bars: a panel a figure, a group a prompt length, a bar an engine.

    Args:
        rows: of the result file, one request at a time.
        lengths: the prompt lengths to show, tokens.
        about: the lines below: hardware, versions, commit.
    """
    found = {(row["tokens"], row["engine"]): row for row in rows if row["at once"] == 1}
    parts: list[str] = []
    y = 20
    for x, (engine, (label, colour)) in zip((10, 230, 500), ENGINES.items(), strict=True):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}" {STYLE}>{escape(label)}</text>')
        assert (lengths[0], engine) in found, f"no row of {engine} in the result file"
    y += 26
    for figure, title in (
        ("first token", "Time to first token, ms, one request"),
        ("TPOT", "Time per output token, ms"),
    ):
        parts.append(f'<text x="10" y="{y}" {STYLE} font-weight="bold">{title}</text>')
        y += 10
        for length in lengths:
            most = max(found[length, engine][figure] for engine in ENGINES)
            middle = y + BAR * len(ENGINES) / 2 + 4
            parts.append(f'<text x="10" y="{middle:.0f}" {STYLE}>{length:,} tokens</text>')
            for engine, (_, colour) in ENGINES.items():
                value = found[length, engine][figure]
                width = BAR_SPACE * value / most
                parts.append(
                    f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR - 3}" '
                    f'fill="{colour}"/>'
                )
                shown = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
                parts.append(
                    f'<text x="{LABEL + width + 6:.1f}" y="{y + BAR - 5}" {STYLE}>{shown}</text>'
                )
                y += BAR
            y += GAP
        y += 14
    for text in about:
        parts.append(f'<text x="10" y="{y}" {STYLE} font-style="italic">{escape(text)}</text>')
        y += BAR
    height = y - BAR + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">'
    )
    back = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])
