"""The C core alone, under the sanitizers and with warnings as errors."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "csrc" / "shm"
STRESS = Path(__file__).with_name("ring_stress.c")
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
GCC = shutil.which("gcc")
RECORDS = os.environ.get("COMMEXT_RING_RECORDS", "3000")  # `make sanitize` takes more
pytestmark = pytest.mark.skipif(GCC is None, reason="there is no gcc")


def compiled(words: list[str]) -> "subprocess.CompletedProcess[str]":
    command = [str(GCC), *STRICT, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_core_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "ring_stress"
    flags = ["-D_GNU_SOURCE", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    result = compiled([*flags, f"-I{SOURCES}", str(STRESS), "-o", str(program), "-pthread"])
    if "cannot find" in result.stderr:
        pytest.skip(f"gcc has no runtime for -fsanitize={sanitizer}")
    assert result.returncode == 0, result.stderr
    command = [str(program), RECORDS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr


def test_the_extension_compiles_without_a_warning() -> None:
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip("Python's headers are not installed")
    flags = ["-DPy_LIMITED_API=0x030A0000", "-fsyntax-only", f"-I{include}"]
    result = compiled([*flags, str(SOURCES / "ring.c")])
    assert result.returncode == 0, result.stderr
