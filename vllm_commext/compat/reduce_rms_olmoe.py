"""vLLM's OLMoE with our op for its QK RMSNorm; vLLM imports this when it loads such a model.

The norm runs over all heads, which tensor parallelism has spread over the ranks. vLLM gathers whole
Q and K on every rank for it; the op exchanges two numbers a token instead.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models import olmoe

from vllm_commext.compat.monkey_patch import is_patched, patch_all, row_of
from vllm_commext.compat.reduce_rms import OLMOE, tell_once, workspace_of
from vllm_commext.errors import CommextError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.commext.reduce_rms")

OlmoeForCausalLM = olmoe.OlmoeForCausalLM
_stock_init = olmoe.OlmoeAttention.__init__
_stock_norm = olmoe.OlmoeAttention._apply_qk_norm  # pyright: ignore[reportPrivateUsage]


def _handle(attention: Any) -> int:
    """The workspace's handle; 0 where vLLM's own way is taken."""
    if attention.tp_size == 1 or attention.total_num_kv_heads < attention.tp_size:
        return 0
    group = get_tp_group()
    try:
        made = workspace_of(group.rank_in_group, group.world_size, group.cpu_group)
    except CommextError as error:
        logger.warning("commext: reduce_rms stays out of OLMoE: %s", error)
        return 0
    tell_once("OLMoE")
    return made.handle


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _stock_init(self, *args, **kwargs)
    self.commext_handle = _handle(self)


def _shard(weight: "torch.Tensor", rank: int, size: int) -> "torch.Tensor":
    return weight[rank * size : (rank + 1) * size]


def _apply_qk_norm(
    self: Any, q: "torch.Tensor", k: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    if not self.commext_handle:
        return _stock_norm(self, q, k)
    return torch.ops.vllm_commext.split_qk_rms_norm(
        q,
        k,
        _shard(self.q_norm.weight, self.tp_rank, self.q_size),
        _shard(self.k_norm.weight, self.tp_rank, self.kv_size),
        self.commext_handle,
        self.q_norm.variance_epsilon,
    )


_INIT = f"{OLMOE}:OlmoeAttention.__init__"
if not is_patched(row_of(_INIT)):
    patch_all({_INIT: _init, f"{OLMOE}:OlmoeAttention._apply_qk_norm": _apply_qk_norm})
