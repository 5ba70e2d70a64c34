"""Our dispatcher inside vLLM's own communicator, made by two real processes over gloo."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.vllm_process import python_at_once, ranks
from vllm_commext.allreduce import limits
from vllm_commext.compat import tp_group
from vllm_commext.compat.monkey_patch import SYMBOLS, is_patched, restore
from vllm_commext.settings import TOGGLES

WORLD = 2
SCRIPT = Path(__file__).with_name("allreduce_ranks.py")
TOGGLE = "VLLM_COMMEXT_ALLREDUCE"
FORCED = "VLLM_COMMEXT_ALLREDUCE_BACKEND"


def run_ranks(folder: Path, **environ: str) -> list[dict[str, Any]]:
    """What each rank found, under these toggles."""
    return ranks(SCRIPT, WORLD, str(WORLD), str(folder / "store"), **environ)


SUM = [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]


def test_a_forced_backend_serves_inside_vllms_communicator(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, **{TOGGLE: "1", FORCED: limits.NCCL}):
        assert found["attached"] == [True, False]
        assert found["same_class"]
        assert found["sums"] == [[SUM, SUM], True, [[2] * 4, [2] * 4], True]
        assert found["served"] == {limits.NCCL: 2, limits.VLLM: 1}
        assert found["fused"][0] == [[1.0], [3.0]]
        assert "expected one of the groups" in found["fused"][1]
        assert found["checkpoint"][0].startswith("UnsupportedError: ")
        assert found["checkpoint"][1] == ""
        assert found["after_destroy"] == [2.0]
        assert found["reasons"] == [True, ""]
        assert found["environ"] == []


def test_on_an_unknown_machine_vllms_order_serves(tmp_path: Path) -> None:
    environ = {TOGGLE: "1", "XDG_CACHE_HOME": str(tmp_path)}
    for found in run_ranks(tmp_path, **environ):
        assert found["attached"] == [False, False]
        assert found["sums"] == [[SUM, SUM], True, [[2] * 4, [2] * 4], True]
        assert found["checkpoint"] == ["", ""]
        assert found["environ"] == []


TWO_HOSTS = """
import os
before = dict(os.environ)
from vllm_commext.compat import fits
fits.require_proven_gpus = lambda: None  # as on GPUs
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import flashinfer_all_reduce as theirs
for module in (theirs, parallel_state):  # where vLLM of one version or another counts them
    for name in ("_node_count", "get_node_count"):
        if hasattr(module, name):
            setattr(module, name, lambda *_: 2)
from vllm import envs
resolve = theirs._resolve_fi_ar_backend
try:
    found = resolve(None)
except TypeError:
    found = resolve()
import vllm.distributed.device_communicators.cuda_communicator  # which sets a name by itself
changed = sorted(name for name in os.environ if os.environ[name] != before.get(name))
print(envs.VLLM_FLASHINFER_ALLREDUCE_BACKEND, found, changed)
"""


def test_on_two_hosts_vllm_resolves_its_backend_as_without_us() -> None:
    """A name in the environment would make vLLM insist on it, and end at its start."""
    plain, *others = (
        python_at_once(TWO_HOSTS, [[]], VLLM_HOST_IP="127.0.0.1", **{TOGGLE: choice})[0]
        for choice in ("0", "auto", "1")
    )
    for ours in others:
        assert plain.returncode == ours.returncode == 0, (plain, ours)
        assert "commext: allreduce active" in ours.stdout + ours.stderr
        assert ours.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


def test_without_the_toggle_nothing_is_changed(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path):
        assert found["attached"] == [False, False]
        assert found["sums"] == [[SUM, SUM], True, [[2] * 4, [2] * 4], True]
        assert found["environ"] == []


def test_an_nccl_without_sleep_mode_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    names_before = [function.name for function in wrapper.NCCLLibrary.exported_functions]
    (symbol,) = (each for each in SYMBOLS if each.endswith(".exported_functions"))
    lacks = {"ncclCommSuspend", "ncclCommResume"}
    for library, missing in (
        (SimpleNamespace(**dict.fromkeys(lacks)), set()),
        (SimpleNamespace(ncclCommSuspend=None), {"ncclCommResume"}),
    ):
        monkeypatch.setattr(tp_group.ctypes, "CDLL", lambda _, found=library: found)
        assert set(tp_group.let_vllm_use_nccl()) == missing
        names_now = [function.name for function in wrapper.NCCLLibrary.exported_functions]
        assert names_now == [name for name in names_before if name not in missing]
    if is_patched(symbol):
        restore(symbol)
    assert [function.name for function in wrapper.NCCLLibrary.exported_functions] == names_before


def test_every_backend_can_be_forced_by_its_name() -> None:
    (toggle,) = (toggle for toggle in TOGGLES if toggle.name == FORCED)
    assert set(toggle.choices) == {"auto", limits.VLLM, *limits.BACKENDS}
