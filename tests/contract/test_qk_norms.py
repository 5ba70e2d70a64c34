"""Our op in vLLM's models whose norms run over rows that tensor parallelism has spread: the fused
op of MiniMax-M2 (_MINIMAX_FUSED_AR_RMS_QK, MINIMAX_QK_NORM_MAX_TOKEN_NUM, get_allreduce_workspace),
OlmoeAttention (`_apply_qk_norm`) and the Transformers backend (RMSNormFuser.fuse,
TPAwareNormMixin.forward)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.qk_norms_rank import CASES, TOKENS, Q, wanted
from tests.contract.vllm_process import python, ranks
from tests.kit.ports import free_port

pytest.importorskip("cuda.bindings", reason="vLLM's own norm needs cuda-bindings to be imported")

TOGGLE = "VLLM_COMMEXT_REDUCE_RMS"
RANK = Path(__file__).with_name("qk_norms_rank.py")
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each rank found with the toggle on, and off."""
    return {toggle: ranks(RANK, 2, str(free_port()), **{TOGGLE: toggle}) for toggle in ("1", "0")}


@pytest.mark.parametrize("model", CASES)
def test_a_models_norm_gives_the_same_with_the_op(found: Found, model: str) -> None:
    for mine, theirs in zip(found["1"], found["0"], strict=True):
        pairs = list(zip(mine[model]["outs"], theirs[model]["outs"], strict=True))
        assert pairs
        for got, want in pairs:
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("model", CASES)
def test_vllms_own_collectives_are_not_called_where_the_op_serves(found: Found, model: str) -> None:
    for mine, theirs in zip(found["1"], found["0"], strict=True):
        assert mine[model]["collectives"] == []
        assert theirs[model]["collectives"] != []


def test_the_log_and_the_key_of_compiled_graphs_say_which_models_have_it(found: Found) -> None:
    for mine, theirs in zip(found["1"], found["0"], strict=True):
        assert set(mine["told"]) == set(CASES) == set(json.loads(mine["identity"]))
        assert (theirs["told"], theirs["identity"]) == ([], "")
        assert mine["bounds"] > [1 << 20] > theirs["bounds"] == [2048]


def test_the_norm_is_that_of_the_whole_row(found: Found) -> None:
    for rank, part in enumerate(wanted()):
        for model in CASES:
            got = torch.tensor(found["1"][rank][model]["outs"][0]).view(TOKENS, Q).double()
            torch.testing.assert_close(got, part, rtol=2**-7, atol=1e-6)


MOVED = """
import importlib, logging
from vllm.plugins import load_general_plugins
from vllm_commext.compat import fits, hooks
logging.basicConfig(level="INFO")  # else what is no warning is lost before vLLM configures its own
stock = fits.digest
hooks.vllm_version = lambda: "0.99.0"
fits.digest = lambda *at: "" if at[1].endswith("OlmoeAttention.__init__") else stock(*at)
load_general_plugins()
olmoe = importlib.import_module("vllm.model_executor.models.olmoe")
backend = importlib.import_module("vllm.model_executor.models.transformers.fusers.rms_norm")
print(olmoe.OlmoeAttention.__init__.__code__.co_filename)
print(backend.RMSNormFuser.fuse.__code__.co_filename)
"""


def test_a_model_that_vllm_has_changed_is_left_to_vllm_and_the_others_are_not() -> None:
    done = python(MOVED, **{TOGGLE: "1"})
    assert done.returncode == 0, done.stderr
    olmoe, backend = done.stdout.splitlines()[-2:]
    assert olmoe.endswith("olmoe.py")
    assert backend.endswith("reduce_rms.py")
    said = "vLLM 0.99.0 has no OlmoeAttention.__init__"
    assert f"commext: reduce_rms leaves OLMoE to vLLM: {said}" in done.stdout + done.stderr
