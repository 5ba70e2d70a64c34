"""What `make wheels` finds wrong in a wheel, and which Python it takes.

That the files build, are reproducible and install is what it does itself: tools/make_wheels.py.
"""

import re
import stat
import zipfile
from pathlib import Path

import make_wheels
import pytest
from wheels import contents, environments

import vllm_commext

ROOT = Path(__file__).resolve().parents[2]
SDIST = contents.SDIST_NEEDS | {"vllm_commext/__init__.py", "csrc/cuda/k.cu"}
WHEEL = {
    *("vllm_commext/__init__.py", "vllm_commext/csrc/cuda/k.cu", *contents.BUILT),
    "vllm_commext-1.0.dist-info/METADATA",
}


def test_right_contents_have_no_problem() -> None:
    assert contents.problems_of_names(WHEEL, SDIST) == []


@pytest.mark.parametrize(
    ("more", "less", "problem"),
    [
        ({"tests/conftest.py"}, set(), "the wheel has tests/conftest.py, which is not ours"),
        (set(), {"vllm_commext/__init__.py"}, "the wheel lacks vllm_commext/__init__.py"),
        (set(), contents.BUILT, "the wheel lacks vllm_commext/shm/_shm_ring.abi3.so"),
        (set(), {"vllm_commext/csrc/cuda/k.cu"}, "the wheel has no CUDA source"),
        (set(), {"vllm_commext/csrc/cuda/k.cu"}, "the wheel lacks vllm_commext/csrc/cuda/k.cu"),
    ],
)
def test_a_wrong_file_in_the_wheel_is_named(more: set[str], less: set[str], problem: str) -> None:
    assert problem in contents.problems_of_names((WHEEL | more) - less, SDIST)


def test_a_wrong_file_in_the_sdist_is_named() -> None:
    assert contents.problems_of_names(WHEEL, SDIST - {"setup.py"}) == ["the sdist lacks setup.py"]
    assert contents.problems_of_names(WHEEL, SDIST | {"a.so"}) == ["the sdist has a.so"]


def wheel(folder: Path, tag: str, version: str) -> Path:
    path = folder / f"vllm_commext-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = "vllm_commext-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Name: vllm-commext\nVersion: {version}\n\n")
        archive.writestr(f"{info}/entry_points.txt", "\n".join(contents.ENTRY_POINTS))
    return path


GOOD_TAG = "cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64"


@pytest.mark.parametrize(
    ("tag", "version", "problem"),
    [
        (GOOD_TAG, "1.0", None),
        ("cp310-abi3-linux_x86_64", "1.0", "expected a wheel for cp310-abi3 on manylinux"),
        ("cp312-cp312-manylinux_2_17_x86_64", "1.0", "expected a wheel for cp310-abi3"),
        (GOOD_TAG, "0.9", "expected version 1.0 in METADATA"),
    ],
)
def test_tag_and_version_are_checked(
    tmp_path: Path, tag: str, version: str, problem: str | None
) -> None:
    found = contents.problems_of_metadata(wheel(tmp_path, tag, version), "1.0")
    assert found == [] if problem is None else problem in found[0]


def fake_python(folder: Path, answer: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "python3.10"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_python_that_does_not_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(tmp_path / "bin", "exit 127")  # as pyenv's stand-ins do
    right = fake_python(tmp_path / "pyenv/versions/3.10.13/bin", "echo 3.10")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert environments.find_python("3.10") == right


def test_a_python_that_is_nowhere_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environments.find_python("3.10") is None


def test_the_version_stands_in_one_place_and_the_changelog_knows_it() -> None:
    version = make_wheels.version_of(ROOT)
    assert version == vllm_commext.__version__
    assert re.search(rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert "version" not in (ROOT / "pyproject.toml").read_text().split("dynamic")[0]
