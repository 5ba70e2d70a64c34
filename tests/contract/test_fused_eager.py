"""Our fused op behind the helpers of vLLM's models that run without compiler passes."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.dispatcher import FusedPolicy
from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.allreduce.fused.kernels import Operands, Outputs
from vllm_commext.allreduce.fused.layout import FusedShape
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.compat import fits, fused_pass
from vllm_commext.compat.monkey_patch import is_patched, restore

GROUP, HIDDEN, MOST = "tp:of the test", 64, 4
SYMBOLS = [
    pytest.param(fused_pass.NORM, id="fused_allreduce_rms_norm"),
    pytest.param(fused_pass.GEMMA, id="fused_allreduce_gemma_rms_norm"),
]


class Twofold:
    """In place of our kernels: two ranks with the same rows, up to `MOST` of them."""

    name = limits.FUSED_PUSH

    def __init__(self) -> None:
        self.runs = 0

    def prepare(self, shape: FusedShape) -> None:
        del shape

    def takes(self, shape: FusedShape, num_rows: int) -> bool:
        del shape
        return num_rows <= MOST

    def run(self, given: Operands) -> Outputs:
        self.runs += 1
        return fused_op.steps(given._replace(x=given.x + given.x))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twofold]:
    """What serves the group that the helpers find."""
    made = Twofold()
    group = SimpleNamespace(unique_name=GROUP)
    monkeypatch.setattr(fused_pass, "get_tp_group", lambda: group)
    rows = (Row(2 * MOST * HIDDEN * 4, (limits.FUSED_PUSH,)), Row(1 << 30, (limits.UNFUSED,)))
    policy = FusedPolicy(Table(2, {}, "test", {"float32": rows}))
    apart = fused_op.after_all_reduce(lambda x: x + x)
    fused_op.register_group(GROUP, fused_op.FusedNorm(apart, made, policy))
    fused_pass.install_helpers()
    fused_pass.install_helpers()
    yield made
    fused_op.forget_group(GROUP)
    for symbol in fused_pass.BIASES:
        if is_patched(symbol):
            restore(symbol)


def helper(monkeypatch: pytest.MonkeyPatch, symbol: str) -> tuple[Any, Any]:
    """A helper of vLLM's, which sums over two ranks with the same rows, and a norm for it."""
    name, _, function = symbol.partition(":")
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(module, "tensor_model_parallel_all_reduce", lambda x: x + x)
    kind = GemmaRMSNorm if fused_pass.BIASES[symbol] else RMSNorm
    with set_current_vllm_config(VllmConfig()):
        norm = kind(HIDDEN, eps=1e-5)
    norm.weight.data = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(2))
    return getattr(module, function), norm


@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize(("rows", "served"), [(1, 1), (MOST, 1), (MOST + 1, 0), (2 * MOST + 1, 0)])
def test_our_kernel_serves_what_it_takes_and_leads(
    kernels: Twofold, monkeypatch: pytest.MonkeyPatch, symbol: str, rows: int, served: int
) -> None:
    call, norm = helper(monkeypatch, symbol)
    generator = torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, HIDDEN, generator=generator) for _ in range(2))
    with torch.inference_mode():
        out, new = call(x.clone(), residual.clone(), norm)
    assert kernels.runs == served
    want = 2 * x + residual
    weight = norm.weight + fused_pass.BIASES[symbol]
    torch.testing.assert_close(new, want)
    torch.testing.assert_close(
        out, torch.nn.functional.rms_norm(want, (HIDDEN,), weight, 1e-5), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_without_our_group_the_helper_is_vllms(
    kernels: Twofold, monkeypatch: pytest.MonkeyPatch, symbol: str
) -> None:
    fused_op.forget_group(GROUP)
    call, norm = helper(monkeypatch, symbol)
    with torch.inference_mode():
        _, new = call(torch.ones(2, HIDDEN), torch.ones(2, HIDDEN), norm)
    assert (kernels.runs, new[0, 0].item()) == (0, 3.0)


def test_this_vllm_has_the_helpers() -> None:
    assert fits.why_not("fused_eager") == ""
