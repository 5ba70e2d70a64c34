"""Digests of vLLM's own source, which tell whether a function is the one that was tested.

Of a definition's syntax alone: without docstrings, comments and positions, and the same whichever
Python reads it. Nothing of vLLM's is imported for it.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NOT_THERE = ""
"""Digest of what is not there."""
_LEFT_OUT = ("type_comment", "type_params", "kind")  # newer Pythons tell more of the same text


def _without_docstring(body: list[Any]) -> list[Any]:
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return body[1:] if is_text else body


def _form(node: Any) -> Any:
    if isinstance(node, list):
        return [_form(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        fields["body"] = _without_docstring(node.body)
    kept = sorted(name for name, value in fields.items() if value not in (None, []))
    return type(node).__name__, [
        (name, _form(fields[name])) for name in kept if name not in _LEFT_OUT
    ]


def _bound(body: Iterable[ast.AST], name: str) -> ast.AST | None:
    """The statement of a body that binds a name last, also under ``if`` and ``try``."""
    found = None
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found = node if node.name == name else found
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_bound = any(isinstance(each, ast.Name) and each.id == name for each in targets)
            found = node if is_bound else found
        elif isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
            found = _bound(ast.iter_child_nodes(node), name) or found
    return found


@functools.lru_cache(maxsize=4)
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def digest(root: Path, symbol: str) -> str:
    """Of the definition of ``package.module:Class.name``, or `NOT_THERE`.

    Args:
        root: the folder in which the package lies.
        symbol: where it is defined, not where it is imported to.
    """
    module, _, names = symbol.partition(":")
    base = root.joinpath(*module.split("."))
    places = (base.with_suffix(".py"), base / "__init__.py")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return NOT_THERE
    node: Any = _module(path)
    for name in names.split("."):
        node = _bound(getattr(node, "body", ()), name)
        if node is None:
            return NOT_THERE
    return hashlib.sha256(repr(_form(node)).encode()).hexdigest()[:12]
