"""Links lead to files and headings, and tests and attacks that a document names are there."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.documents import ROOT, documents, name_of

LINK = re.compile(
    r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)|^\[[\w .-]+\]: ([^#\s]+)#(\S+)$", re.M
)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SET = re.compile(r'<a id="([^"]+)"></a>')


def slug(heading: str) -> str:
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {slug(heading) for heading in HEADING.findall(text)} | set(SET.findall(text))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_what_a_document_links_to_and_names_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link, anchor, defined, of_defined in LINK.findall(text):
        name, wanted = link or defined, anchor or of_defined
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name}: {name} is not there"
        if wanted and target.suffix == ".md":
            assert wanted in anchors(target), f"{path.name}: {name}#{wanted} is not there"
    tests = re.findall(r"\btests/[\w/]+\.py\b", text)
    assert [name for name in tests if not (ROOT / name).is_file()] == []
