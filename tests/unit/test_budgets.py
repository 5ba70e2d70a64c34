"""`make lint` names what grew beyond its budget."""

from pathlib import Path

import budgets


def test_a_sentence_names_the_folder_the_budget_the_count_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/grown.py").write_text("a = 1\nb = 2\nc = 3\n")
    (tmp_path / "tools/notes.md").write_text("no code\n")
    (tmp_path / "README.md").write_text("five words stand in it\n")
    held = {"lines": {"tools": 3}, "files": {"tools": 1}, "words": {"tools": 7}}
    assert budgets.exceeded(held, tmp_path) == []
    assert budgets.exceeded({"lines": {"tools": 1}}, tmp_path) == [
        "tools has 3 lines, its budget is 1: remove 2, or raise the number in tools/budgets.toml "
        "and say why in the commit"
    ]


def test_options_of_the_proxy_and_of_the_connector_are_counted() -> None:
    for part in ("proxy", "connector"):
        (sentence,) = budgets.exceeded({"options": {part: 3}})
        assert sentence.startswith(f"{part} has ")
