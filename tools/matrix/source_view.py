"""Looks at a vLLM through its text: nothing of it is imported, so nothing of it need be installed.

For a probe's path the definition is found in the file (imports within vLLM are followed) and a
stand-in is made with the same names, parameters, fields and abstract methods, but no behaviour.
"""

import abc
import ast
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_commext.compat.api_probes import set_in

PACKAGE = "vllm"
# What a decorator does to how a name is looked up or called; all others are left out.
DECORATORS = {
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
    "abstractmethod": abc.abstractmethod,
    "cache": functools.cache,
    "lru_cache": functools.lru_cache,
}
DATACLASS_DECORATORS = ("dataclass", "config")


class Opaque:
    """What the text does not tell: the value of an expression."""


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of a body, with those under ``if``, ``try`` and ``with``, in their order."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(ast.iter_child_nodes(node))


def _bindings(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Each name that a body binds, with the first statement that does."""
    found: dict[str, ast.AST] = {}
    for node in _statements(body):
        for name in _names(node):
            found.setdefault(name, node)
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _last_name(decorator: ast.expr) -> str:
    """``lru_cache`` of ``@functools.lru_cache(maxsize=1)``."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).rpartition(".")[2]


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    """A function of the same parameters and with the same decorators, as far as they matter."""
    listed = node.args
    every = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, listed.vararg, listed.kwarg]
    for argument in filter(None, every):
        argument.annotation = None
    listed.defaults = [ast.Constant(None) for _ in listed.defaults]
    listed.kw_defaults = [item and ast.Constant(None) for item in listed.kw_defaults]
    stub = ast.parse(f"def {node.name}(): ...")
    stub.body[0] = ast.fix_missing_locations(
        ast.FunctionDef(node.name, listed, [ast.Pass()], [], lineno=1, col_offset=0)
    )
    namespace: dict[str, Any] = {}
    exec(compile(stub, node.name, "exec"), namespace)
    made = namespace[node.name]
    for decorator in reversed(node.decorator_list):
        made = DECORATORS.get(_last_name(decorator), lambda same: same)(made)
    return made


class SourceView:
    """The vLLM whose package folder lies in `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, dict[str, ast.AST]] = {}
        self._made: dict[tuple[str, str], Any] = {}

    def resolve(self, path: str) -> Any:
        """The stand-in for ``package.module:Class.name``.

        Raises:
            ModuleNotFoundError: there is no such file.
            AttributeError: the file does not define the name.
        """
        module, _, names = path.partition(":")
        first, *others = names.split(".")
        found = self._object(module, first)
        for name in others:
            found = getattr(found, name)
        return found

    def has_package(self, name: str) -> bool:
        """True: the text is there whatever this machine has."""
        return True

    def attributes_set(self, path: str) -> Collection[str]:
        """What the methods of the class at ``package.module:Class`` set."""
        module, _, name = path.partition(":")
        return set_in(self._module(module)[name])

    def _file(self, module: str) -> Path | None:
        base = self._root.joinpath(*module.split("."))
        return next(
            (p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None
        )

    def _module(self, name: str) -> dict[str, ast.AST]:
        if name not in self._modules:
            path = self._file(name)
            if path is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            self._modules[name] = _bindings(ast.parse(path.read_text(encoding="utf-8")).body)
        return self._modules[name]

    def _object(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._made:
            node = self._module(module).get(name)
            if node is None:
                raise AttributeError(f"module {module!r} has no attribute {name!r}")
            self._made[key] = self._stand_in(module, name, node)
        return self._made[key]

    def _stand_in(self, module: str, name: str, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _function(node)
        if isinstance(node, ast.ClassDef):
            return self._class(module, node)
        if isinstance(node, ast.ImportFrom):
            return self._imported(module, name, node)
        value = getattr(node, "value", None)
        return Opaque() if value is None else self._value(module, value)

    def _imported(self, module: str, name: str, node: ast.ImportFrom) -> Any:
        source = node.module or ""
        if node.level:
            path = self._file(module)
            is_package = path is not None and path.name == "__init__.py"
            parts = module.split(".")[
                : None if is_package and node.level == 1 else -node.level + is_package
            ]
            source = ".".join([*parts, *filter(None, [node.module])])
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        inside = source == PACKAGE or source.startswith(f"{PACKAGE}.")
        if not inside or self._file(f"{source}.{original}") is not None:
            return Opaque()
        return self._object(source, original)

    def _value(self, module: str, value: ast.expr) -> Any:
        """A dict with its callables, a constant, or the class of which an instance is made."""
        if isinstance(value, ast.Dict):
            keys = (getattr(key, "value", key) for key in value.keys)
            return dict(zip(keys, (self._item(item) for item in value.values), strict=False))
        if isinstance(value, ast.Constant):
            return value.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            value = value.func
        if isinstance(value, ast.Name) and value.id in self._module(module):
            return self._object(module, value.id)
        return Opaque()

    def _item(self, value: ast.expr) -> Any:
        return value.value if isinstance(value, ast.Constant) else lambda: None

    def _class(self, module: str, node: ast.ClassDef) -> type:
        known = self._module(module)
        names = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
        bases = [
            base
            for base in (self._object(module, name) for name in names)
            if isinstance(base, type)
        ]
        attributes: dict[str, Any] = {}
        fields: list[str] = []
        for name, statement in _bindings(node.body).items():
            if isinstance(statement, ast.AnnAssign):
                if "ClassVar" not in ast.unparse(statement.annotation):
                    fields.append(name)
                if statement.value is None:
                    continue
            attributes[name] = self._stand_in(module, name, statement)
        if any(_last_name(item) in DATACLASS_DECORATORS for item in node.decorator_list):
            attributes.update(dict.fromkeys(fields), __annotations__=dict.fromkeys(fields, object))
            return dataclasses.dataclass(abc.ABCMeta(node.name, tuple(bases), attributes))
        return abc.ABCMeta(node.name, tuple(bases), attributes)
