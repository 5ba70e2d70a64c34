"""Does a part of this package fit this vLLM? One answer for each part, the first that holds:

1. tested here: the tests of this release are run on this vLLM;
2. same source: the functions of vLLM's that the part depends on read as in a tested release;
3. self-tested: some read otherwise, none is gone, and the part's own test passes here;
4. otherwise vLLM's own stays in its place, with the reason.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import logging
import platform
from collections.abc import Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from vllm_commext.compat import hooks
from vllm_commext.compat.parts import BY_NAME, IN_USE, PARTS, Part
from vllm_commext.errors import (
    CommextError,
    OtherPlatformError,
    UnprovenHereError,
    UnsupportedError,
    UntestedError,
)
from vllm_commext.settings import UNTESTED, read_settings

TESTED = ("0.32", "0.33")
"""Minor releases of vLLM whose first release all tests are run on, on CPUs and on GPUs."""
OLDEST, NEWEST = TESTED[0], TESTED[-1]
DIFFERENCES = (CommextError, ImportError, AttributeError, TypeError, NotImplementedError)
"""Errors of a vLLM that differs, on all ranks alike: an optional part then leaves it alone."""
NOT_THERE = ""
"""Digest of a name that is not there."""
SET = "set"
"""Digest of an attribute that some method of its class sets."""
RING = "vllm_commext.shm._shm_ring"
PROVEN_MACHINES = ("x86_64", "aarch64")
_LEFT_OUT = ("type_comment", "type_params", "kind")  # newer Pythons tell more of the same text


class Verdict(StrEnum):
    """The module's docstring has them; DIFFERS: its test is still to be passed."""

    TESTED = "tested"
    SAME = "same source"
    DIFFERS = "self-tested"
    OFF = "off"


_MEANINGS = {
    Verdict.SAME: "same source as in one that was tested",
    Verdict.DIFFERS: "self-tested where they are used, as functions differ",
    Verdict.OFF: "off",
}


class Fit(NamedTuple):
    verdict: Verdict
    reason: str  # the release or the functions behind it


# Version numbers.


def _minor_of(version: str) -> tuple[int, int] | None:
    try:
        release = Version(version).release
    except InvalidVersion:
        return None
    return (release[0], release[1] if len(release) > 1 else 0)


def refuse_older(version: str) -> None:
    """Raise UntestedError for a vLLM that is older than all that are supported."""
    minor, oldest = _minor_of(version), _minor_of(OLDEST)
    if minor is not None and oldest is not None and minor < oldest:
        raise UntestedError(f"vLLM {version} is older than the window {OLDEST} to {NEWEST}")


def is_tested(version: str) -> bool:
    """True for the first release of a tested minor, whatever its local label."""
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return any(Version(found.public) == Version(f"{minor}.0") for minor in TESTED)


def cache_meaning(version: str) -> str:
    """Name the meaning of a KV cache's bytes, given model, types and layout: engines of two
    versions with the same answer can read one another's.

    All tested releases mean the same (``make mixed`` reads between them). Others may have changed
    it, and are alike only with their own minor release."""
    minor = _minor_of(version)
    if minor is None:
        return version
    return "1" if minor in map(_minor_of, TESTED) else f"{minor[0]}.{minor[1]}"


# Digests of source.


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


def definition(root: Path, symbol: str) -> Any:
    """Syntax tree of ``package.module:Class.name`` below a folder; None where it is not there."""
    module, _, names = symbol.partition(":")
    base = root.joinpath(*module.split("."))
    places = (base.with_suffix(".py"), base / "__init__.py")
    path = next((place for place in places if place.is_file()), None)
    node: Any = path and _module(path)
    for name in names.split("."):
        node = _bound(getattr(node, "body", ()), name)
    return node


@functools.cache
def _attributes(root: Path, symbol: str) -> frozenset[str]:
    """Names of the attributes that the methods of a class set."""
    found = definition(root, symbol)
    nodes = ast.walk(found) if found is not None else ()
    return frozenset(
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )


@functools.cache
def digest(root: Path, symbol: str) -> str:
    """Digest of the syntax of ``package.module:Class.name`` where it is defined below a folder, or
    `NOT_THERE`; `SET` of an attribute of instances, ``package.module:Class@name``, that some method
    sets.

    Docstrings, comments and positions do not count, it is the same whichever Python reads it, and
    nothing of vLLM's is imported for it."""
    owner, _, attribute = symbol.partition("@")
    if attribute:
        return SET if attribute in _attributes(root, owner) else NOT_THERE
    node = definition(root, symbol)
    if node is None:
        return NOT_THERE
    return hashlib.sha256(repr(_form(node)).encode()).hexdigest()[:12]


def vllm_root() -> Path:
    """Folder in which the installed vLLM's package lies; UnsupportedError where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UnsupportedError("vLLM is not installed")
    return Path(spec.origin).parent.parent


def compare(part: Part, root: Path) -> tuple[str, list[str]]:
    """The tested release whose source is nearest, and the symbols that differ from it; of equally
    near ones the newest."""
    found = {
        symbol: known.get(digest(root, symbol), "").split()
        for symbol, known in part.sources.items()
    }
    differing = {
        minor: [symbol for symbol, minors in found.items() if minor not in minors]
        for minor in reversed(TESTED)
    }
    nearest = min(differing, key=lambda minor: len(differing[minor]))
    return nearest, differing[nearest]


def short(symbol: str) -> str:
    """``Class.name`` of ``package.module:Class.name``."""
    return symbol.partition(":")[2].replace("@", ".")


# The answer.


def find(name: str) -> Fit:
    """Weigh what speaks for a part, without its own test.

    Raises:
        UnsupportedError: there is no vLLM, or it is older than all that are supported.
    """
    version = hooks.vllm_version()
    refuse_older(version)
    if is_tested(version):
        return Fit(Verdict.TESTED, f"vLLM {version}")
    if gone := why_gone(name):
        return Fit(Verdict.OFF, gone)
    nearest, differing = compare(BY_NAME[name], vllm_root())
    listed = ", ".join(map(short, differing))
    verdict, reason = Verdict.SAME, f"as in vLLM {nearest}"
    if differing:
        verdict, reason = Verdict.DIFFERS, f"{listed} not as in vLLM {nearest}"
    choice = read_settings()["untested"]
    if choice == "off" or (choice == "same" and differing):
        return Fit(Verdict.OFF, f"{reason}; {UNTESTED}={choice}")
    if differing and not BY_NAME[name].self_test:
        return Fit(Verdict.OFF, f"{reason}, and it has no test of its own")
    return Fit(verdict, reason)


def why_gone(name: str) -> str:
    """The names that a part depends on and this vLLM has no more; empty where all are there."""
    version = hooks.vllm_version()
    if is_tested(version):
        return ""
    root = vllm_root()
    gone = [each for each in BY_NAME[name].sources if digest(root, each) == NOT_THERE]
    return f"vLLM {version} has no {', '.join(map(short, gone))}" if gone else ""


def admit(name: str) -> str:
    """Let a part in, and return a remark for the log, empty where the part is tested; or raise
    UnsupportedError, which says why it is not to run on this vLLM."""
    verdict, reason = find(name)
    if verdict is Verdict.OFF:
        raise UntestedError(reason)
    if verdict is Verdict.DIFFERS and BY_NAME[name].self_test != IN_USE:
        _run(BY_NAME[name], reason)
    return "" if verdict is Verdict.TESTED else f"{verdict.value}: {reason}"


def _run(part: Part, differs: str) -> None:
    try:
        getattr(importlib.import_module("vllm_commext.compat.self_tests"), part.self_test)()
    except Exception as error:
        raise UntestedError(
            f"{differs}, and its test fails: {type(error).__name__}: {error}"
        ) from error


def must_test_itself(name: str) -> bool:
    """True for an admitted part that has to test itself where it is used."""
    return find(name).verdict is Verdict.DIFFERS


def why_not(name: str) -> str:
    """Reason why a part is not let in; empty where it is."""
    try:
        admit(name)
    except UnsupportedError as error:
        return str(error)
    return ""


def level_of(error: Exception) -> int:
    """Log level of the line that a part is left out: where no test was run on this vLLM, the
    server's first process has warned already, but not of a self-test that fails."""
    is_told = isinstance(error, UntestedError) and error.__cause__ is None
    return logging.INFO if is_told else logging.WARNING


def summary(capabilities: Collection[str]) -> tuple[str, int]:
    """Line about a vLLM that no test was run on, and its log level; empty where one was."""
    try:
        found = {part.name: find(part.name) for part in PARTS if part.of in capabilities}
    except UnsupportedError:
        return "", logging.NOTSET
    if all(each.verdict is Verdict.TESTED for each in found.values()):
        return "", logging.NOTSET
    groups = {verdict: list[str]() for verdict in _MEANINGS}
    for name, (verdict, reason) in found.items():
        groups[verdict].append(name if verdict is Verdict.SAME else f"{name} ({reason})")
    listed = [f"{_MEANINGS[one]}: {', '.join(names)}" for one, names in groups.items() if names]
    line = "; ".join([f"commext: no test was run on vLLM {hooks.vllm_version()}", *listed])
    is_fine = not groups[Verdict.DIFFERS] and not groups[Verdict.OFF]
    return line, logging.INFO if is_fine else logging.WARNING


# The machines that `auto` stands for.


def require_extension() -> None:
    """Raise UnsupportedError, which says what to install, without the native extension."""
    try:
        importlib.import_module(RING)
    except ImportError as error:
        raise UnsupportedError(
            f"the native extension {RING} cannot be imported ({error}); "
            "install a wheel of vllm-commext, or build it with a C compiler at hand"
        ) from error


def require_proven_machine() -> None:
    """Raise UnprovenHereError where the native ring is not proven: it is on a vLLM for CPUs, a
    processor that the ring is tested on, and with its extension built."""
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


def require_proven_gpus() -> None:
    """Raise UnprovenHereError where kernels are not proven: on other GPUs than NVIDIA's.  The rest
    is seen when a group of ranks is made."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise OtherPlatformError(
            f"needs NVIDIA GPUs, this vLLM is built for {current_platform.device_name}"
        )
