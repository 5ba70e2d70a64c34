"""What an API check is, and what it can be probed for: a name, a signature, methods, fields.

A probe looks at what is really there and never at a version number. It is given a `View` to look
through: `INSTALLED` imports the installed vLLM; ``tools/api_matrix.py`` has one that reads the
text of a vLLM that is not installed.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Protocol

from vllm_commext.compat.monkey_patch import original_at
from vllm_commext.compat.versions import OLDEST, is_at_least


class View(Protocol):
    """The vLLM that a probe looks at."""

    def resolve(self, path: str) -> Any:
        """The object at ``package.module:Class.name``; raises whatever an import would."""
        ...

    def has_package(self, name: str) -> bool:
        """Whether code that imports this package can be used."""
        ...

    def attributes_set(self, path: str) -> Collection[str]:
        """What the methods of the class at ``package.module:Class`` set."""
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

    def attributes_set(self, path: str) -> Collection[str]:
        return _set_by_class(self.resolve(path))


@cache
def _set_by_class(found: type) -> Collection[str]:
    text = "".join(linecache.getlines(inspect.getfile(found)))
    # As far as a line that begins with neither a blank, a bracket's end nor a comment: what is cut
    # short is no Python. `inspect` parses the whole file, which takes a tenth of a second for some.
    cut = re.search(rf"^class {found.__name__}\b.*?(?=^[^\s)\]}}#]|\Z)", text, re.M | re.S)
    with suppress(SyntaxError):
        if cut is not None:
            return set_in(ast.parse(cut[0]))
    return set_in(ast.parse(textwrap.dedent(inspect.getsource(found))))


def set_in(tree: ast.AST) -> Collection[str]:
    """The attributes that code sets, whatever they belong to."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


INSTALLED = Installed()
Probe = Callable[[View], str]
"""Says what is wrong, or returns an empty string where all is well."""
CheckRows = Mapping[str, Mapping[str, tuple[str, Probe, *tuple[str, ...]]]]
"""By part and name: `ApiCheck.why`, `ApiCheck.probe` and, but for the oldest, `ApiCheck.since`."""


@dataclass(frozen=True)
class ApiCheck:
    """One API of vLLM that we depend on.

    Attributes:
        name: short and unique; what the log and ``vllm-commext doctor`` print.
        capability: the part or capability that cannot run without it.
        why: what we use it for.
        probe: says what is wrong, or returns an empty string where all is well.
        since: first minor release that has it; we do without on an older one.
    """

    name: str
    capability: str
    why: str
    probe: Probe
    since: str = OLDEST


class CheckState(StrEnum):
    """HOLDS: as we expect it. NOT_YET: this vLLM is older than the API. BROKEN: it differs."""

    HOLDS = "holds"
    NOT_YET = "not yet"
    BROKEN = "broken"


@dataclass(frozen=True)
class CheckOutcome:
    """Result of one API check; `problem` is empty unless the API differs."""

    api: ApiCheck
    state: CheckState
    problem: str = ""


def guarded(probe: Probe, view: View = INSTALLED) -> str:
    """Run a probe, and take what it raises for its finding."""
    try:
        return probe(view)
    except Exception as error:  # noqa: BLE001 - what a foreign import raises is anybody's guess
        return f"{type(error).__name__}: {error}"


def check(api: ApiCheck, version: str, view: View = INSTALLED) -> CheckOutcome:
    """Probe one API check of the vLLM that calls itself `version`."""
    if not is_at_least(version, api.since):
        return CheckOutcome(api, CheckState.NOT_YET)
    problem = guarded(api.probe, view)
    return CheckOutcome(api, CheckState.BROKEN if problem else CheckState.HOLDS, problem)


def _call_parameters(function: Any) -> list[inspect.Parameter]:
    """Parameters as a caller of the method sees them, without ``self``."""
    parameters = list(inspect.signature(function).parameters.values())
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _differs(function: Any, wanted: tuple[str, ...]) -> str:
    """Reason why `function` cannot be called with exactly the `wanted` arguments, in that order."""
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
        set_here = view.attributes_set(path)
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
