#!/usr/bin/env python3
"""Build an earlier release of this package from its commit and install it into a folder, to be put
before this one by PYTHONPATH: for the test that lets both talk to each other.

    python tools/older_release.py .venv .older-0.2.0 --commit 2f151d8
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from installer import InstallError, run

ROOT = Path(__file__).resolve().parent.parent
STAMP = "commit"


def sources(commit: str, folder: Path) -> None:
    """Write what the commit holds.

    Raises:
        InstallError: this clone does not have it.
    """
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        raise InstallError(
            f"expected a clone that has the commit {commit}: {done.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)


def install(venv: Path, target: Path, commit: str) -> None:
    """Build the wheel with the environment's tools, and unpack it without what it depends on."""
    with tempfile.TemporaryDirectory() as folder:
        sources(commit, Path(folder))
        wheels = Path(folder) / "wheels"
        pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
        more = {"VLLM_COMMEXT_BUILD_NATIVE": "1"}
        build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), folder)
        run(venv, *pip, *build, more=more)
        (wheel,) = wheels.glob("*.whl")
        run(venv, *pip, "install", "--no-deps", "--upgrade", "--target", str(target), str(wheel))
    (target / STAMP).write_text(commit)


def main() -> int:
    """0 where the folder holds the release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="environment with pip, setuptools and a compiler")
    parser.add_argument("target", type=Path, help="folder to install into")
    parser.add_argument("--commit", required=True, help="the release's commit")
    args = parser.parse_args()
    stamp = args.target / STAMP
    if stamp.exists() and stamp.read_text() == args.commit:
        return 0
    try:
        install(args.venv, args.target, args.commit)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
