"""Our norm inside the installed vLLM: what is put where, and what its layers then compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.reduce_rms_rank import EPS, Q, rows, weights
from tests.contract.vllm_process import python, ranks
from tests.kit.ports import free_port

pytest.importorskip("cuda.bindings", reason="vLLM's own norm needs cuda-bindings to be imported")

# A process that imports vLLM takes seconds, and much longer on a busy machine.
pytestmark = pytest.mark.timeout(600)
TOGGLE = "VLLM_COMMEXT_REDUCE_RMS"
NORM = "vllm.model_executor.layers.minimax_rms_norm"
RANK = Path(__file__).with_name("reduce_rms_rank.py")

LOOK = f"""
import importlib, json
from vllm.plugins import load_general_plugins
load_general_plugins()
norm = importlib.import_module("{NORM}.rms_norm_tp")
lamport = importlib.import_module("{NORM}.lamport_workspace")
from vllm_commext import status
print(json.dumps({{
    "fused": getattr(norm._MINIMAX_FUSED_AR_RMS_QK, "__module__", None),
    "workspace": lamport.get_allreduce_workspace.__module__,
    "bound": norm.MINIMAX_QK_NORM_MAX_TOKEN_NUM,
    "lines": [outcome.line() for outcome in status.recorded()],
}}))
"""


def look(**environ: str) -> dict[str, Any]:
    done = python(LOOK, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_toggle_puts_it_where_vllm_looks() -> None:
    found = look(**{TOGGLE: "1"})
    assert found["fused"] == found["workspace"] == "vllm_commext.compat.reduce_rms"
    assert found["bound"] > 1 << 20
    assert "commext: reduce_rms active" in found["lines"]


def test_without_the_toggle_everything_is_vllms() -> None:
    found = look()
    assert not str(found["fused"]).startswith("vllm_commext")
    assert found["workspace"] == f"{NORM}.lamport_workspace"
    assert found["bound"] == 2048
    assert f"commext: reduce_rms off ({TOGGLE}=0)" in found["lines"]


def test_vllms_layers_compute_the_same_with_it() -> None:
    ours, stock = (ranks(*(RANK, 2, str(free_port())), **{TOGGLE: toggle}) for toggle in ("1", "0"))
    for mine, theirs in zip(ours, stock, strict=True):
        assert (mine["told"], theirs["told"]) == (["MiniMax-M2"], [])
        assert mine["v_is_left"]
        for got, want in zip(mine["minimax"], theirs["minimax"], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2**-7, atol=1e-6)
    whole = torch.cat([rows(rank)[:, :Q] for rank in range(2)], dim=1).double()
    wanted = torch.nn.functional.rms_norm(whole, (2 * Q,), weights()[0].double(), EPS)
    for rank, part in enumerate(wanted.chunk(2, dim=1)):
        got = torch.tensor(ours[rank]["minimax"][0]).double()
        torch.testing.assert_close(got, part, rtol=2**-7, atol=1e-6)
