"""What speaks for a part of this package on this vLLM, part by part and not by a version's number.

1. tested: this release's tests were run.
2. same source: what the part replaces, calls or is called by reads as in a tested release.
3. self-tested: something of it differs, the API checks hold, and the part's own test passes here.
4. off: a check or that test fails, or the user wants no untested vLLM.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_commext.compat import api_checks, hooks, versions
from vllm_commext.compat.parts import BY_NAME, IN_USE, PARTS, Part
from vllm_commext.errors import (
    CommextError,
    OtherPlatformError,
    UnprovenHereError,
    UnsupportedError,
    UntestedError,
)
from vllm_commext.settings import UNTESTED, read_settings

KNOWN_SOURCES = Path(__file__).with_name("known_sources.json")
DIFFERENCES = (CommextError, ImportError, AttributeError, TypeError, NotImplementedError)
"""What a vLLM that differs raises, on all ranks alike: an optional part then leaves it alone."""
Known = Mapping[str, Mapping[str, str]]
"""Symbol to digest to the minor releases, with blanks between, whose definition has it."""
NOT_THERE = ""
"""Digest of what is not there."""
RING = "vllm_commext.shm._shm_ring"
PROVEN_MACHINES = ("x86_64", "aarch64")
_LEFT_OUT = ("type_comment", "type_params", "kind")  # newer Pythons tell more of the same text


class Verdict(StrEnum):
    """See the module's docstring; DIFFERS: it is 3. or 4., as its test says."""

    TESTED = "tested"
    SAME = "same source"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Evidence:
    """Evidence for one part.

    Attributes:
        verdict: see `Verdict`.
        reason: which release it was tested with, or which functions differ from that.
    """

    verdict: Verdict
    reason: str


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
    """Digest of the syntax of ``package.module:Class.name``, or `NOT_THERE`.

    Docstrings, comments and positions do not count, it is the same whichever Python reads it, and
    nothing of vLLM's is imported for it.

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


@functools.cache
def known_sources() -> Known:
    return json.loads(KNOWN_SOURCES.read_text())


def _root() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UnsupportedError("vLLM is not installed")
    return Path(spec.origin).parent.parent


def compare(part: Part, root: Path, tested: Sequence[str]) -> tuple[str, list[str]]:
    """The tested release whose source is nearest, and the functions that differ from it.

    Args:
        part: which.
        root: where the vLLM lies.
        tested: minor releases, that which is preferred among equals last.
    """
    known = known_sources()
    found = {
        symbol: known.get(symbol, {}).get(digest(root, symbol), "").split()
        for symbol in part.sources
    }
    differing = {
        minor: [symbol for symbol, minors in found.items() if minor not in minors]
        for minor in reversed(tested)
    }
    nearest = min(differing, key=lambda minor: len(differing[minor]))
    return nearest, differing[nearest]


def short(symbol: str) -> str:
    """``Class.name`` of ``package.module:Class.name``."""
    return symbol.partition(":")[2]


def evidence_for(name: str, *, on_gpus: bool = False) -> Evidence:
    """Weigh the evidence for a part.

    Args:
        name: of the part.
        on_gpus: only releases count on which the GPU tests were run.

    Raises:
        UnsupportedError: there is no vLLM, or it is older than all that are supported.
    """
    version = hooks.vllm_version()
    versions.refuse_older(version)
    tested = [row.minor for row in versions.WINDOW if row.contract and (row.gpus or not on_gpus)]
    if versions.is_release_of(version, tested):
        return Evidence(Verdict.TESTED, f"vLLM {version}")
    nearest, differing = compare(BY_NAME[name], _root(), tested)
    if not differing:
        return Evidence(Verdict.SAME, f"as in vLLM {nearest}")
    listed = ", ".join(short(symbol) for symbol in differing)
    return Evidence(Verdict.DIFFERS, f"{listed} not as in vLLM {nearest}")


def why_broken(name: str) -> str:
    """Problems that the API checks of a part find; empty where there are none."""
    outcomes = api_checks.check_all(hooks.vllm_version(), name)
    return "; ".join(f"{each.api.name}: {each.problem}" for each in outcomes if each.problem)


def admit(name: str) -> str:
    """Let a part in, on whatever evidence there is.

    Returns:
        What is to be said of it; empty where it is tested.

    Raises:
        UnsupportedError: it is not to run on this vLLM, and why.
    """
    found = evidence_for(name)
    if broken := why_broken(name):
        kind = UnsupportedError if found.verdict is Verdict.TESTED else UntestedError
        raise kind(f"vLLM {hooks.vllm_version()} has an incompatible API: {broken}")
    if found.verdict is Verdict.TESTED:
        return ""
    choice = read_settings()["untested"]
    if choice == "off" or (choice == "same" and found.verdict is Verdict.DIFFERS):
        raise UntestedError(f"{found.verdict.value}: {found.reason}; {UNTESTED}={choice}")
    if found.verdict is Verdict.SAME:
        return f"same source: {found.reason}"
    if BY_NAME[name].self_test != IN_USE:
        _run(BY_NAME[name], found.reason)
    return f"self-tested: {found.reason}"


def level_of(error: Exception) -> int:
    """Log level of the line that a part is left out: where no test was run on this vLLM, the
    server's first process has warned already, but not of a part's own test that fails."""
    is_told = isinstance(error, UntestedError) and error.__cause__ is None
    return logging.INFO if is_told else logging.WARNING


def _run(part: Part, differs: str) -> None:
    if not part.self_test:
        raise UntestedError(f"{differs}, and it has no test of its own")
    module, _, function = part.self_test.partition(":")
    try:
        getattr(importlib.import_module(module), function)()
    except Exception as error:
        raise UntestedError(
            f"{differs}, and its test fails: {type(error).__name__}: {error}"
        ) from error


def summary(capabilities: Collection[str]) -> tuple[str, int]:
    """Line about a vLLM that no test was run on, and its log level; empty where one was."""
    try:
        found = {part.name: evidence_for(part.name) for part in PARTS if part.of in capabilities}
    except UnsupportedError:
        return "", logging.NOTSET
    if all(each.verdict is Verdict.TESTED for each in found.values()):
        return "", logging.NOTSET
    broken = {name: problem for name in found if (problem := why_broken(name))}
    differs = {
        name: each.reason
        for name, each in found.items()
        if each.verdict is Verdict.DIFFERS and name not in broken
    }
    same = [name for name in found if name not in broken and name not in differs]
    is_self = read_settings()["untested"] == "self"
    tried = {name: why for name, why in differs.items() if is_self and BY_NAME[name].self_test}
    left = {name: why for name, why in differs.items() if name not in tried}
    lines = [
        f"commext: no test was run on vLLM {hooks.vllm_version()}",
        *_listed("same source as in one that was tested", dict.fromkeys(same, "")),
        *_listed("self-tested where they are used, as functions differ", tried),
        *_listed("off", {**left, **broken}),
    ]
    return "; ".join(lines), logging.WARNING if differs or broken else logging.INFO


def _listed(what: str, parts: Mapping[str, str]) -> list[str]:
    named = ", ".join(f"{name} ({why})" if why else name for name, why in parts.items())
    return [f"{what}: {named}"] if named else []


def must_test_itself(name: str) -> bool:
    """Whether a part that has been let in has to try itself where it is used."""
    return evidence_for(name).verdict is Verdict.DIFFERS


def why_not(name: str) -> str:
    """Reason why a part is not let in; empty where it is."""
    try:
        admit(name)
    except UnsupportedError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def needing_the_extension() -> Iterator[None]:
    """Turn an ImportError inside into an UnsupportedError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"the native extension {RING} cannot be imported ({error}); "
            "install a wheel of vllm-commext, or build it with a C compiler at hand"
        ) from error


def require_proven_machine(capability: str) -> None:
    """Check for what the native ring's capabilities are proven on, and `auto` means for them: a
    vLLM for CPUs, on a processor that the ring is tested on, with its extension built.

    Raises:
        UnprovenHereError: with what it is that differs here.
    """
    del capability
    machine = platform.machine()
    if machine not in PROVEN_MACHINES:
        raise UnprovenHereError(f"proven on {', '.join(PROVEN_MACHINES)}, and this is {machine}")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise OtherPlatformError(
            f"proven with vLLM for CPUs, and this is for {current_platform.device_name}"
        )
    try:
        importlib.import_module(RING)
    except ImportError as error:
        raise UnprovenHereError(f"the native extension is not built ({error})") from error


def require_proven_gpus(capability: str) -> None:
    """Check for what the kernels are proven on, and `auto` means for them: NVIDIA GPUs, and no vLLM
    of which we know that it differs from those on which the GPU tests are run. What more it takes
    is seen when a group of ranks is made.

    Raises:
        UnprovenHereError: with what it is that differs here.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise OtherPlatformError(
            f"proven on NVIDIA GPUs, and this vLLM is for {current_platform.device_name}"
        )
    version = hooks.vllm_version()
    found = evidence_for(capability, on_gpus=True)
    if found.verdict is Verdict.DIFFERS and versions.is_in_window(version):
        raise UnprovenHereError(f"the GPU tests are not run on vLLM {version}: {found.reason}")
