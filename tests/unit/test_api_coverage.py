"""What this package takes of vLLM's stands in the table of API checks or among the sources that a
part depends on, and what stands there is looked for."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.compat import api_checks, api_connector, parts
from vllm_commext.compat.api_checks import API_CHECKS
from vllm_commext.compat.monkey_patch import INVENTORY

COMPAT = Path(api_checks.__file__).parent
TABLES = (Path(api_checks.__file__), Path(api_connector.__file__))
# What a vLLM cannot be without, or whose absence is dealt with where it is looked for.
UNCHECKED = {
    "vllm",
    "vllm.config",
    "vllm.distributed",
    "vllm.platforms",
    "vllm.sampling_params",
}
# vLLM's own objects, as functions here call them.
OBJECTS = ("core", "scheduler", "request")
OPTIONAL = {"current_step", "defer_block_free"}  # looked for where they are read
SOURCES = sorted(path for path in COMPAT.glob("*.py") if path.name != "executor.py")


class Recorder:
    """A view that notes where probes look and finds nothing there."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def resolve(self, path: str) -> Any:
        self.modules.add(path.partition(":")[0])
        return object()

    attributes_set = resolve

    def has_package(self, name: str) -> bool:
        return True


def looked_at() -> set[str]:
    recorder = Recorder()
    for api in API_CHECKS:
        try:
            api.probe(recorder)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, AttributeError):
            continue
    named = {*(symbol for part in parts.PARTS for symbol in part.sources)}
    named |= {row.symbol for row in INVENTORY}
    return recorder.modules | {symbol.partition(":")[0] for symbol in named}


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_module_of_vllms_that_is_imported_is_looked_at(path: Path) -> None:
    known = looked_at() | UNCHECKED
    inside = {".".join(name.split(".")[:end]) for name in known for end in range(2, 9)}
    assert imported(ast.parse(path.read_text())) - inside == set()


@pytest.mark.parametrize("name", ["engine_wait", "first_token", "resets"])
def test_every_attribute_that_is_read_is_looked_for(name: str) -> None:
    tree = ast.parse((COMPAT / f"{name}.py").read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in OBJECTS
    }
    table = "".join(path.read_text() for path in TABLES)
    named = set(re.findall(r"\w+", table))
    assert read - named - set(OBJECTS) - OPTIONAL == set()


def test_what_is_looked_for_by_an_attribute_is_read_somewhere() -> None:
    """Else a check would refuse a vLLM for nothing."""
    text = "".join(path.read_text() for path in COMPAT.parent.rglob("*.py") if path not in TABLES)
    wanted: set[str] = set()
    for node in (node for table in TABLES for node in ast.walk(ast.parse(table.read_text()))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "has_attributes":
            named = [each for argument in node.args[1:] for each in ast.walk(argument)]
            wanted |= {str(each.value) for each in named if isinstance(each, ast.Constant)}
    assert {name for name in wanted if not re.search(rf"\b{name}\b", text)} == set()
