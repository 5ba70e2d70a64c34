"""Our fused op in models that vLLM runs without its compiler's passes: behind their eager helpers.

Such models call a helper of vLLM's for the all-reduce, the residual and the norm, which takes
FlashInfer's kernel or the parts. It asks our op first now, where a table says that it is fastest.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.compat.monkey_patch import wrap

PART = "fused_eager"
NORM = "vllm.models.common.ops.fused_allreduce_rms_norm:fused_allreduce_rms_norm"
GEMMA = "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm:fused_allreduce_gemma_rms_norm"
BIASES = {NORM: 0, GEMMA: 1}  # what a norm of the helper adds to each weight
Helper = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def serve(
    hidden_states: torch.Tensor, residual: Any, norm: Any, weight_bias: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The norm and the new residual by our kernel, both [rows, hidden], or None where vLLM's helper
    is to serve."""
    group = get_tp_group().unique_name
    served, weight = fused_op.find_group(group), getattr(norm, "weight", None)
    if served is None or weight is None or residual is None or hidden_states.dim() != 2:
        return None
    if getattr(norm, "variance_size_override", None) is not None:
        return None
    eps = norm.variance_epsilon
    if not served.leads(hidden_states, residual, weight, weight_bias):
        return None
    out, new, _ = fused_op.all_reduce_add_rms_norm(
        hidden_states, residual, weight, eps, group, weight_bias=weight_bias
    )
    return out, new


def _helper(original: Helper, weight_bias: int) -> Helper:
    @functools.wraps(original)
    def helper(
        hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ours = serve(hidden_states, residual, norm, weight_bias)
        return original(hidden_states, residual, norm) if ours is None else ours

    return helper


def install() -> None:
    """Let vLLM's helpers ask our op from now on, in models that are imported later."""
    wrap({symbol: partial(_helper, weight_bias=bias) for symbol, bias in BIASES.items()})
