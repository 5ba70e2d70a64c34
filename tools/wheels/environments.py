"""Installs the artefacts in clean environments and looks at what works there."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .build import COMMAND_SECONDS, Artefacts, WheelError, clean_environment, make_venv, run

INSTALLED = Path(__file__).with_name("installed.py")
VERSIONS = ("3.11", "3.12", "3.13")
# setup.py asks for cc by way of CC; nothing that installs may find another one.
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


@dataclass(frozen=True)
class Case:
    """One way to install.

    Attributes:
        name: for the table.
        from_wheel: the wheel, else the sdist.
        env: what is set while pip runs.
        native: whether the queue's extension is there afterwards; None where pip has to fail.
    """

    name: str
    from_wheel: bool
    env: dict[str, str]
    native: bool | None


CASES = (
    Case("wheel, no compiler", True, NO_COMPILER, native=True),
    Case("sdist, compiler", False, {}, native=True),
    Case("sdist, no compiler", False, NO_COMPILER, native=False),
    Case(
        "sdist, no compiler, VLLM_COMMEXT_BUILD_NATIVE=1",
        False,
        {**NO_COMPILER, "VLLM_COMMEXT_BUILD_NATIVE": "1"},
        native=None,
    ),
)


def candidates(version: str) -> Iterator[Path]:
    """Where a Python of this version may be: PATH, pyenv's folder, uv's."""
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    uv = Path.home() / ".local/share/uv/python"
    yield from sorted(uv.glob(f"cpython-{version}.*/bin/python{version}"))


def find_python(version: str) -> Path | None:
    """The first candidate that runs, is of this version and can make environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for python in candidates(version):
        try:
            if run(python, "-c", code).strip() == version:
                return python
        except (WheelError, OSError):
            continue
    return None


def install(python: Path, artefacts: Artefacts, case: Case) -> None:
    """Let pip install the case's file; its dependencies come as wheels from pip's index."""
    target = artefacts.wheel if case.from_wheel else artefacts.sdist
    run(python, "-m", "pip", "install", "--quiet", target, env=clean_environment(**case.env))


def check_doctor(command: Path) -> str:
    """Empty where `vllm-commext doctor` says by exit status 1 and by a line that vLLM is absent."""
    done = subprocess.run(
        [command, "doctor"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    line = next((text for text in done.stdout.splitlines() if "WARN vLLM, vllm:" in text), "")
    if done.returncode == 1 and "not installed" in line:
        return ""
    return f"doctor: status {done.returncode}, expected 1 and a line that vLLM is not installed"


def check_installed(python: Path, case: Case, version: str) -> str:
    """What is wrong in an environment where the package was installed; empty where all is well."""
    printed = run(python, INSTALLED, env=clean_environment(), cwd=python.parent)
    facts = json.loads(printed.splitlines()[-1])  # the plugin's log lines stand before it
    wanted = {
        "version": version,
        "native": case.native,
        "queue": "round trip" if case.native else "left out",
    }
    if facts != wanted:
        return f"expected {wanted}, found {facts}"
    problem = check_doctor(python.parent / "vllm-commext")
    if problem:
        return problem
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "vllm-commext")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    left = sorted(path.name for path in Path(site).glob("vllm_commext*"))
    return f"pip uninstall leaves {', '.join(left)}" if left else ""


def try_case(python: Path, folder: Path, artefacts: Artefacts, case: Case, version: str) -> str:
    """Empty where the case goes as it should."""
    inside = make_venv(python, folder)
    try:
        install(inside, artefacts, case)
    except WheelError as error:
        if case.native is None and "/bin/false" in str(error):
            return ""
        return str(error)
    if case.native is None:
        return "expected pip to fail and to name the compiler; it did not"
    try:
        return check_installed(inside, case, version)
    except WheelError as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
