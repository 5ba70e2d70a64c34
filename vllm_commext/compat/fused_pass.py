"""Our fused op in vLLM's models: a pass among those that vLLM runs over its graphs.

It comes right before vLLM's own all-reduce fusion, which then finds nothing where ours is, and runs
also where vLLM's is off or lacks FlashInfer. vLLM keeps compiled graphs in files by what they
depend on, and inductor too: both get our pass's identity."""

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.config import set_current_vllm_config

import vllm_commext
from vllm_commext.allreduce.fused import graph as fused_graph
from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.allreduce.fused.layout import FusedShape
from vllm_commext.allreduce.limits import ITEM_BYTES
from vllm_commext.compat import fits, hooks
from vllm_commext.compat.monkey_patch import wrap
from vllm_commext.errors import UnsupportedError

logger = logging.getLogger("vllm.commext.allreduce")

CONFIGURE = "vllm.compilation.passes.pass_manager:PostGradPassManager.configure"
IDENTITY = "VLLM_COMMEXT_FUSED_NORM"  # among the names that vLLM's cache key is made of
# Ours needs what these make of a graph, and comes before all others.
EARLIER = ("NoOpEliminationPass", "SequenceParallelismPass", "AsyncTPPass", "AddRMSNormFusionPass")
# What FlashInfer's kernel takes in and ours does not; some builds of vLLM lack it.
QUANTISERS = ("scaled_fp4_quant",)
SOURCES = (__file__, fused_graph.__file__, fused_op.__file__)
QUANTISERS_SOURCE = Path(__file__).with_name("fused_quant.py")
counts: Counter[str] = Counter()
"""All-reduces with a norm that became our op in all graphs of this process: ``replaced``; those of
them that are ``quantised``, and that are ``told`` the weights which their output meets next."""


class FusedNormPass(InductorPass):
    """Replaces an all-reduce and the norm after it by our op, where that was measured fastest."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        self._ops = _ops()
        self._quantisers = _quantisers(self._ops, dtype, device)

    def __call__(self, graph: torch.fx.Graph) -> None:
        tokens = get_pass_context().compile_range
        count = fused_graph.rewrite(graph, self._ops, functools.partial(_serves, tokens))
        marked = self._quantisers.mark(graph) if count and self._quantisers else 0
        absorbed = fused_graph.absorb(graph, self._ops) if marked else 0
        told = fused_graph.name_next_weights(graph, self._ops)
        counts.update(replaced=count, quantised=absorbed, told=told)
        logger.debug(
            "commext: allreduce: %d fused norms, %d of them quantised, in a graph of %s tokens",
            *(count, absorbed, tokens),
        )

    def uuid(self) -> str:
        return identity()


def _ops() -> fused_graph.Ops:
    from vllm.ir import ops as ir_ops

    return fused_graph.Ops(
        torch.ops.vllm.all_reduce.default,
        ir_ops.rms_norm.torch_op,
        ir_ops.fused_add_rms_norm.torch_op,
        torch.ops.vllm_commext.all_reduce_add_rms_norm.default,
        tuple(op.default for name in QUANTISERS if (op := getattr(torch.ops._C, name, None))),
        torch.ops.vllm_commext.quantised.default,
    )


def self_test(device: torch.device) -> None:
    """Raise UnsupportedError unless vLLM's ops are RMSNorms, and its layer writes them."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from vllm.model_executor.layers.layernorm import RMSNorm

    ops, eps = _ops(), 1e-5
    x, residual = torch.randn(2, 3, 64, device=device)
    weight = torch.rand(64, device=device)
    for found, summed in (
        ((ops.norm(x, weight, eps), x), x),
        (ops.add_norm(x, residual, weight, eps), x + residual),
    ):
        wanted = torch.nn.functional.rms_norm(summed, (64,), weight, eps)
        if not (torch.allclose(found[0], wanted, atol=1e-4) and torch.equal(found[1], summed)):
            raise UnsupportedError("vLLM's norms in graphs are other norms than RMSNorm")
    layer = RMSNorm(64, eps)

    def norm_of_sum(part: torch.Tensor, weight: torch.Tensor) -> Any:
        total = torch.ops.vllm.all_reduce(part, group_name="of a test")
        return torch.func.functional_call(layer, {"weight": weight}, (total,))

    graph = make_fx(norm_of_sum, tracing_mode="fake")(x.cpu(), weight.cpu()).graph
    count = fused_graph.rewrite(graph, ops, lambda group, shape: True)
    if count != 1:
        raise UnsupportedError(f"vLLM's layer writes its norm otherwise: found {count} in {graph}")


def _quantisers(ops: fused_graph.Ops, dtype: torch.dtype, device: Any) -> Any:
    """Patterns of quantisers, or None with a line why: norms then keep their number of bits."""
    try:
        # vLLM's kernels must be there before what this imports.
        from vllm_commext.compat.fused_quant import QuantiserPatterns

        return QuantiserPatterns(ops, dtype, device)
    except Exception as error:  # noqa: BLE001 - an engine must start without them
        logger.warning(
            "commext: allreduce: quantization not fused: %s: %s", *(type(error).__name__, error)
        )
        return None


def _serves(tokens: Any, group: str, shape: FusedShape) -> bool:
    norm = fused_op.find_group(group)
    row = shape.hidden * ITEM_BYTES[shape.dtype]
    low, high = tokens.start * row, tokens.end * row
    return norm is not None and norm.policy.is_led(shape.dtype, low, high)


@functools.cache
def _sources() -> str:
    paths = [QUANTISERS_SOURCE, *(Path(str(source)) for source in SOURCES)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def identity() -> str:
    """All on which a graph's change depends, as text: this package, and which group is served by
    which table; empty where none is."""
    served = fused_op.served_groups()
    if not served:
        return ""
    facts = msgspec.json.encode([vllm_commext.__version__, _sources(), served])
    return hashlib.sha256(facts).hexdigest()


def place(passes: Sequence[Any]) -> int:
    kinds = [type(each).__name__ for each in passes]
    return max((index + 1 for index, kind in enumerate(kinds) if kind in EARLIER), default=0)


def _configure(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def configure(self: Any, config: Any) -> None:
        original(self, config)
        if not fused_op.served_groups():
            return
        try:
            model = config.model_config
            dtype = model.dtype if model else torch.get_default_dtype()
            with set_current_vllm_config(config, check_compile=False):
                made = FusedNormPass(dtype, config.device_config.device)
            self.passes.insert(place(self.passes), made)
        except fits.DIFFERENCES as error:
            logger.warning("commext: allreduce: vLLM's own fusion of norms remains: %r", error)

    return configure


def split_ranges(config: Any, most_bytes: Sequence[int], row_bytes: int) -> None:
    """Let vLLM compile graphs of their own on both sides of some sizes of messages, so that each is
    wholly ours or wholly vLLM's; before anything is compiled. It compiles one for each range of
    numbers of tokens anyway; of one token alone it makes no range."""
    compilation = config.compilation_config
    known = list(compilation.compile_ranges_endpoints or ())
    if not known:
        return
    wanted = {max(2, size // row_bytes) for size in most_bytes}
    more = {tokens for tokens in wanted if tokens < max(known)}
    compilation.compile_ranges_endpoints = sorted({*known, *more})


def install() -> None:
    """Let vLLM's models use our op from now on; a second call changes nothing."""
    hooks.add_factor(IDENTITY, identity)
    wrap({CONFIGURE: _configure})
