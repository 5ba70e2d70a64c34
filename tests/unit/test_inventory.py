"""The inventory of patched names is complete: nothing of vLLM's is replaced in any other way."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_commext"
HELPER = PACKAGE / "compat" / "monkey_patch.py"
# The proxy reaches no vLLM, as import-linter sees to.
SOURCES = sorted({*PACKAGE.rglob("*.py")} - {HELPER, *PACKAGE.glob("proxy/**/*.py")})


# What a module has that replaces something of vLLM's: most have neither, and their trees are large.
MAY_REPLACE = re.compile(r"\b(?:import|from)\s+vllm\b|\b(?:set|del)attr\b")


def imported_from_vllm(tree: ast.AST) -> set[str]:
    """Names that a module binds to something of vLLM's, at its top or within functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_vllm = [alias for alias in node.names if alias.name.split(".")[0] == "vllm"]
            names |= {alias.asname or "vllm" for alias in of_vllm}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def base_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def replacements(text: str) -> Iterator[str]:
    """Where a module puts something into an object of vLLM's: assignments and ``setattr``."""
    if not MAY_REPLACE.search(text):
        return
    tree = ast.parse(text)
    of_vllm = imported_from_vllm(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield ast.unparse(node)
        for target in targets:
            if isinstance(target, ast.Attribute) and base_of(target) in of_vllm:
                yield ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_of_vllms_is_replaced_but_through_the_helper(path: Path) -> None:
    assert list(replacements(path.read_text(encoding="utf-8"))) == []
