"""Our dispatcher inside vLLM's own communicator, made by two real processes over gloo."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_process import python_at_once

from vllm_commext.allreduce import names
from vllm_commext.compat import tp_group
from vllm_commext.compat.rebind import INVENTORY, is_rebound, restore
from vllm_commext.settings import TOGGLES

# A process that imports vLLM takes seconds, and much longer on a busy machine.
pytestmark = pytest.mark.timeout(600)
WORLD = 2
SCRIPT = Path(__file__).with_name("allreduce_ranks.py")
TOGGLE = "VLLM_COMMEXT_ALLREDUCE"
FORCED = "VLLM_COMMEXT_ALLREDUCE_BACKEND"


def run_ranks(folder: Path, **environ: str) -> list[dict[str, Any]]:
    """What each rank found, under these toggles."""
    more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    args = [[str(rank), str(WORLD), str(folder / "store")] for rank in range(WORLD)]
    done = python_at_once(SCRIPT.read_text(), args, **more, **environ)
    assert [one.returncode for one in done] == [0] * WORLD, done
    return [json.loads(one.stdout.splitlines()[-1]) for one in done]


SUM = [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]


def test_a_forced_backend_serves_inside_vllms_communicator(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, **{TOGGLE: "1", FORCED: names.NCCL}):
        assert found["attached"] == [True, False]
        assert found["same_class"]
        assert found["sums"] == [[SUM, SUM], True, [[2] * 4, [2] * 4], True]
        assert found["served"] == {names.NCCL: 1, names.VLLM: 1}
        assert found["checkpoint"][0].startswith("UnsupportedError: ")
        assert found["checkpoint"][1] == ""
        assert found["after_destroy"] == [2.0]
        assert found["reasons"][:3] == [True, True, ""]
        assert "one order of sums" in found["reasons"][3]
        assert found["environ"] == "trtllm"


def test_on_an_unknown_machine_vllms_order_serves(tmp_path: Path) -> None:
    environ = {TOGGLE: "1", "XDG_CACHE_HOME": str(tmp_path)}
    for found in run_ranks(tmp_path, **environ):
        assert found["attached"] == [False, False]
        assert found["sums"] == [[SUM, SUM], True, [[2] * 4, [2] * 4], True]
        assert found["checkpoint"] == ["", ""]


def test_without_the_toggle_nothing_is_changed(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path):
        assert found["attached"] == [False, False]
        assert found["sums"] == [[SUM, SUM], True, [[2] * 4, [2] * 4], True]
        assert found["environ"] == ""


def test_an_nccl_without_sleep_mode_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    names_before = [function.name for function in wrapper.NCCLLibrary.exported_functions]
    (row,) = (row for row in INVENTORY if row.symbol.endswith(".exported_functions"))
    lacks = {"ncclCommSuspend", "ncclCommResume"}
    for library, missing in (
        (SimpleNamespace(**dict.fromkeys(lacks)), set()),
        (SimpleNamespace(ncclCommSuspend=None), {"ncclCommResume"}),
    ):
        monkeypatch.setattr(tp_group.ctypes, "CDLL", lambda _, found=library: found)
        assert set(tp_group.let_vllm_use_nccl()) == missing
        names_now = [function.name for function in wrapper.NCCLLibrary.exported_functions]
        assert names_now == [name for name in names_before if name not in missing]
    if is_rebound(row):
        restore(row)
    assert [function.name for function in wrapper.NCCLLibrary.exported_functions] == names_before


def test_every_backend_can_be_forced_by_its_name() -> None:
    (toggle,) = (toggle for toggle in TOGGLES if toggle.name == FORCED)
    assert set(toggle.choices) == {"auto", names.VLLM, *names.BACKENDS}
