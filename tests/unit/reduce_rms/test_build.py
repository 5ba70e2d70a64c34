"""The kernel compiled for real, without a GPU, and the cache of what was compiled."""

import concurrent.futures
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import launch
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.kernel import PROGRAM, Shape, Tiling

MINIMAX = Shape("bfloat16", "bfloat16", 2, 3072, 512)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm_commext" / "reduce_rms"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []

    def compile_cubin(_: launch.Program, macros: dict[str, int], architecture: int) -> bytes:
        seen.append(architecture)
        return repr((sorted(macros.items()), architecture)).encode()

    monkeypatch.setattr(launch.Program, "compile_cubin", compile_cubin)
    monkeypatch.setattr(launch, "nvrtc_version", lambda: "13.0")
    return seen


@pytest.mark.usefixtures("needs_nvrtc")
def test_a_source_that_is_refused_tells_why() -> None:
    macros = {**kernel.macros(MINIMAX, Tiling(1)), "SENTINEL": 0}
    with pytest.raises(UnsupportedError, match="error"):
        PROGRAM.compile_cubin(macros, 90)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.long
@pytest.mark.parametrize("shape", [MINIMAX, Shape("float16", "float32", 8, 768, 128)], ids=str)
def test_no_form_of_few_tokens_spills_registers(shape: Shape, tmp_path: Path) -> None:
    for tiling in kernel.tilings(shape):
        macros = [f"-D{name}={value}" for name, value in kernel.macros(shape, tiling).items()]
        target = ["-arch=sm_90", "-std=c++17", "-cubin", "-o", str(tmp_path / "kernel")]
        target += [f"-I{header.parent}" for header in PROGRAM.headers]
        command = ["nvcc", *target, "--resource-usage", *macros, str(PROGRAM.main)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert re.search(r"\b0 bytes spill stores", done.stderr), done.stderr


def test_a_second_call_takes_what_is_on_disk(cache: Path, compilations: list[int]) -> None:
    macros = kernel.macros(MINIMAX, Tiling(1))
    first = PROGRAM.load_or_compile(macros, 90)
    assert PROGRAM.load_or_compile(macros, 90) == first
    assert PROGRAM.load_or_compile(macros, 80) != first
    assert PROGRAM.load_or_compile({**macros, "Q_SIZE": 8}, 90) != first
    assert compilations == [90, 80, 90]
    assert len(list(cache.glob("*.cubin"))) == 3


@pytest.mark.usefixtures("compilations")
def test_another_compiler_or_another_source_is_another_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    macros = kernel.macros(MINIMAX, Tiling(1))
    before = PROGRAM.cache_key(macros, 90)
    monkeypatch.setattr(launch, "nvrtc_version", lambda: "13.1")
    newer = PROGRAM.cache_key(macros, 90)
    monkeypatch.setattr(launch.Program, "sources", lambda _: (b"", ()))
    assert len({before, newer, PROGRAM.cache_key(macros, 90)}) == 3


def test_many_at_once_compile_once(cache: Path, compilations: list[int]) -> None:
    macros = kernel.macros(MINIMAX, Tiling(2))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = set(pool.map(lambda _: PROGRAM.load_or_compile(macros, 90), range(16)))
    assert len(results) == 1
    assert compilations == [90]
    assert [path.suffix for path in sorted(cache.iterdir())] == [".cubin", ".lock"]


def test_a_kernel_that_was_planted_or_cut_is_compiled_anew(
    cache: Path, compilations: list[int], log_lines: pytest.LogCaptureFixture
) -> None:
    macros = kernel.macros(MINIMAX, Tiling(1))
    good = PROGRAM.load_or_compile(macros, 90)
    (path,) = cache.glob("*.cubin")
    whole = path.read_bytes()
    for content in (b"", b"planted", whole[:-1], whole + b"x", whole.replace(b"90", b"91")):
        path.write_bytes(content)
        assert PROGRAM.load_or_compile(macros, 90) == good
        assert path.read_bytes() == whole
    cache.chmod(0o777)
    assert PROGRAM.load_or_compile(macros, 90) == good
    assert compilations == [90] * 7
    assert len([line for line in log_lines.messages if "kernels are not kept" in line]) == 1


@pytest.mark.usefixtures("no_home")
def test_without_a_home_kernels_are_compiled_and_not_kept(compilations: list[int]) -> None:
    PROGRAM.load_or_compile(kernel.macros(MINIMAX, Tiling(1)), 90)
    assert compilations == [90]
