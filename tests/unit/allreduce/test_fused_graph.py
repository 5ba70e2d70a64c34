"""The rewriting of graphs: what is replaced, what is left alone, and that the numbers stay."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kit.examples import examples
from vllm_commext.allreduce.dispatcher import FusedPolicy
from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.allreduce.fused.graph import (
    NEXT_WEIGHT,
    Ops,
    absorb,
    can_absorb,
    name_next_weights,
    rewrite,
)
from vllm_commext.allreduce.fused.kernels import Operands
from vllm_commext.allreduce.fused.layout import EPILOGUES, LEAST_WEIGHT_BYTES, FusedShape

OURS, OTHER, EPS, HIDDEN = "ours", "another", 1e-5, 16
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
_library = torch.library.Library("commext_graph_test", "DEF")
Tensor = torch.Tensor


def _shape(x: Tensor, weight: Tensor | None, residual: bool) -> FusedShape:
    dtype, wide = (
        str(each.dtype).removeprefix("torch.") for each in (x, x if weight is None else weight)
    )
    return FusedShape(dtype, wide, x.shape[-1], residual)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return x * 2 if group == OURS else x * 3


def _add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, _: int | None = None
) -> tuple[Tensor, Tensor]:
    weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight
    shape = _shape(x, weight, residual is not None)
    found = fused_op.steps(Operands(shape, x.clone(), residual, weight, eps))
    return found.out, found.residual


def _quantise_into(out: Tensor, x: Tensor) -> None:
    out.copy_(x.round())


_library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
_library.define("norm(Tensor x, Tensor? w, float eps, int? width=None) -> Tensor")
_library.define(
    "add_norm(Tensor x, Tensor r, Tensor? w, float eps, int? width=None) -> (Tensor, Tensor)"
)
_library.define("quantise(Tensor x) -> Tensor")
_library.define("quantise_into(Tensor(a!) out, Tensor x) -> ()")
_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "norm": lambda x, *more: _add_norm(x, None, *more)[0],
    "add_norm": _add_norm,
    "quantise": lambda x: x.round(),
    "quantise_into": _quantise_into,
}
for _name, _function in _IMPLEMENTATIONS.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
TEST = torch.ops.commext_graph_test
FUSED = torch.ops.vllm_commext.all_reduce_add_rms_norm.default
OPS = Ops(
    *(TEST.all_reduce.default, TEST.norm.default, TEST.add_norm.default, FUSED),
    quantisers=(TEST.quantise.default, TEST.quantise_into.default),
    quantised=torch.ops.vllm_commext.quantised.default,
)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    apart = fused_op.after_all_reduce(lambda x: _all_reduce(x, OURS))
    fused_op.register_group(OURS, fused_op.FusedNorm(apart, None, FusedPolicy(None)))
    yield
    fused_op.forget_group(OURS)


@dataclass(frozen=True)
class Layer:
    """An all-reduce and a norm, and what is unusual about them."""

    residual: bool
    gemma: bool = False  # the weight is ``float(weight) + 1``
    spoiled: str = ""  # why the two must stay as they are
    early: bool = False  # the sum has a user before the norm: no hindrance without a residual

    @property
    def is_replaced(self) -> bool:
        return not self.spoiled and not (self.residual and self.early)


SPOILED = ("group", "no weight", "width", "copied", "twice", "float64 weight")
SPOILED += ("quantised", "quantised into")


def run_layer(layer: Layer, x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    total = TEST.all_reduce(x.tanh(), OTHER if layer.spoiled == "group" else OURS)
    more = [total + 1] if layer.early else []
    if layer.spoiled == "copied":
        total = total.clone()
    used: Tensor | None = weight.float() + 1.0 if layer.gemma else weight
    if layer.spoiled == "no weight":
        used = None
    if layer.spoiled == "float64 weight":
        used = weight.double()
    width = HIDDEN if layer.spoiled == "width" else None
    if not layer.residual:
        out = TEST.norm(total, used, EPS, width)
        return [quantised(out, layer.spoiled), total, *more]
    other = total if layer.spoiled == "twice" else residual
    out, new = TEST.add_norm(total, other, used, EPS, width)
    return [quantised(out, layer.spoiled), new, *more]


def quantised(out: Tensor, spoiled: str) -> Tensor:
    if spoiled == "quantised":
        return TEST.quantise(out)
    if spoiled == "quantised into":
        found = auto_functionalized(TEST.quantise_into.default, out=torch.empty_like(out), x=out)
        return found[1]
    return out


def graph_of(layers: list[Layer], dtype: torch.dtype) -> tuple[torch.fx.GraphModule, list[Any]]:
    generator = torch.Generator().manual_seed(len(layers))
    arguments = [torch.randn(3, HIDDEN, generator=generator).to(dtype) for _ in range(2)]
    weights = [torch.randn(HIDDEN, generator=generator).to(dtype) for _ in layers]

    def model(x: Tensor, residual: Tensor, *weights: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for layer, weight in zip(layers, weights, strict=True):
            x, residual, *more = run_layer(layer, x, residual, weight)
            found += more
        return [x, residual, *found]

    every = [*arguments, *weights]
    return make_fx(model, tracing_mode="fake")(*every), every


def fused_calls(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=FUSED)


def check(layers: list[Layer], dtype: torch.dtype) -> torch.fx.GraphModule:
    """As many are replaced as there should be, and every number stays."""
    module, arguments = graph_of(layers, dtype)
    before = module(*arguments)
    count = rewrite(module.graph, OPS, lambda group, _: group == OURS)
    assert count == sum(layer.is_replaced for layer in layers)
    module.graph.lint()
    assert len(fused_calls(module)) == count
    assert len(module.graph.find_nodes(op="call_function", target=OPS.all_reduce)) == (
        len(layers) - count
    )
    module.recompile()
    after = module(*arguments)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    for node in fused_calls(module):
        for each, value in zip(node.users, node.meta["val"], strict=False):
            assert each.meta["val"].shape == value.shape
    assert rewrite(module.graph, OPS, lambda *_: True) == sum(
        layer.spoiled == "group" and replace(layer, spoiled="").is_replaced for layer in layers
    )
    return module


layers = st.builds(
    Layer,
    residual=st.booleans(),
    gemma=st.booleans(),
    spoiled=st.sampled_from(("", "", "", "group", "copied", "no weight", "width")),
    early=st.booleans(),
)


@examples(8)
@given(st.lists(layers, max_size=5), st.sampled_from([BFLOAT16, torch.float16, FLOAT32]))
def test_what_can_be_replaced_is_and_the_numbers_stay(
    model: list[Layer], dtype: torch.dtype
) -> None:
    check(model, dtype)


@pytest.mark.parametrize(
    ("spoiled", "residual"),
    [(each, residual) for each in SPOILED for residual in (each == "twice", True)],
)
def test_what_the_op_does_not_do_stays_as_it_is(spoiled: str, residual: bool) -> None:
    layer = Layer(residual, spoiled=spoiled)
    check([Layer(True), layer, Layer(True)], BFLOAT16)


def test_gemmas_weight_becomes_a_bias() -> None:
    for dtype in (BFLOAT16, FLOAT32):
        module = check([Layer(False, gemma=True), Layer(True, gemma=True)], dtype)
        module.graph.eliminate_dead_code()
        for node in fused_calls(module):
            assert node.kwargs == {"weight_bias": 1}
            assert node.args[2].op == "placeholder"  # pyright: ignore
        assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)


def test_a_dtype_or_length_that_nobody_measured_stays() -> None:
    module, _ = graph_of([Layer(True)], BFLOAT16)
    asked: list[FusedShape] = []

    def never(group: str, shape: FusedShape) -> bool:
        asked.append(shape)
        return group != OURS

    assert rewrite(module.graph, OPS, never) == 0
    assert asked == [FusedShape("bfloat16", "bfloat16", HIDDEN)]
    integers = make_fx(
        lambda x, w: TEST.norm(TEST.all_reduce(x, OURS), w, EPS, None), tracing_mode="fake"
    )(torch.ones(2, 4, 4), torch.ones(4))
    assert rewrite(integers.graph, OPS, lambda *_: True) == 0


def rewritten(model: Callable[..., Any], *arguments: Tensor) -> int:
    module = make_fx(model, tracing_mode="fake")(*arguments)
    return rewrite(module.graph, OPS, lambda *_: True)


def test_a_residual_of_another_kind_stays() -> None:
    x, weight = torch.ones(2, HIDDEN, dtype=BFLOAT16), torch.ones(HIDDEN, dtype=BFLOAT16)

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return TEST.add_norm(TEST.all_reduce(x, OURS), residual, weight, EPS, None)

    assert rewritten(model, x, x, weight) == 1
    assert rewritten(model, x, x.float(), weight) == 0
    assert rewritten(model, x, x[:1], weight) == 0
    assert rewritten(model, x.double(), x.double(), weight) == 0
    assert rewritten(model, x, x, weight[:1]) == 0


def test_a_user_before_the_weight_is_there_stays_before_it() -> None:
    """The op cannot come before its weight, and what uses the sum cannot come after the op."""

    def model(x: Tensor, weight: Tensor) -> Any:
        total = TEST.all_reduce(x, OURS)
        early = total + 1
        return early, TEST.norm(total, weight * 2, EPS, None)

    x, weight = torch.ones(2, HIDDEN), torch.ones(HIDDEN)
    assert rewritten(model, x, weight) == 0


WIDE = 256
CODES = list(EPILOGUES)[1:]


def marked(
    epilogue: str, residual: bool, spoiled: str = ""
) -> tuple[torch.fx.GraphModule, bool, tuple[Tensor, ...]]:
    """A norm whose quantiser is marked, rewritten; whether our op could do both; and arguments."""
    generator = torch.Generator().manual_seed(1)
    x, other = (torch.randn(3, WIDE, generator=generator).to(BFLOAT16) for _ in range(2))
    weight, scale = torch.ones(WIDE, dtype=BFLOAT16), torch.tensor([0.05])

    def model(x: Tensor, other: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = TEST.all_reduce(x, OTHER if spoiled == "group" else OURS)
        if residual:
            out, new = TEST.add_norm(total, other, weight, EPS, None)
        else:
            out, new = TEST.norm(total, weight, EPS, None), total
        given = scale * 2 if spoiled == "late scale" else scale
        quantise = OPS.quantised(out, given if epilogue == "fp8_static" else None, epilogue)
        more = [out + 1] if spoiled == "used" else []
        return [*quantise, new, *more]

    arguments = (x, other, weight, scale)
    module = make_fx(model, tracing_mode="fake")(*arguments)
    assert rewrite(module.graph, OPS, lambda group, _: group == OURS) == (spoiled != "group")
    (node,) = module.graph.find_nodes(op="call_function", target=OPS.quantised)
    norm, given, _ = node.args
    return module, can_absorb(OPS, norm, [node], epilogue, given), arguments


@pytest.mark.parametrize("epilogue", CODES)
@pytest.mark.parametrize("residual", [False, True])
def test_a_quantiser_goes_into_the_op(epilogue: str, residual: bool) -> None:
    module, fits, (x, other, weight, scale) = marked(epilogue, residual)
    assert fits
    assert absorb(module.graph, OPS) == 1
    module.graph.lint()
    module.recompile()
    (call,) = fused_calls(module)
    assert call.args[5] == epilogue
    out, scales, new = module(x, other, weight, scale)
    given = scale if epilogue == "fp8_static" else None
    want = FUSED(x, other if residual else None, weight, EPS, OURS, epilogue, given)
    for mine, right in zip((out, new, scales), want, strict=True):
        assert torch.equal(mine.float(), right.float())
        assert mine.stride() == right.stride()
    assert absorb(module.graph, OPS) == 0


@pytest.mark.parametrize("spoiled", ["group", "used", "late scale"])
def test_a_quantiser_that_the_op_is_not_stays(spoiled: str) -> None:
    epilogue = "fp8_row" if spoiled in ("group", "used") else "fp8_static"
    for residual in (False, True):
        # What comes after the all-reduce of a norm without a residual comes after the op.
        assert not marked(epilogue, residual, spoiled)[1]


class TestNextWeights:
    """Our op is told of the first large matrix that its output meets, and of no other."""

    LARGE = LEAST_WEIGHT_BYTES // HIDDEN // 4

    def told(self, model: Callable[..., Tensor], *weights: Tensor) -> list[str | None]:
        """For each of our ops, the name of the input that it was told of."""

        def whole(x: Tensor, residual: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
            out, residual = TEST.add_norm(TEST.all_reduce(x, OURS), residual, norm, EPS)
            return model(out, residual, norm, *weights)

        rows = torch.ones(3, HIDDEN)
        arguments = [rows, rows, torch.ones(HIDDEN), *weights]
        module = make_fx(whole, tracing_mode="fake")(*arguments)
        rewrite(module.graph, OPS, lambda group, _: group == OURS)
        count = name_next_weights(module.graph, OPS)
        module.graph.lint()
        found = [call.kwargs.get(NEXT_WEIGHT) for call in fused_calls(module)]
        assert count == sum(weight is not None for weight in found)
        module.recompile()
        assert torch.equal(module(*arguments), whole(*arguments))
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return [
            None if weight is None else "xrn0123"[names.index(weight.name)]  # pyright: ignore
            for weight in found
        ]

    def large(self) -> Tensor:
        return torch.ones(self.LARGE, HIDDEN)

    def test_of_a_product_and_of_its_transposed(self) -> None:
        weight = self.large()
        assert self.told(lambda out, _, __, w: out @ w.t(), weight) == ["0"]
        assert self.told(lambda out, _, __, w: out @ w, weight.t().contiguous()) == ["0"]

    def test_behind_a_quantiser_and_only_the_first(self) -> None:
        def model(out: Tensor, residual: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
            small, first, second = weights
            gates = out @ small.t()
            made = (out * 2).round() @ first.t()
            return gates.sum() + (made[:, :HIDDEN] @ second.t()).sum()

        small = torch.ones(8, HIDDEN)
        assert self.told(model, small, self.large(), self.large()) == ["1"]

    def test_each_of_several(self) -> None:
        def model(out: Tensor, residual: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
            made = (out @ weights[0].t())[:, :HIDDEN]
            out, _ = TEST.add_norm(TEST.all_reduce(made, OURS), residual, norm, EPS)
            return out @ weights[1].t()

        assert self.told(model, self.large(), self.large()) == ["0", "1"]

    def test_of_nothing_where_there_is_none(self) -> None:
        assert self.told(lambda out, residual, _: out + residual) == [None]
        assert self.told(lambda out, _, __, w: out @ w.t(), torch.ones(8, HIDDEN)) == [None]

        def made(out: Tensor, _: Tensor, __: Tensor, w: Tensor) -> Tensor:
            return out @ (w * 2).t()

        assert self.told(made, self.large()) == [None]
