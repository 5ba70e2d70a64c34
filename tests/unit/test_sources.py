"""Digests of vLLM's source, the table of them, and the canary, on a package that is only here."""

from pathlib import Path

import pytest

from vllm_commext.compat import fits, parts
from vllm_commext.compat.fits import NOT_THERE, SET, TESTED, digest
from vllm_commext.compat.parts import Part

TEXT = '''
"""A module."""
import os

if os.name:
    class Engine:
        """An engine."""

        limit: int = 5

        def step(self, count=1):
            """Take a step."""
            return f"{count:>3}"
'''


def write(folder: Path, text: str, name: str = "engine") -> Path:
    path = folder / "vllm" / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Take a step."""', '"""Do something else."""'),
        ('"""An engine."""', ""),
        ("return", "# quick\n            return"),
        ("count=1", "count = 1"),
        ("limit: int = 5", "limit: int = 6"),
    ],
)
def test_what_means_the_same_has_the_same_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in TEXT
    before = digest(write(tmp_path / "a", TEXT), "vllm.engine:Engine.step")
    after = digest(write(tmp_path / "b", TEXT.replace(old, new)), "vllm.engine:Engine.step")
    assert before == after != NOT_THERE


@pytest.mark.parametrize(("old", "new"), [("count=1", "count=2"), (":>3", ":<3"), ("step", "stop")])
def test_what_means_something_else_has_another(tmp_path: Path, old: str, new: str) -> None:
    symbol = "vllm.engine:Engine.step"
    before = digest(write(tmp_path / "a", TEXT), symbol)
    assert digest(write(tmp_path / "b", TEXT.replace(old, new)), symbol) != before


@pytest.mark.parametrize("symbol", ["vllm.gone:x", "vllm.engine:Gone", "vllm.engine:Engine.gone"])
def test_what_is_not_there_is_told_apart(tmp_path: Path, symbol: str) -> None:
    assert digest(write(tmp_path, TEXT), symbol) == NOT_THERE


def test_a_digest_is_always_this_one(tmp_path: Path) -> None:
    """Whichever Python reads it: the table that we ship is written by one and read by others."""
    root = write(tmp_path, TEXT)
    found = [digest(root, f"vllm.engine:{name}") for name in ("Engine.step", "Engine.limit")]
    assert found == ["966a0cf28a0e", "4a486d291f96"]


def test_an_attribute_is_there_where_a_method_sets_it(tmp_path: Path) -> None:
    text = TEXT.replace("return", "self.taken = count; print(self.limit); return")
    root = write(tmp_path, text)
    found = [digest(root, f"vllm.engine:Engine@{name}") for name in ("taken", "limit", "step")]
    assert found == [SET, NOT_THERE, NOT_THERE]


def test_the_table_has_every_name_of_every_part_in_every_release() -> None:
    known = parts.known_sources()
    assert list(known) == [part.name for part in parts.PARTS]
    for symbol, digests in (pair for of in known.values() for pair in of.items()):
        minors = " ".join(digests.values()).split()
        assert sorted(minors) == sorted(TESTED), symbol
        assert NOT_THERE not in digests, symbol


def test_the_nearest_release_is_named_and_the_functions_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path, TEXT)
    step, limit = "vllm.engine:Engine.step", "vllm.engine:Engine.limit"
    known = {
        step: {digest(root, step): "0.32 0.33"},
        limit: {digest(root, limit): "0.32", "x": "0.33"},
    }
    monkeypatch.setattr(parts, "known_sources", lambda: {"a part": known})
    part = Part("a part", "nixl")
    assert fits.compare(part, root) == ("0.32", [])
    assert fits.compare(part, tmp_path / "nowhere") == ("0.33", [step, limit])
