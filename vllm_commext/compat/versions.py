"""The window of vLLM versions, the only place where a version number is compared.

A version is judged by its base release, so builds between two releases and builds with a local
label (``0.32.0+cpu``) count as the release that they are named after. It is read from
``vllm.__version__``: the distribution is not always called ``vllm``.
"""

from dataclasses import dataclass
from enum import Enum

from packaging.version import InvalidVersion, Version


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
    Release("0.33", apis=True, contract=True, servers=False),
)
OLDEST = WINDOW[0].minor
NEWEST = WINDOW[-1].minor


class Verdict(str, Enum):
    """INSIDE: in the window and tested. UNVERIFIED: runs if API checks pass. OUTSIDE: refused."""

    INSIDE = "inside"
    UNVERIFIED = "unverified"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the sentence that explains it."""

    verdict: Verdict
    reason: str


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


def judge(version: str) -> Judgement:
    """Judge ``vllm.__version__``.

    What is older than the window lacks APIs that we rely on and is outside. What is newer may
    have kept them all, so the API checks decide, and the verdict says that nobody has
    tested it; so also for a version that cannot be read, as an untagged build has.
    """
    window = f"the window {OLDEST} to {NEWEST}"
    minor = parse_minor(version)
    if minor is None:
        return Judgement(Verdict.UNVERIFIED, f"vLLM {version!r} names no release of {window}")
    if minor < _minor_of(WINDOW[0]):
        return Judgement(Verdict.OUTSIDE, f"vLLM {version} is older than {window}")
    if minor > _minor_of(WINDOW[-1]):
        return Judgement(Verdict.UNVERIFIED, f"vLLM {version} is newer than {window}")
    row = next((row for row in WINDOW if _minor_of(row) == minor), None)
    if row is None or not row.contract:
        return Judgement(Verdict.UNVERIFIED, f"vLLM {version} is in {window} but not tested")
    return Judgement(Verdict.INSIDE, f"vLLM {version} is in {window} and tested")


def runs_gpu_tests(version: str) -> bool:
    """Whether the GPU tests are run on that version's release."""
    minor = parse_minor(version)
    return any(row.gpus and _minor_of(row) == minor for row in WINDOW)


def cache_meaning(version: str) -> str:
    """What vLLM means by the bytes of a KV cache whose model, types and layout are given: engines
    of two versions with the same answer can read one another's.

    All of the window mean the same (``make mixed`` reads between those that have a CPU build). What
    is not in the window may have changed it, and is alike only with its own minor release.
    """
    minor = parse_minor(version)
    if minor is None:
        return version
    return "1" if any(_minor_of(row) == minor for row in WINDOW) else f"{minor[0]}.{minor[1]}"


def is_at_least(version: str, minor: str) -> bool:
    """Whether `version` is that minor release or a later one; an unreadable version is new."""
    found, wanted = parse_minor(version), parse_minor(minor)
    return found is None or wanted is None or found >= wanted
