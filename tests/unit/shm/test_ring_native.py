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


def stressed(
    folder: Path, flags: list[str], *words: str, gcc: str = str(GCC), wrapper: tuple[str, ...] = ()
) -> None:
    program = str(folder / "ring_stress")
    flags = ["-D_GNU_SOURCE", *flags, f"-I{SOURCES}"]
    built = compiled([*flags, str(STRESS), "-o", program, "-pthread"], gcc)
    if "cannot find" in built.stderr:
        pytest.skip(f"gcc has no runtime for {flags}")
    assert built.returncode == 0, built.stderr
    command = [*wrapper, program, RECORDS, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_core_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    flags = ["-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    stressed(tmp_path, flags)


@pytest.mark.timeout(900)
def test_the_core_among_processes_of_which_one_is_killed(tmp_path: Path) -> None:
    stressed(tmp_path, ["-O2"], "processes")


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
    flags = ["-O2", "-static", *machine]
    stressed(tmp_path, flags, *among, gcc=str(AARCH64_GCC), wrapper=(str(QEMU),))


@pytest.mark.parametrize(
    ("gcc", "flags"),
    [
        (GCC, ["-fsyntax-only"]),
        pytest.param(
            *(AARCH64_GCC, ["-O2", "-S", "-o", "/dev/null"]), marks=[pytest.mark.long, needs_qemu]
        ),
    ],
    ids=["here", "aarch64"],
)
def test_the_extension_compiles_without_a_warning(gcc: str, flags: list[str]) -> None:
    """With this Python's headers: those of the limited API are alike on 64-bit Linux."""
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip("Python's headers are not installed")
    flags = [*flags, "-DPy_LIMITED_API=0x030A0000", f"-I{include}"]
    result = compiled([*flags, str(SOURCES / "ring.c")], gcc)
    assert result.returncode == 0, result.stderr
