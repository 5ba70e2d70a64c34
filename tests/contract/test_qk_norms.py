"""Our op in place of vLLM's fused op in MiniMax-M2 (_MINIMAX_FUSED_AR_RMS_QK,
MINIMAX_QK_NORM_MAX_TOKEN_NUM, get_allreduce_workspace)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.qk_norms_rank import TOKENS, Q, wanted
from tests.contract.vllm_process import ranks
from tests.kit.ports import free_port

pytest.importorskip("cuda.bindings", reason="vLLM's own norm needs cuda-bindings to be imported")

RANK = Path(__file__).with_name("qk_norms_rank.py")
Found = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each rank found with the toggle on, and off."""
    on, off = (ranks(RANK, 2, str(free_port()), VLLM_COMMEXT_REDUCE_RMS=each) for each in "10")
    return list(zip(on, off, strict=True))


def test_the_models_norm_gives_the_same_with_the_op_and_vllm_sums_nothing(found: Found) -> None:
    for (mine, theirs), part in zip(found, wanted(), strict=True):
        for got, want in zip(mine["outs"], theirs["outs"], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2**-7, atol=1e-6)
        whole = torch.tensor(mine["outs"][0]).view(TOKENS, Q).double()
        torch.testing.assert_close(whole, part, rtol=2**-7, atol=1e-6)
        assert mine["sums"] == 0 < theirs["sums"]


def test_the_log_and_the_key_of_compiled_graphs_say_that_it_serves(found: Found) -> None:
    for mine, theirs in found:
        assert mine["told"] == ["commext: reduce_rms ran for MiniMax-M2"]
        assert set(json.loads(mine["identity"])) == {"MiniMax-M2"}
        assert (theirs["told"], theirs["identity"]) == ([], "")
        assert mine["bound"] > 1 << 20 > theirs["bound"] == 2048
