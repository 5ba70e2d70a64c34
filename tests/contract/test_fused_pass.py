"""Our fused op in models that vLLM compiles, by vLLM's real passes."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from vllm import envs
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.ir import ops as ir_ops
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.dispatcher import FusedPolicy
from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.allreduce.fused.graph import NEXT_WEIGHT
from vllm_commext.allreduce.fused.layout import LEAST_WEIGHT_BYTES
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.compat import fused_pass
from vllm_commext.compat.monkey_patch import is_patched, restore
from vllm_commext.errors import UnsupportedError

GROUP, LAYERS = "tp:of the test", 4
OURS = torch.ops.vllm_commext.all_reduce_add_rms_norm


def model(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """What AOTAutograd makes of a model: vLLM's ops, and nothing that writes into its input."""
    total = torch.ops.vllm.all_reduce(x, group_name=GROUP)
    out, residual = ir_ops.rms_norm.torch_op(total, weights[0], 1e-5), total
    for weight in weights[1:]:
        total = torch.ops.vllm.all_reduce(out.sin(), group_name=GROUP)
        out, residual = ir_ops.fused_add_rms_norm.torch_op(total, residual, weight, 1e-5)
    return out


@pytest.fixture
def served() -> Iterator[Callable[[str], None]]:
    """Lets a group be served by a table with this one first; undone afterwards."""

    def serve(first: str) -> None:
        rows = (Row(1 << 30, (first,)),)
        table = Table(2, {}, "test", {"bfloat16": rows, "float32": rows})
        apart = fused_op.after_all_reduce(lambda x: x + x)
        fused_op.register_group(GROUP, fused_op.FusedNorm(apart, None, FusedPolicy(table)))
        fused_pass.install()
        fused_pass.install()

    yield serve
    fused_op.forget_group(GROUP)
    envs.environment_variables.pop(fused_pass.IDENTITY, None)
    if is_patched(fused_pass.CONFIGURE):
        restore(fused_pass.CONFIGURE)


def run_passes() -> tuple[torch.fx.GraphModule, str]:
    """vLLM's own pass manager over a graph, and what it tells inductor's cache."""
    arguments = [torch.randn(3, 64), *(torch.rand(64) for _ in range(LAYERS))]
    arguments = [each.to(torch.bfloat16) for each in arguments]
    module = make_fx(model, tracing_mode="fake")(*arguments)
    current_platform.import_kernels()  # vLLM's last pass looks at the ops of its kernels
    manager = PostGradPassManager()
    manager.configure(VllmConfig())
    with pass_context(Range(1, 32)):
        manager(module.graph)
        return module, manager.uuid()


def count(module: torch.fx.GraphModule, op: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=op))


def test_vllms_pass_manager_runs_ours(served: Callable[[str], None]) -> None:
    fused, summed = OURS.default, torch.ops.vllm.all_reduce.default
    module, without = run_passes()
    assert (count(module, fused), count(module, summed)) == (0, LAYERS)
    factors = envs.compile_factors()
    served(limits.UNFUSED)
    module, unwanted = run_passes()
    assert (count(module, fused), count(module, summed)) == (0, LAYERS)
    served(limits.FUSED_PUSH)
    module, wanted = run_passes()
    assert (count(module, fused), count(module, summed)) == (LAYERS, 0)
    assert len({without, unwanted, wanted}) == 3
    assert envs.compile_factors() == {**factors, fused_pass.IDENTITY: fused_pass.identity()}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    weights = [torch.rand(64, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]
    module.recompile()
    want, residual = x.float() * 2, x.float() * 2
    for index, weight in enumerate(weights):
        if index:
            residual = want.sin() * 2 + residual
        norm = torch.nn.functional.rms_norm(residual, (64,), eps=1e-5)
        want = norm * weight.float()
    assert (module(x, *weights).float() - want).abs().max() < 0.05


def test_the_op_is_told_of_the_weights_that_come_next(served: Callable[[str], None]) -> None:
    rows = LEAST_WEIGHT_BYTES // 64 // 2

    def layer(x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.ops.vllm.all_reduce(x, group_name=GROUP)
        out, _ = ir_ops.fused_add_rms_norm.torch_op(total, x, norm, 1e-5)
        return torch.nn.functional.linear(out, weight)

    sizes = ((3, 64), (64,), (rows, 64))
    arguments = [torch.ones(size, dtype=torch.bfloat16) for size in sizes]
    module = make_fx(layer, tracing_mode="fake")(*arguments)
    served(limits.FUSED_PUSH)
    current_platform.import_kernels()
    manager = PostGradPassManager()
    manager.configure(VllmConfig())
    before = fused_pass.counts["told"]
    with pass_context(Range(1, 32)):
        manager(module.graph)
    (call,) = module.graph.find_nodes(op="call_function", target=OURS.default)
    placeholders = module.graph.find_nodes(op="placeholder")
    assert call.kwargs[NEXT_WEIGHT] is placeholders[2]
    assert fused_pass.counts["told"] == before + 1
    module.recompile()
    assert module(*arguments).shape == (3, rows)


@pytest.mark.parametrize("epilogue", ["fp8_static", "fp8_row"])
@pytest.mark.parametrize("used", [False, True], ids=["quantised alone", "and used"])
def test_a_quantiser_as_vllm_writes_it_is_found(
    served: Callable[[str], None], epilogue: str, used: bool
) -> None:
    """By torch's ops; of vLLM's own ops builds for CPUs have the names alone."""
    current_platform.import_kernels()
    from vllm_commext.compat.fused_quant import KINDS, MatcherQuantFP8

    served(limits.FUSED_PUSH)
    with set_current_vllm_config(VllmConfig(), check_compile=False):
        quantiser = MatcherQuantFP8(KINDS[epilogue][0], enabled=False)

    def quantised_model(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        total = torch.ops.vllm.all_reduce(x, group_name=GROUP)
        out, residual = ir_ops.fused_add_rms_norm.torch_op(total, x, weight, 1e-5)
        q, scales = quantiser(out, scale) if epilogue == "fp8_static" else quantiser(out)
        return q.float() * scales, residual, *([out + 1] if used else [])

    arguments = (torch.randn(3, 64), torch.rand(64), torch.tensor([0.05]))
    module = make_fx(
        quantised_model, tracing_mode="fake", decomposition_table=select_decomp_table()
    )(*arguments)
    module.graph.eliminate_dead_code()
    manager = PostGradPassManager()
    manager.configure(VllmConfig())
    (ours,) = (each for each in manager.passes if isinstance(each, fused_pass.FusedNormPass))
    with pass_context(Range(1, 32)):
        ours(module.graph)
    (call,) = module.graph.find_nodes(op="call_function", target=OURS.default)
    assert (epilogue in call.args) == (not used)
    module.recompile()
    x, weight, _ = arguments
    want = torch.nn.functional.rms_norm(3 * x, (64,), weight, 1e-5)
    if not used:
        torch.testing.assert_close(module(*arguments)[0], want, rtol=2**-4, atol=0.05)


def passes(*names: str) -> list[Any]:
    return [type(name, (), {})() for name in names]


@pytest.mark.parametrize(
    ("theirs", "place"),
    [
        ((), 0),
        (("AllReduceFusionPass",), 0),
        (("NoOpEliminationPass", "AllReduceFusionPass", "RMSNormQuantFusionPass"), 1),
        (("NoOpEliminationPass", "AddRMSNormFusionPass", "AllReduceFusionPass"), 2),
        (("NoOpEliminationPass", "SequenceParallelismPass", "AsyncTPPass"), 3),
        (("RMSNormQuantFusionPass", "ActivationQuantFusionPass"), 0),
    ],
    ids=str,
)
def test_ours_comes_before_vllms_fusion(theirs: tuple[str, ...], place: int) -> None:
    assert fused_pass.place(passes(*theirs)) == place


def test_vllms_layer_and_ops_pass_our_test() -> None:
    with set_current_vllm_config(VllmConfig()):
        fused_pass.self_test(torch.device("cpu"))


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_a_norm_of_another_meaning_does_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One that adds 1 to its weights, for an example: names and signatures are the same."""
    stock = getattr(ir_ops, name).torch_op

    def other(*args: Any) -> Any:
        *tensors, weight, eps = args
        return stock(*tensors, weight + 1, eps)

    monkeypatch.setattr(ir_ops, name, SimpleNamespace(torch_op=other))
    with (
        set_current_vllm_config(VllmConfig()),
        pytest.raises(UnsupportedError, match="other norms than RMSNorm"),
    ):
        fused_pass.self_test(torch.device("cpu"))


def test_a_norm_that_its_layer_writes_otherwise_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: x * self.weight)
    with (
        set_current_vllm_config(VllmConfig()),
        pytest.raises(UnsupportedError, match="writes its norm otherwise: found 0"),
    ):
        fused_pass.self_test(torch.device("cpu"))
