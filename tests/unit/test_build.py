"""Building: the optional native queue is left out, and said so, where it cannot be compiled; `make
wheels` names wrong files.

`setup.py` is run as pip runs it, on a small copy of the tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import make_wheels
import pytest

import vllm_commext
from tests.kit.processes import run

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "_native_build.json")
    shutil.copytree(ROOT / "vllm_commext", tmp_path / "vllm_commext", ignore=ignore)
    if (ROOT / "csrc").exists():
        shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    return tmp_path


def setup(tree: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "setup.py", *command]
    return run(words, cwd=tree, env={**os.environ, **environ}, seconds=100)


def record(tree: Path) -> dict[str, object]:
    return json.loads((tree / "out/vllm_commext/shm/_native_build.json").read_text())


BUILD = ("build", "--build-lib", "out")


def extensions(tree: Path) -> list[str]:
    return [path.name for path in tree.glob("out/vllm_commext/shm/*.so")]


def test_no_python_that_compiled_it_ties_it_to_its_own_headers() -> None:
    """A '#' in a format, compiled by Python 3.13 or newer, is an error in an older one."""
    text = "".join(path.read_text() for path in ROOT.glob("csrc/shm/*.[ch]"))
    formats = re.findall(r'(?:ParseTuple|BuildValue|CallFunction)\([^";]*"([^"]*)"', text)
    assert len(formats) > 8
    assert not [one for one in formats if "#" in one]


def test_without_a_compiler_it_is_left_out_and_said_so(tree: Path) -> None:
    done = setup(tree, *BUILD, CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert "the native shared-memory queue is left out: it could not be compiled" in done.stderr
    assert extensions(tree) == []
    assert record(tree)["built"] is False
    assert "/bin/false" in str(record(tree)["reason"])


@pytest.mark.long
def test_without_a_compiler_it_is_an_error_where_it_was_asked_for(tree: Path) -> None:
    done = setup(tree, *BUILD, CC="/bin/false", VLLM_COMMEXT_BUILD_NATIVE="1")
    assert done.returncode != 0
    assert "/bin/false" in done.stderr


FREE_THREADED = """
import sysconfig
asked = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else asked(name)
"""


@pytest.mark.long
def test_free_threaded_python_gets_a_wheel_without_it(tree: Path) -> None:
    (tree / "fake").mkdir()
    (tree / "fake" / "sitecustomize.py").write_text(FREE_THREADED)
    done = setup(tree, "bdist_wheel", PYTHONPATH=str(tree / "fake"))
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        record = json.loads(archive.read("vllm_commext/shm/_native_build.json"))
    assert record["built"] is False
    assert "free-threaded" in record["reason"]
    asked_for = {"PYTHONPATH": str(tree / "fake"), "VLLM_COMMEXT_BUILD_NATIVE": "1"}
    refused = setup(tree, *BUILD, **asked_for)
    assert refused.returncode != 0
    assert "free-threaded" in refused.stderr


def test_a_bad_choice_is_an_error_that_lists_the_choices(tree: Path) -> None:
    done = setup(tree, *BUILD, VLLM_COMMEXT_BUILD_NATIVE="yes")
    assert done.returncode != 0
    assert "VLLM_COMMEXT_BUILD_NATIVE: expected one of auto, 0, 1, got 'yes'" in done.stderr


def test_a_wheel_without_it_is_for_every_platform(tree: Path) -> None:
    done = setup(tree, "bdist_wheel", VLLM_COMMEXT_BUILD_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        reason = json.loads(archive.read("vllm_commext/shm/_native_build.json"))["reason"]
        names = archive.namelist()
    kernels = [path.name for path in (tree / "csrc" / "cuda").iterdir()]
    assert {f"vllm_commext/csrc/cuda/{name}" for name in kernels} <= set(names)
    assert reason == "VLLM_COMMEXT_BUILD_NATIVE=0"


def test_the_version_stands_in_one_place_and_the_changelog_knows_it() -> None:
    version = make_wheels.version_of(ROOT)
    assert version == vllm_commext.__version__
    assert re.search(rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert "version" not in (ROOT / "pyproject.toml").read_text().split("dynamic")[0]
