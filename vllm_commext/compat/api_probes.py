"""What an API check can be probed for: a name, a signature, abstract methods, fields.

A probe looks at what is really there and never at a version number. It is given a `View` to look
through: `INSTALLED` imports the installed vLLM; ``tools/api_matrix.py`` has one that reads the
text of a vLLM that is not installed.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from vllm_commext.compat.monkey_patch import original_at


class View(Protocol):
    """Where a probe looks."""

    def resolve(self, path: str) -> Any:
        """The object at ``package.module:Class.name``; raises whatever an import would."""
        ...

    def has_package(self, name: str) -> bool:
        """Whether code that imports this package can be used."""
        ...

    def class_text(self, path: str) -> ast.AST:
        """The parsed text of the class at ``package.module:Class``."""
        ...


class Installed:
    """The vLLM of this environment, imported; where we have patched a name, what was there."""

    def resolve(self, path: str) -> Any:
        module_name, _, names = path.partition(":")
        found: Any = importlib.import_module(module_name)
        for name in names.split("."):
            found = original_at(found, name, getattr(found, name))
        return found

    def has_package(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def class_text(self, path: str) -> ast.AST:
        return ast.parse(textwrap.dedent(inspect.getsource(self.resolve(path))))


INSTALLED = Installed()
Probe = Callable[[View], str]
"""Says what is wrong, or returns an empty string where all is well."""


def _call_parameters(function: Any) -> list[inspect.Parameter]:
    """Parameters as a caller of the method sees them, without ``self``."""
    parameters = list(inspect.signature(function).parameters.values())
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _differs(function: Any, wanted: tuple[str, ...]) -> str:
    """Why `function` cannot be called with exactly the `wanted` arguments, in that order."""
    parameters = _call_parameters(function)
    leading = tuple(parameter.name for parameter in parameters[: len(wanted)])
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        parameter.name
        for parameter in parameters[len(wanted) :]
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]
    if leading == wanted and not needed:
        return ""
    found = ", ".join(parameter.name for parameter in parameters)
    return f"expected parameters ({', '.join(wanted)}), found ({found})"


def takes(path: str, *wanted: str) -> Probe:
    """Probe: the function can be called with these arguments in this order and no others."""
    return lambda view: _differs(view.resolve(path), wanted)


def where_installed(package: str, probe: Probe) -> Probe:
    """Probe: another one, where the package that vLLM's code imports is installed; without it that
    code is not used."""
    return lambda view: probe(view) if view.has_package(package) else ""


def exists(*paths: str) -> Probe:
    """Probe: each of these names is there."""

    def probe(view: View) -> str:
        for path in paths:
            view.resolve(path)
        return ""

    return probe


def has_fields(path: str, *wanted: str) -> Probe:
    """Probe: the dataclass has these fields."""

    def probe(view: View) -> str:
        found = {field.name for field in dataclasses.fields(view.resolve(path))}
        missing = [name for name in wanted if name not in found]
        return f"expected fields {', '.join(missing)}, which are not there" if missing else ""

    return probe


def has_methods(path: str, methods: Mapping[str, tuple[str, ...]]) -> Probe:
    """Probe: the class has these methods, each of which takes these arguments."""

    def probe(view: View) -> str:
        cls = view.resolve(path)
        problems: list[str] = []
        for name, wanted in methods.items():
            method = original_at(cls, name, getattr(cls, name, None))
            problem = "it is not there" if method is None else _differs(method, wanted)
            if problem:
                problems.append(f"{name}: {problem}")
        return "; ".join(problems)

    return probe


def has_attributes(path: str, *wanted: str) -> Probe:
    """Probe: the methods of the class set these attributes of its instances."""

    def probe(view: View) -> str:
        set_here = {
            node.attr
            for node in ast.walk(view.class_text(path))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        missing = [name for name in wanted if name not in set_here]
        return f"expected attributes {', '.join(missing)}, which are set nowhere" if missing else ""

    return probe


def no_methods_beyond(path: str, known: Collection[str]) -> Probe:
    """Probe: the class has no public method besides these, which ours would lack."""

    def probe(view: View) -> str:
        public = {
            name
            for name, value in vars(view.resolve(path)).items()
            if not name.startswith("_") and not isinstance(value, type)
        }
        beyond = sorted(public - set(known))
        return f"expected no method beyond ours, found {', '.join(beyond)}" if beyond else ""

    return probe


def abstract_only(path: str, methods: Mapping[str, tuple[str, ...]]) -> Probe:
    """Probe: as `has_methods`, and the class has no abstract method beyond these."""

    def probe(view: View) -> str:
        beyond = sorted(view.resolve(path).__abstractmethods__ - set(methods))
        if beyond:
            return f"expected no abstract method beyond ours, found {', '.join(beyond)}"
        return has_methods(path, methods)(view)

    return probe


def maps_to_callables(path: str) -> Probe:
    """Probe: a mutable mapping of names to functions without parameters."""

    def probe(view: View) -> str:
        table = view.resolve(path)
        if not isinstance(table, dict):
            return f"expected a dict, found {type(table).__name__}"
        wrong = [name for name, getter in table.items() if not callable(getter)]
        return f"expected only callables, {wrong[0]} is none" if wrong else ""

    return probe
