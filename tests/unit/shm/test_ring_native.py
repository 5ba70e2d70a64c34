"""The C core alone: under the sanitizers, with warnings as errors, and for AArch64 under qemu."""

import os
import shutil
import subprocess
import sys
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


# In place of the extension that is installed, the one that is given, for the tests that are named.
UNDER_ANOTHER = """
import importlib.util, sys
import pytest, vllm_commext.shm as package
name = "vllm_commext.shm._shm_ring"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
package._shm_ring = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package._shm_ring)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.long  # `make sanitize`
@pytest.mark.timeout(1800)
def test_the_step_codec_under_a_sanitizer(tmp_path: Path) -> None:
    """Its unit tests, damage among them, with every object in memory of its own."""
    include = sysconfig.get_paths()["include"]
    runtime = subprocess.run(
        [str(GCC), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not (Path(include) / "Python.h").exists() or not Path(runtime).is_absolute():
        pytest.skip("Python's headers or gcc's runtime for -fsanitize=address are not installed")
    library = tmp_path / "_shm_ring.abi3.so"
    flags = ["-g", "-O1", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all", "-DPy_LIMITED_API=0x030A0000", f"-I{include}"]
    built = compiled([*flags, str(SOURCES / "ring.c"), "-o", str(library), "-pthread"])
    assert built.returncode == 0, built.stderr
    tests = [str(Path(__file__).with_name(name)) for name in ("test_steps.py", "test_turns.py")]
    run = subprocess.run(
        [sys.executable, "-c", UNDER_ANOTHER, str(library), *tests],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": runtime,
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter leaves memory at its end
        },
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]


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
