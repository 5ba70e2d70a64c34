"""Tests and attacks that a document names are there."""

import re
from pathlib import Path

import pytest

from tests.attack.__main__ import ATTACKS
from tests.attack.refused import NAME

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SURFACES = ROOT / "docs" / "ports_and_security.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_test_files_exist(document: Path) -> None:
    named = re.findall(r"\btests/[\w/]+\.py\b", document.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


def table(head: str) -> list[list[str]]:
    """The cells of the rows below *head*."""
    _, _, rest = SURFACES.read_text().partition(f"{head}\n|---")
    rows = rest.partition("\n\n")[0].splitlines()[1:]
    return [row.strip("| ").split(" | ") for row in rows]


def test_each_bound_of_the_side_channel_has_a_test() -> None:
    rows = table("| what | bound | beyond it | test |")
    attacks = {attack.name for attack in ATTACKS}
    assert rows
    for row in rows:
        named = re.findall(r"`([^`]+)`", row[-1])
        assert named
        assert all(name in attacks or (ROOT / name).is_file() for name in named)


def test_each_attack_has_a_surface() -> None:
    rows = [*table("| surface | tests | attacks |"), *table("| what | bound | beyond it | test |")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row[-1])}
    attacks = {attack.name.removesuffix("_secret") for attack in ATTACKS} | {NAME}
    assert attacks <= named
