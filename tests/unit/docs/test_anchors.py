"""Links with an anchor lead to a heading, or to an anchor that is set, in the page they name."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.document_commands import ROOT, documents

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)|^\[[\w .-]+\]: ([^#\s]+)#(\S+)$", re.M)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SET = re.compile(r'<a id="([^"]+)"></a>')


def slug(heading: str) -> str:
    """What GitHub makes of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {slug(heading) for heading in HEADING.findall(text)} | set(SET.findall(text))


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_anchors_are_there(path: Path) -> None:
    for link, anchor, defined, of_defined in LINK.findall(path.read_text(encoding="utf-8")):
        name, wanted = link or defined, anchor or of_defined
        target = (path.parent / name).resolve() if name else path
        if target.suffix == ".md":
            assert wanted in anchors(target), f"{path.name}: {name}#{wanted} is not there"


def test_a_heading_is_named_as_on_github() -> None:
    assert slug("From vLLM's `NixlConnector`, and [back](x.md)") == (
        "from-vllms-nixlconnector-and-back"
    )
