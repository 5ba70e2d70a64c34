"""vLLM's models with our op for the norms whose rows tensor parallelism has spread over the ranks.

Where the norm of Q and of K runs over all heads, vLLM gathers whole Q and K on every rank,
normalises them and throws away all but a part; the op exchanges two numbers a token instead. Each
model is given the op when vLLM imports it.

A layer's `commext_handle` is that of its workspace, and 0 where vLLM's own way is taken.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_commext.collective import Collective
from vllm_commext.compat import fits, hooks
from vllm_commext.compat.monkey_patch import original_of, patch
from vllm_commext.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from vllm_commext.reduce_rms.workspace import Workspace

logger = logging.getLogger("vllm.commext.reduce_rms")

# What vLLM does without the op.
FUSED = "vLLM's fused op"  # MiniMax-M2: Q and K in one launch of vLLM's own
GATHERED = "gathered Q and K"  # whole rows on every rank, normalised and thrown away but for a part
KINDS = (FUSED, GATHERED)

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
_FASTER: dict[tuple[str, str], tuple[int, ...]] = {(FUSED, H200): (2, 4), (GATHERED, H100): (2,)}
_DTYPES = ("bfloat16",)

QK_NORMS = ("q_norm", "k_norm")
FUSERS = "vllm.model_executor.models.transformers.fusers.rms_norm"
OLMOE = "vllm.model_executor.models.olmoe:OlmoeAttention"
TakePart = Callable[..., "Workspace | None"]
Tell = Callable[[str], None]
Give = tuple[TakePart, Tell]
Norm = Callable[..., Any]
ATTENTION, TRANSFORMERS = "OLMoE", "the Transformers backend"
_failures: dict[str, str] = {}
"""By model, what its first layer's trial found; empty where that was all well."""


def is_faster(kind: str, gpu: str, world_size: int, dtype: str) -> bool:
    """True where the op was measured faster than `kind`, one of `KINDS`, at every number of
    tokens, in CUDA graphs: ``benchmarks/reduce_rms.py``, results of 2026-11-22, and
    ``benchmarks/spread_norms.py``, of 2026-11-24."""
    return dtype in _DTYPES and world_size in _FASTER.get((kind, gpu), ())


def _serve(
    model: str, kind: str, layer: Any, norms: tuple[Norm, Norm], widths: Sequence[int], give: Give
) -> None:
    """Let a layer use the op where its group has a workspace and the op gives what vLLM's norm
    does; collective. *norms*: vLLM's and ours, which take rows of these widths; *kind*: see
    `reduce_rms.take_part`."""
    from vllm.distributed.parallel_state import get_tp_group

    take_part, tell = give
    group = get_tp_group()
    made = take_part(model, kind, group.rank_in_group, group.world_size, group.cpu_group)
    layer.commext_handle = made.handle if made is not None else 0
    if made is None:
        return
    if fits.must_test_itself(f"norm of {model}") and model not in _failures:
        _failures[model] = _try_out(layer, norms, widths, Collective.over(group.cpu_group))
        if _failures[model] and group.rank_in_group == 0:
            logger.warning("commext: reduce_rms leaves %s to vLLM: %s", model, _failures[model])
    if _failures.get(model):
        layer.commext_handle = 0
    else:
        tell(model)


def _try_out(layer: Any, norms: tuple[Norm, Norm], widths: Sequence[int], ranks: Collective) -> str:
    """Compare both norms on random rows and weights; returns what differs. Collective."""
    import torch

    parts = [getattr(layer, name) for name in QK_NORMS if hasattr(layer, name)] or [layer]
    weights = [part.weight.data for part in parts]

    def compare() -> None:
        rows = [torch.randn(5, width).to(weights[0]) for width in widths]
        for part, kept in zip(parts, weights, strict=True):
            part.weight.data = torch.rand_like(kept)
        try:
            wanted, found = (norm(layer, *rows) for norm in norms)
        finally:
            for part, kept in zip(parts, weights, strict=True):
                part.weight.data = kept
        pairs = [(wanted, found)] if torch.is_tensor(wanted) else zip(wanted, found, strict=True)
        if not all(torch.allclose(one, other, 1e-2, 1e-2) for one, other in pairs):
            raise UnsupportedError("it differs from vLLM's own on random rows")

    try:
        ranks.agree(compare)
    except UnsupportedError as error:
        return str(error)
    return ""


def _shard(weight: "torch.Tensor", rank: int, size: int) -> "torch.Tensor":
    return weight[rank * size : (rank + 1) * size]


def _spreads_whole_rows(attention: Any) -> bool:
    """Check that a rank's Q and K are parts of rows that are normed as a whole, and no copies."""
    norms = [getattr(attention, name, None) for name in QK_NORMS]
    if attention.tp_size == 1:
        return False
    wanted = [size * attention.tp_size for size in (attention.q_size, attention.kv_size)]
    return [norm.weight.numel() for norm in norms if norm is not None] == wanted


def _install_attention(give: Give) -> None:
    stock_init = original_of(f"{OLMOE}.__init__")
    stock_norm = original_of(f"{OLMOE}._apply_qk_norm")

    @functools.wraps(stock_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - vLLM's name
        stock_init(self, *args, **kwargs)
        self.commext_handle = 0
        if _spreads_whole_rows(self):
            norms, widths = (stock_norm, _apply_qk_norm), (self.q_size, self.kv_size)
            _serve(ATTENTION, GATHERED, self, norms, widths, give)

    @functools.wraps(stock_norm)
    def _apply_qk_norm(self: Any, q: "torch.Tensor", k: "torch.Tensor") -> Any:
        import torch

        if not self.commext_handle:
            return stock_norm(self, q, k)
        return torch.ops.vllm_commext.split_qk_rms_norm(
            q,
            k,
            _shard(self.q_norm.weight, self.tp_rank, self.q_size),
            _shard(self.k_norm.weight, self.tp_rank, self.kv_size),
            self.commext_handle,
            self.q_norm.variance_epsilon,
        )

    patch({f"{OLMOE}.__init__": __init__, f"{OLMOE}._apply_qk_norm": _apply_qk_norm})


def _install_transformers(give: Give) -> None:
    stock_fuse = original_of(f"{FUSERS}:RMSNormFuser.fuse")
    stock_forward = original_of(f"{FUSERS}:TPAwareNormMixin.forward")

    @functools.wraps(stock_fuse)
    def fuse(self: Any, module: Any, prefix: str, vllm_config: Any) -> Any:
        made = stock_fuse(self, module, prefix, vllm_config)
        width = vllm_config.model_config.get_head_size()
        if _is_spread(made, prefix, width):
            norms, widths = (stock_forward, forward), (made.weight.shape[0] // made.tp_size,)
            _serve(TRANSFORMERS, GATHERED, made, norms, widths, give)
        return made

    @functools.wraps(stock_forward)
    def forward(self: Any, x: "torch.Tensor", residual: "torch.Tensor | None" = None) -> Any:
        import torch

        local = x.shape[-1]
        handle = getattr(self, "commext_handle", 0)
        if not handle or residual is not None or local * self.tp_size != self.weight.shape[0]:
            return stock_forward(self, x, residual)
        weight = _shard(self.weight, self.tp_rank, local)
        out = torch.ops.vllm_commext.reduce_rms_norm(
            x.reshape(-1, local), weight, handle, self.variance_epsilon
        )
        return out.view(x.shape)

    patch({f"{FUSERS}:RMSNormFuser.fuse": fuse, f"{FUSERS}:TPAwareNormMixin.forward": forward})


def _is_spread(norm: Any, prefix: str, head_size: int) -> bool:
    """Check that a norm is that of all heads of Q or K; a rank has a part of each row then."""
    if type(norm).__name__ != "TPAwareRMSNorm" or norm.tp_size == 1 or not norm.has_weight:
        return False
    return prefix.rpartition(".")[2] in QK_NORMS and norm.weight.numel() > head_size


def put(model: str, action: Callable[[], None]) -> None:
    """Act where that model's norm fits; otherwise vLLM's own remains, with a line."""
    try:
        fits.admit(f"norm of {model}")
    except UnsupportedError as error:
        level = fits.level_of(error)
        logger.log(level, "commext: reduce_rms leaves %s to vLLM: %s", model, error)
    else:
        action()


def install(take_part: TakePart, tell: Tell) -> None:
    """Let each of the models have the op as soon as it is imported; `tell` logs once that it serves
    one."""
    give = (take_part, tell)
    models: dict[str, tuple[str, Callable[[Give], None]]] = {
        ATTENTION: (OLMOE.partition(":")[0], _install_attention),
        TRANSFORMERS: (FUSERS, _install_transformers),
    }
    for model, (module, install_in) in models.items():
        action = functools.partial(put, model, functools.partial(install_in, give))
        hooks.when_imported(module, action)
