"""What must and must not be in a wheel and an sdist."""

import re
import tarfile
import zipfile
from pathlib import Path

from .build import Artefacts

PACKAGE = "vllm_commext"
# Made by the build, so in the wheel and not in the sdist.
BUILT = {f"{PACKAGE}/shm/_shm_ring.abi3.so", f"{PACKAGE}/shm/_native_build.json"}
WHEEL_TAGS = re.compile(r"-cp310-abi3-(?:manylinux[0-9a-z_]+\.?)+\.whl$")
ENTRY_POINTS = ("commext = vllm_commext.plugin:register", "vllm-commext = ")
SDIST_NEEDS = {
    *("setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("SECURITY.md", "Makefile", "csrc/shm/ring.c", "tests/conftest.py", "tools/cpu_env.py"),
    *("deploy/Dockerfile", "docs/architecture.md", "examples/1p1d/run.sh"),
}


def wheel_names(wheel: Path) -> set[str]:
    """Files, without the entries that auditwheel makes for folders."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sdist_names(sdist: Path) -> set[str]:
    """Files, relative to the archive's one folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def problems_of_names(in_wheel: set[str], in_sdist: set[str]) -> list[str]:
    """What is missing from either, and what is in the wheel and should not be."""
    expected = {name for name in in_sdist if name.startswith(f"{PACKAGE}/")} | BUILT
    expected |= {f"{PACKAGE}/{name}" for name in in_sdist if name.startswith("csrc/cuda/")}
    packaged = {name for name in in_wheel if ".dist-info/" not in name}
    found = [f"the wheel lacks {name}" for name in sorted(expected - packaged)]
    found += [f"the wheel has {name}, which is not ours" for name in sorted(packaged - expected)]
    found += [f"the sdist lacks {name}" for name in sorted(SDIST_NEEDS - in_sdist)]
    found += [f"the sdist has {name}" for name in sorted(in_sdist) if name.endswith((".so", ".o"))]
    if not any(name.endswith(".cu") for name in packaged):
        found.append("the wheel has no CUDA source")
    return found


def problems_of_metadata(wheel: Path, version: str) -> list[str]:
    """What is wrong in the wheel's name, its metadata and its entry points."""
    found = []
    if not WHEEL_TAGS.search(wheel.name):
        found.append(f"expected a wheel for cp310-abi3 on manylinux, got {wheel.name}")
    info = f"{PACKAGE}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        if f"{info}/METADATA" not in archive.namelist():
            return [*found, f"expected {info}/METADATA, as {PACKAGE}.__version__ is {version}"]
        metadata = archive.read(f"{info}/METADATA").decode()
        points = archive.read(f"{info}/entry_points.txt").decode()
    if f"\nVersion: {version}\n" not in metadata:
        found.append(f"expected version {version} in METADATA")
    return found + [f"no entry point {point!r}" for point in ENTRY_POINTS if point not in points]


def problems(artefacts: Artefacts, version: str) -> list[str]:
    """All that is wrong with the two files."""
    names = problems_of_names(wheel_names(artefacts.wheel), sdist_names(artefacts.sdist))
    return names + problems_of_metadata(artefacts.wheel, version)
