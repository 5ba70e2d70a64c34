"""Each module and attribute of vLLM's that this package uses is a name of some part."""

import ast
import re
from pathlib import Path

import pytest

from vllm_commext.compat import parts
from vllm_commext.compat.monkey_patch import SYMBOLS

COMPAT = Path(parts.__file__).parent
# What a vLLM cannot be without, or whose absence is dealt with where it is looked for.
UNNAMED = {"vllm", "vllm.config", "vllm.distributed", "vllm.platforms", "vllm.sampling_params"}
# vLLM's own objects, as functions here call them.
OBJECTS = ("core", "scheduler", "request")
OPTIONAL = {"current_step", "defer_block_free"}  # looked for where they are read
NAMED = {symbol for part in parts.PARTS for symbol in part.sources}


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in ast.walk(node):
                inner.module = ""  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            found.add(node.module or "")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("vllm."):
                found.add(str(name.value))
    return found


@pytest.mark.parametrize("path", sorted(COMPAT.glob("*.py")), ids=lambda path: path.stem)
def test_every_module_of_vllms_that_is_imported_is_named(path: Path) -> None:
    known = {symbol.partition(":")[0] for symbol in NAMED | SYMBOLS}
    inside = {".".join(name.split(".")[:end]) for name in known | UNNAMED for end in range(1, 9)}
    assert imported(ast.parse(path.read_text())) - inside == set()


@pytest.mark.parametrize("name", ["engine_wait", "first_token", "resets"])
def test_every_attribute_that_is_read_is_named(name: str) -> None:
    tree = ast.parse((COMPAT / f"{name}.py").read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in OBJECTS
    }
    named = set(re.findall(r"\w+", " ".join(NAMED)))
    assert read - named - set(OBJECTS) - OPTIONAL == set()


def test_each_attribute_that_is_named_is_read_somewhere() -> None:
    """Else a vLLM without it would lose the part for nothing."""
    text = "".join(path.read_text() for path in COMPAT.parent.rglob("*.py"))
    attributes = {symbol.partition("@")[2] for symbol in NAMED if "@" in symbol}
    assert {name for name in attributes if not re.search(rf"\b{name}\b", text)} == set()
