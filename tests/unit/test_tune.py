"""`vllm-commext tune`: its table, its refusal without GPUs; and what doctor says."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from vllm_commext.allreduce import cache, limits, measure
from vllm_commext.allreduce import table as tables
from vllm_commext.allreduce.cache import builtin_table
from vllm_commext.allreduce.limits import Message
from vllm_commext.allreduce.machine import Machine
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.cli import checks as table
from vllm_commext.cli import main, tune
from vllm_commext.compat import tp_group

MIB = 1 << 20
TIMES = {
    2048: {"custom": 4.0, "nccl": 8.0},
    MIB: {"custom": 8.5, "nccl": 10.0, "flashinfer_one_shot": 9.0},
    64 * MIB: {"nccl": 240.0, "flashinfer_one_shot": 1000.0},
}


def test_the_table_marks_the_fastest() -> None:
    lines = tune.as_table(TIMES).splitlines()
    assert lines[0] == "| size | nccl | custom | flashinfer_one_shot |"
    assert lines[2:] == [
        "| 2 KiB | 8.0 | 4.0* | - |",
        "| 1 MiB | 10.0 | 8.5* | 9.0 |",
        "| 64 MiB | 240.0* | - | 1000.0 |",
    ]


def test_every_beginning_of_the_sizes_is_spread() -> None:
    spread = measure.spread(measure.SIZES)
    assert sorted(spread) == sorted(measure.SIZES)
    assert spread[:3] == [64 * MIB, 2048, 2048 << 8]
    assert measure.spread([8]) == [8]


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_without_gpus_it_says_so(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has GPUs to measure on")
    assert main.main(["tune", "allreduce", "--tp", gpus]) == 2
    assert f"--tp {gpus}: expected 2 or more" in capsys.readouterr().err


def test_without_peer_access_there_is_nothing_to_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert main.main(["tune", "allreduce", "--tp", "2"]) == 2
    assert "no peer access" in capsys.readouterr().err


def test_ranks_that_fail_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "_check_gpus", lambda _: None)
    fails = "import sys; sys.stderr.write('no such GPU\\n'); sys.exit(3)"
    monkeypatch.setattr(tune, "sys", SimpleNamespace(executable=_python(tmp_path, fails)))
    assert main.main(["tune", "allreduce", "--tp", "2"]) == 2
    assert "no such GPU" in capsys.readouterr().err


def test_ranks_that_do_not_end_are_told_of_after_their_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "_check_gpus", lambda _: None)
    monkeypatch.setattr(tune, "START_SECONDS", -1.5)
    program = _python(tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(tune, "sys", SimpleNamespace(executable=program))
    assert main.main(["tune", "allreduce", "--tp", "2", "--seconds", "1"]) == 2
    assert "did not end within" in capsys.readouterr().err


def _python(folder: Path, code: str) -> str:
    """A program that ignores its arguments and runs `code`."""
    program = folder / "program"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    return str(program)


def test_what_ranks_tell_is_shown_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "_check_gpus", lambda _: None)
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from vllm_commext.allreduce import table as tables
from vllm_commext.cli.tune import msgspec, say
times = {TIMES!r}
say("backends", names=["custom", "nccl"])
for size in times:
    say("size", dtype="bfloat16", size=size, times=times[size])
made = tables.build_table({{"bfloat16": times}}, 2, "test")
say("table", table=msgspec.json.encode(made).decode(), path="", machine={{}})
"""
    monkeypatch.setattr(tune, "sys", SimpleNamespace(executable=_python(tmp_path, code)))
    assert main.main(["tune", "allreduce", "--tp", "2", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "backends on all ranks: custom, nccl" in text
    assert "3/16 bfloat16 64 MiB: nccl" in text
    assert "| 1 MiB | 10.0 | 8.5* | 9.0 |" in text
    assert "not kept" in text
    figures = msgspec.json.decode((tmp_path / "allreduce_tuning.json").read_bytes())
    assert figures["microseconds"]["bfloat16"][str(MIB)]["custom"] == 8.5


def test_doctor_names_the_tables_of_the_world_sizes_that_there_are() -> None:
    checks = list(table.tables(4, lambda world: builtin_table("NVIDIA H200", world % 4 or 99)))
    assert [check.name for check in checks] == ["all-reduce over 2 GPUs", "all-reduce over 4 GPUs"]
    assert checks[0].value.startswith("bfloat16: flashinfer_one_shot up to ")
    assert (checks[0].remedy, checks[1].remedy) == (
        "",
        "vllm-commext tune allreduce --tp 4 --hidden SIZE measures it",
    )
    assert not list(table.tables(1, lambda _: None))


def test_a_measured_table_comes_before_the_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine("NVIDIA H200", "NV18", "1", "2", "3", "4", "5")
    assert cache.find_table(machine, 2) == builtin_table(machine.gpu, 2)
    measured = Table(2, {"bfloat16": (Row(64, ("nccl",)),)}, "measured")
    cache.save(machine, measured)
    known = builtin_table(machine.gpu, 2)
    assert known is not None
    found = cache.find_table(machine, 2)
    assert found == msgspec.structs.replace(measured, fused=known.fused)
    own = {"bfloat16": (Row(8, ("apart",)),)}
    cache.save(machine, msgspec.structs.replace(measured, fused=own))
    assert cache.find_table(machine, 2).fused == own
    without = cache.find_table(machine, 2, use_cache=False)
    assert without == builtin_table(machine.gpu, 2)
    assert cache.find_table(machine, 3) is None


def test_nccl_is_found_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(tp_group.importlib.util, "find_spec", lambda _: spec)
    environ = {"A": "b"}
    tp_group.help_vllm_find_nccl(environ)
    assert environ[tp_group.NCCL_PATH] == str(library)
    environ = {tp_group.NCCL_PATH: "mine"}
    tp_group.help_vllm_find_nccl(environ)
    assert environ[tp_group.NCCL_PATH] == "mine"


class TestMeasuring:
    """The loop over sizes and dtypes; the times themselves need GPUs."""

    @pytest.mark.parametrize("seconds", [60, -1])
    def test_every_size_of_every_dtype_is_measured_and_told_within_its_time(
        self, seconds: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[tuple[str, int]] = []
        collective: Any = SimpleNamespace(run=lambda step: [step()] * 2)
        dispatcher: Any = SimpleNamespace(backends={})
        monkeypatch.setattr(
            measure, "measure_message", lambda _, message, *__: {"nccl": float(message.num_bytes)}
        )
        options = measure.Options((2048, 4096), ("bfloat16", "float32"), seconds=seconds)
        times = measure.measure_backends(
            dispatcher, collective, options, progress=lambda *of: told.append(of[:2])
        )
        both = {2048: {"nccl": 2048.0}, 4096: {"nccl": 4096.0}} if seconds > 0 else {}
        assert times == {"bfloat16": both, "float32": both}
        assert len(told) == 2 * len(both)

    def test_only_backends_that_are_ready_take_part(self) -> None:
        prepared: list[str] = []

        def backend(name: str, *, takes: bool, ready: bool) -> Any:
            return SimpleNamespace(
                takes=lambda _: takes,
                prepare=lambda _: prepared.append(name),
                is_ready=lambda _: ready,
                all_reduce=name,
            )

        backends = {
            "good": backend("good", takes=True, ready=True),
            "failed": backend("failed", takes=True, ready=False),
            "other": backend("other", takes=False, ready=True),
        }
        dispatcher: Any = SimpleNamespace(backends=backends)
        calls = measure.backend_calls(dispatcher, Message((1, 8), "bfloat16"))
        assert calls == {"good": "good"}
        assert prepared == ["good", "failed"]


class TestNeighbours:
    """An all-reduce between a matrix product and a norm."""

    def test_each_call_has_another_matrix_before_it_and_a_norm_after_it(self) -> None:
        message = Message((3, 16), "float32")
        normed: list[torch.Tensor] = []

        def norm(out: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: float) -> None:
            assert residual.shape == out.shape == (3, 16)
            assert weight.shape == (16,)
            normed.append(out)

        around = measure.Neighbours(message, norm, device="cpu")
        tensor = torch.rand(3, 16)
        calls = around.calls(
            {"twice": lambda x: 2 * x}, {"fused": lambda x, residual, *_: (3 * x, residual)}
        )
        assert list(calls) == [measure.BASELINE, "twice", "fused"]
        products = [calls[measure.BASELINE](tensor) for _ in range(2 * measure.COPIES)]
        assert len({product.sum().item() for product in products}) == measure.COPIES
        assert torch.equal(calls["twice"](tensor), 2 * products[0])
        assert torch.equal(normed[0], 2 * products[0])
        assert torch.equal(calls["fused"](tensor)[0], 3 * products[1])
        assert len(normed) == 1

    def test_what_the_product_takes_is_taken_off(self) -> None:
        times = {measure.BASELINE: 5.0, "a": 7.5, "b": 4.9}
        assert measure.without_product(times) == {"a": 2.5, "b": measure.SMALLEST}

    def test_a_table_has_who_serves_both_beside_the_fastest_of_the_others(self) -> None:
        times = {
            1024: {"push": 5.0, "nccl": 9.0, limits.FUSED_PUSH: 3.0, limits.FUSED_FLASHINFER: 4.0},
            4096: {"push": 6.0, "nccl": 9.0, limits.FUSED_PUSH: 8.0},
            8192: {"push": 7.0, "nccl": 9.0},
        }
        table = tables.build_table({"bfloat16": times}, 2, "a test")
        assert table.ranking(1024, "bfloat16") == ("push", "nccl")
        first = (limits.FUSED_PUSH, limits.FUSED_FLASHINFER, limits.UNFUSED)
        assert table.fused_ranking(1024, "bfloat16") == first
        assert table.fused_ranking(4096, "bfloat16") == (limits.UNFUSED, limits.FUSED_PUSH)
        plain = tables.build_table({"bfloat16": {8192: times[8192]}}, 2, "a test")
        assert plain.fused == {}
