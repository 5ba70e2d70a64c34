"""Hold the budgets of `budgets.toml`: lines, files, words and options.

`make lint` runs this. Exit status 1 and one sentence for each budget that is exceeded."""

import argparse
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = {".py", ".c", ".cpp", ".h", ".cu"}
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")

Budgets = Mapping[str, Mapping[str, int]]


def lines(root: Path, folder: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in _code(root / folder))


def files(root: Path, folder: str) -> int:
    """Source files of a folder; every file of the results."""
    if folder == "benchmarks/results":
        return sum(path.is_file() for path in (root / folder).rglob("*"))
    return len([path for path in _code(root / folder) if path.suffix == ".py"])


def words(root: Path, folders: str) -> int:
    pages = [page for folder in folders.split(", ") for page in (root / folder).rglob("*.md")]
    pages += [root / name for name in PAGES if (root / name).exists()]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def options(_: Path, part: str) -> int:
    if part == "connector":
        from vllm_commext.nixl.config import KNOWN_KEYS

        return len(KNOWN_KEYS)
    from vllm_commext.cli.proxy import add_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return sum(action.help != argparse.SUPPRESS for action in parser._actions)


COUNTS = {"lines": lines, "files": files, "words": words, "options": options}


def _code(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in CODE]


def exceeded(budgets: Budgets, root: Path = ROOT) -> list[str]:
    """A sentence for each budget that its count exceeds."""
    counted = [
        (what, of, budget, COUNTS[what](root, of))
        for what, by_folder in budgets.items()
        for of, budget in by_folder.items()
    ]
    return [
        f"{of} has {count:,} {what}, its budget is {budget:,}: remove {count - budget:,}, or raise "
        "the number in tools/budgets.toml and say why in the commit"
        for what, of, budget, count in counted
        if count > budget
    ]


def main() -> int:
    sentences = exceeded(tomllib.loads((ROOT / "tools/budgets.toml").read_text()))
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
