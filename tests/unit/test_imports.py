"""Who imports whom: no circle in the package, and in the queue nothing of vLLM's."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_commext"


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found: dict[str, Path] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("vllm_commext", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def at_import(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """What is imported with the module: neither in functions nor for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from at_import(node)


def imported(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Modules that this one imports, those of the package by their full names."""
    found: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in at_import(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        parents = package.split(".")[: len(package.split(".")) - (node.level - 1)]
        base = ".".join([*(parents if node.level else []), *([node.module] if node.module else [])])
        names = {f"{base}.{alias.name}" for alias in node.names}
        found |= {one if one in known else base for one in names}
    return found - {name}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(name, path, known) & set(known) for name, path in known.items()}


def test_the_package_has_no_circle_of_imports() -> None:
    assert circle(graph()) == []


def test_a_circle_is_found() -> None:
    changed = graph()
    changed["vllm_commext.shm.handle"].add("vllm_commext.shm.queue")
    assert {"vllm_commext.shm.handle", "vllm_commext.shm.queue"} <= set(circle(changed))


@pytest.mark.parametrize("name", sorted(name for name in modules() if ".shm" in name))
def test_the_queue_imports_nothing_of_vllms(name: str) -> None:
    """Nowhere, not in a function either: what only vLLM knows is given by vllm_commext.compat."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [one for one in names if one.split(".")[0] == "vllm"]
