"""The C core alone: under the sanitizers, with warnings as errors, and for AArch64 under qemu."""

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


def compiled(words: list[str], gcc: str = str(GCC)) -> "subprocess.CompletedProcess[str]":
    command = [gcc, *STRICT, *words]
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
    run = run_stress(str(program), RECORDS)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr


def run_stress(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)


@pytest.mark.timeout(900)
def test_the_core_among_processes_of_which_one_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "ring_stress"
    words = ["-D_GNU_SOURCE", "-O2", f"-I{SOURCES}", str(STRESS), "-o", str(program), "-pthread"]
    assert compiled(words).returncode == 0
    run = run_stress(str(program), RECORDS, "processes")
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr


AARCH64_GCC, QEMU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
needs_qemu = pytest.mark.skipif(
    AARCH64_GCC is None or QEMU is None,
    reason="needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user",
)


@pytest.mark.long  # `make qemu`
@needs_qemu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("among", [[], ["processes"]], ids=["threads", "processes"])
@pytest.mark.parametrize(
    "machine",
    [["-march=armv8-a", "-mno-outline-atomics"], ["-march=armv8.1-a"]],
    ids=["exclusive", "atomic instructions"],
)
def test_the_core_on_aarch64(machine: list[str], among: list[str], tmp_path: Path) -> None:
    """Both ways in which the processor does a read-modify-write."""
    program = tmp_path / "ring_stress"
    flags = ["-D_GNU_SOURCE", "-O2", "-static", *machine, f"-I{SOURCES}"]
    built = compiled([*flags, str(STRESS), "-o", str(program), "-pthread"], str(AARCH64_GCC))
    assert built.returncode == 0, built.stderr
    run = run_stress(str(QEMU), str(program), RECORDS, *among)
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr


@pytest.mark.long
@needs_qemu
def test_the_extension_compiles_for_aarch64_without_a_warning() -> None:
    """With this Python's headers: those of the limited API are alike on 64-bit Linux."""
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip("Python's headers are not installed")
    flags = ["-O2", "-DPy_LIMITED_API=0x030A0000", "-S", "-o", "/dev/null", f"-I{include}"]
    result = compiled([*flags, str(SOURCES / "ring.c")], str(AARCH64_GCC))
    assert result.returncode == 0, result.stderr


def test_the_extension_compiles_without_a_warning() -> None:
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip("Python's headers are not installed")
    flags = ["-DPy_LIMITED_API=0x030A0000", "-fsyntax-only", f"-I{include}"]
    result = compiled([*flags, str(SOURCES / "ring.c")])
    assert result.returncode == 0, result.stderr
