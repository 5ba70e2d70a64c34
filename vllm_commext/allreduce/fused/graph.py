"""Puts our fused op into a graph of torch's: an all-reduce and the RMSNorm after it become one op.

What is replaced, in a functional graph, whatever the names of the ops are:

    norm(all_reduce(x), weight)                 -> out;  the sum serves its other users
    add_norm(all_reduce(x), residual, weight)   -> out, residual;  the sum has no other user

A weight of ``float(weight) + 1``, Gemma's, becomes the weight itself and a bias of 1. What turns
the norm into numbers of 8 bits, and is marked by an op, goes into ours as well. A norm that is
quantised to 4 bits is left to vLLM, which has one kernel for all of it. At last each of ours is
told which weights its output meets next.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.symbolic_shapes import statically_known_true

from vllm_commext.allreduce.fused.layout import (
    EPILOGUES,
    GROUP,
    GROUP_FP8,
    LEAST_WEIGHT_BYTES,
    STATIC_FP8,
    FusedShape,
)
from vllm_commext.allreduce.limits import ITEM_BYTES

OPERANDS = 5  # of our op, before what is to become of the norm
NEXT_WEIGHT = "next_weight"  # an argument of our op
NEXT_STEPS = 6  # of a graph, from our op to a product of its output
TURNS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)
CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
Serves = Callable[[str, FusedShape], bool]
"""Decides for a group's name and a shape if the op is wanted; the same on all ranks."""


@dataclass(frozen=True)
class Ops:
    """The ops that are looked for, and the one that takes their place; overloads of torch's.

    Attributes:
        all_reduce: takes a tensor and the name of a group, and returns the sum in a new tensor.
        norm: takes a tensor, a weight or None, epsilon and None; returns the norm.
        add_norm: takes a tensor, a residual, a weight or None, epsilon and None; returns the norm
            of the sum of both, and that sum.
        fused: ours, see `fused_op`.
        quantisers: what others fuse with the norm before it, which is then left to them.
        quantised: takes a tensor, a scale or None and one of `fused_layout.EPILOGUES`; returns the
            tensor in 8 bits, and scales. Ours, to mark what `absorb` is to take.
    """

    all_reduce: Any
    norm: Any
    add_norm: Any
    fused: Any
    quantisers: tuple[Any, ...] = ()
    quantised: Any = None


@dataclass(frozen=True)
class _Match:
    """A norm of a sum: its nodes, and the arguments of the op."""

    summed: fx.Node
    norm: fx.Node
    after: fx.Node
    arguments: tuple[Any, ...]
    weight_bias: int
    has_residual: bool


def rewrite(graph: fx.Graph, ops: Ops, serves: Serves) -> int:
    """Replace what can be replaced; returns how often. The graph stays in topological order."""
    count = 0
    for node in list(graph.nodes):
        found = _match(graph, ops, node, serves)
        if found is not None:
            _replace(graph, ops, found)
            count += 1
    return count


def _arguments(node: fx.Node) -> list[Any]:
    """Arguments of a call of an op, in the order of its schema; None for those left out."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [given.get(name) for name in names]


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _match(graph: fx.Graph, ops: Ops, node: fx.Node, serves: Serves) -> _Match | None:
    if _calls(node, ops.norm):
        summed, weight, eps, *others = _arguments(node)
        residual = None
    elif _calls(node, ops.add_norm):
        summed, residual, weight, eps, *others = _arguments(node)
        if not isinstance(residual, fx.Node) or residual is summed:
            return None
    else:
        return None
    if not _calls(summed, ops.all_reduce) or any(other is not None for other in others):
        return None
    if residual is not None:  # the norm alone may use the sum, and its outputs go one by one
        apart = all(_calls(user, operator.getitem) for user in node.users)
        if len(summed.users) != 1 or not apart:
            return None
    if any(_is_quantised(ops, out) for out in ([node] if residual is None else node.users)):
        return None
    x, group = _arguments(summed)[:2]
    weight, weight_bias = _weight_and_bias(weight)
    shape = _shape(x, residual, weight, weight_bias)
    if shape is None or not serves(group, shape):
        return None
    after = _place(graph, [summed, *(each for each in (residual, weight) if each)], summed.users)
    if after is None:
        return None
    arguments = (x, residual, weight, eps, group)
    return _Match(summed, node, after, arguments, weight_bias, residual is not None)


def _is_quantised(ops: Ops, out: fx.Node) -> bool:
    """Return whether a quantiser takes it, itself or wrapped as an op that writes its arguments."""
    return any(
        user.target in ops.quantisers
        or (user.target is auto_functionalized and user.args[0] in ops.quantisers)
        for user in out.users
    )


def _weight_and_bias(weight: Any) -> tuple[Any, int]:
    """``w`` and 1 where the weight is ``float(w) + 1``, else the weight and 0."""
    if not _calls(weight, torch.ops.aten.add.Tensor) or weight.kwargs:
        return weight, 0
    inner, one = weight.args
    wide = _value(weight)
    if one != 1 or not isinstance(inner, fx.Node) or wide is None or wide.dtype != torch.float32:
        return weight, 0
    if any(_calls(inner, cast) for cast in CASTS):
        inner = inner.args[0]
    return inner, 1


def _shape(x: Any, residual: Any, weight: Any, weight_bias: int) -> FusedShape | None:
    """The shape that the op would be called for, or None where it takes no such tensors."""
    value, norm = _value(x), _value(weight)
    if value is None or norm is None or value.dim() != 2:
        return None
    hidden = value.shape[-1]
    if not isinstance(hidden, int) or tuple(norm.shape) != (hidden,):
        return None
    if residual is not None:
        other = _value(residual)
        if other is None or other.dtype != value.dtype or not _are_equal(other.shape, value.shape):
            return None
    dtypes = [str(each.dtype).removeprefix("torch.") for each in (value, norm)]
    if any(dtype not in ITEM_BYTES for dtype in dtypes):
        return None
    return FusedShape(dtypes[0], dtypes[1], hidden, residual is not None, weight_bias)


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are known to be the same, without a new condition on sizes."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in pairs)


def _place(graph: fx.Graph, inputs: list[fx.Node], users: Any) -> fx.Node | None:
    """The last of the inputs, or None where a user comes before it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max(inputs, key=lambda node: order[node])
    return last if order[last] < min(order[user] for user in users) else None


def _replace(graph: fx.Graph, ops: Ops, found: _Match) -> None:
    bias: dict[str, Any] = {"weight_bias": found.weight_bias} if found.weight_bias else {}
    with graph.inserting_after(found.after):
        made = graph.call_function(ops.fused, found.arguments, bias)
    # What else the norm's node knows is of its own arguments, and inductor would take it for ours.
    made.meta = {**_origin(found.norm), "val": _call_fake(ops, found.arguments, bias)}
    if found.has_residual:
        found.norm.replace_all_uses_with(made)
        graph.erase_node(found.norm)
    else:
        out, total = _outputs(graph, made, 2)
        found.norm.replace_all_uses_with(out)
        graph.erase_node(found.norm)
        found.summed.replace_all_uses_with(total)
    graph.erase_node(found.summed)


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _outputs(graph: fx.Graph, made: fx.Node, count: int) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    at = made
    for index in range(count):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (made, index))
        at.meta = {**_origin(made), "val": made.meta["val"][index]}
        nodes.append(at)
    return nodes


def _call_fake(ops: Ops, arguments: Sequence[Any], bias: dict[str, Any]) -> Any:
    values = [_value(each) if isinstance(each, fx.Node) else each for each in arguments]
    mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    assert mode is not None, "expected a graph of fake tensors"
    with mode:
        return ops.fused(*values, **bias)


def can_absorb(ops: Ops, norm: Any, inside: Collection[fx.Node], epilogue: str, scale: Any) -> bool:
    """Check that our op can take in a quantiser, whose nodes `inside` are the only users of the
    norm; `epilogue` is one of `layout.EPILOGUES`, `scale` a node or None."""
    if not _calls(norm, operator.getitem) or norm.args[1] != 0 or len(norm.args[0].args) > OPERANDS:
        return False
    fused = norm.args[0]
    if not _calls(fused, ops.fused) or any(user not in inside for user in norm.users):
        return False
    code, _ = EPILOGUES[epilogue]
    if code == GROUP_FP8 and _value(norm).shape[-1] % GROUP:
        return False
    if code != STATIC_FP8:
        return True
    value = _value(scale)
    is_one = value is not None and value.dtype == torch.float32 and value.numel() == 1
    return is_one and scale < fused


def absorb(graph: fx.Graph, ops: Ops) -> int:
    """Let our op do what is marked as quantised; returns how often."""
    found = graph.find_nodes(op="call_function", target=ops.quantised)
    for marked in found:
        norm, scale, epilogue = marked.args
        fused = norm.args[0]
        arguments, bias = (*fused.args, epilogue, scale), dict(fused.kwargs)
        with graph.inserting_after(fused):
            made = graph.call_function(ops.fused, arguments, bias)
        made.meta = {**_origin(fused), "val": _call_fake(ops, arguments, bias)}
        out, _, scales = _outputs(graph, made, 3)
        for user in list(marked.users):
            user.replace_all_uses_with((out, scales)[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(marked)
        graph.erase_node(norm)
        fused.replace_all_uses_with(made)
        graph.erase_node(fused)
    return len(found)


def name_next_weights(graph: fx.Graph, ops: Ops) -> int:
    """Tell each of our ops which of the graph's inputs its output is multiplied by next, and return
    the number of ops that know one. Comes last, as no other change looks at it."""
    count = 0
    for fused in graph.find_nodes(op="call_function", target=ops.fused):
        weight = _next_weight(fused)
        if weight is not None:
            fused.kwargs = {**fused.kwargs, NEXT_WEIGHT: weight}
            count += 1
    return count


def _next_weight(fused: fx.Node) -> fx.Node | None:
    """The first large matrix that meets what is made of the op's first output."""
    hidden = _value(fused.args[0]).shape[-1]
    nodes = [user for user in fused.users if _calls(user, operator.getitem) and user.args[1] == 0]
    for _ in range(NEXT_STEPS):
        users = list(dict.fromkeys(user for node in nodes for user in node.users))
        for user in sorted(users):
            for given in map(_turned, user.all_input_nodes):
                if given.op in ("placeholder", "get_attr") and _is_matrix(given, hidden):
                    return given
        nodes = users
    return None


def _turned(node: fx.Node) -> fx.Node:
    """The tensor that a node is but another view of."""
    while node.op == "call_function" and node.target in TURNS:
        (node,) = node.all_input_nodes
    return node


def _is_matrix(node: fx.Node, hidden: int) -> bool:
    """Return whether it is a large one of the model's, with a row or a column for each element."""
    value = _value(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    sizes: list[Any] = list(value.shape)  # some may be symbols
    if not all(isinstance(size, int) for size in sizes) or hidden not in sizes:
        return False
    return sizes[0] * sizes[1] * value.itemsize >= LEAST_WEIGHT_BYTES
