"""The window of vLLM versions, the only place where a version number is compared.

What a number does not say, `evidence` looks up. It is read from ``vllm.__version__``: the
distribution is not always called ``vllm``.
"""

from collections.abc import Collection
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from vllm_commext.errors import UntestedError


@dataclass(frozen=True)
class Release:
    """One minor release of vLLM in the window.

    Attributes:
        minor: its first two numbers, such as ``0.32``.
        apis: every API check passes on it, imported or as text (``make matrix``).
        contract: the contract tests, which need no model, are run on it.
        servers: servers that move KV cache are run on it.
        gpus: the GPU tests are run on it.
    """

    minor: str
    apis: bool
    contract: bool
    servers: bool
    gpus: bool = False


WINDOW: tuple[Release, ...] = (
    Release("0.28", apis=True, contract=True, servers=False),
    Release("0.29", apis=True, contract=False, servers=False),
    Release("0.30", apis=True, contract=True, servers=True),
    Release("0.31", apis=True, contract=False, servers=False),
    Release("0.32", apis=True, contract=True, servers=True, gpus=True),
    Release("0.33", apis=True, contract=True, servers=True, gpus=True),
)
OLDEST = WINDOW[0].minor
NEWEST = WINDOW[-1].minor


def parse_minor(version: str) -> tuple[int, int] | None:
    """First two numbers of a version's base release; None where it is no version."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return None
    return (release[0], release[1] if len(release) > 1 else 0)


def _minor_of(row: Release) -> tuple[int, int]:
    major, minor = row.minor.split(".")
    return int(major), int(minor)


def refuse_older(version: str) -> None:
    """Refuse what is older than the window: it lacks APIs that everything here relies on.

    Raises:
        UntestedError: it is.
    """
    minor = parse_minor(version)
    if minor is not None and minor < _minor_of(WINDOW[0]):
        raise UntestedError(f"vLLM {version} is older than the window {OLDEST} to {NEWEST}")


def is_release_of(version: str, minors: Collection[str]) -> bool:
    """Whether it is the first release of one of these minors, whatever its local label: that is
    what tests are run on."""
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return any(Version(found.public) == Version(f"{minor}.0") for minor in minors)


def is_in_window(version: str) -> bool:
    """Whether its minor release is one of the window's."""
    minor = parse_minor(version)
    return any(_minor_of(row) == minor for row in WINDOW)


def cache_meaning(version: str) -> str:
    """What vLLM means by the bytes of a KV cache whose model, types and layout are given: engines
    of two versions with the same answer can read one another's.

    All of the window mean the same (``make mixed`` reads between those that have a CPU build). What
    is not in the window may have changed it, and is alike only with its own minor release.
    """
    minor = parse_minor(version)
    if minor is None:
        return version
    return "1" if is_in_window(version) else f"{minor[0]}.{minor[1]}"


def is_at_least(version: str, minor: str) -> bool:
    """Whether `version` is that minor release or a later one; an unreadable version is new."""
    found, wanted = parse_minor(version), parse_minor(minor)
    return found is None or wanted is None or found >= wanted
