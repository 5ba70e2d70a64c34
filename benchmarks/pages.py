"""A benchmark's page in Markdown, and what it found in JSON beside it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def today() -> str:
    """The date, of UTC."""
    return datetime.now(UTC).date().isoformat()


def head(title: str, facts: Mapping[str, Any]) -> list[str]:
    """The lines of a heading and of what a run was made with."""
    return [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def write(folder: Path, name: str, found: Mapping[str, Any], lines: Sequence[str]) -> str:
    """NAME.json and NAME.md in a folder, which is made if need be; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = "\n".join([*lines, ""])
    (folder / f"{name}.md").write_text(text)
    return text
