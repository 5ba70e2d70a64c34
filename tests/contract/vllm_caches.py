"""KV caches as the installed vLLM lays them out, on CPUs and without a model: vLLM's own code makes
the groups, the memory, the attention views and the views of states."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker import utils as worker_utils

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before vLLM 0.33
    from vllm.v1.core import kv_cache_utils as planning

HAS_LAYOUTS = hasattr(worker_utils, "allocate_kv_cache")
"""vLLM 0.30 and newer, where views are made from a layout and not from an attention backend."""
_LAYOUT_NAMES = {"HND": "LBHNC", "NHD": "LBNHC", "blocks outermost": "BLHNC"}


def make_caches(
    specs: Mapping[str, KVCacheSpec],
    *,
    num_blocks: int = 6,
    order: str = "HND",
    kernel_block_size: int = 0,
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Groups and cache tensors of layers, as vLLM hands them to a connector.

    Args:
        specs: layer name to specification.
        num_blocks: blocks of the cache manager.
        order: "HND", "NHD" or, from vLLM 0.30 on, "blocks outermost".
        kernel_block_size: tokens of the attention layers' kernel blocks, 0 for their block size.
    """
    config = VllmConfig()
    config.cache_config.num_gpu_blocks_override = num_blocks
    if HAS_LAYOUTS:
        config.cache_config.kv_cache_layout = _LAYOUT_NAMES[order]
    groups = planning.get_kv_cache_groups(config, dict(specs))
    cache = planning.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    sizes = [
        kernel_block_size
        if kernel_block_size and not isinstance(group.kv_cache_spec, MambaSpec)
        else group.kv_cache_spec.block_size
        for group in groups
    ]
    if not HAS_LAYOUTS:
        return cache, _allocate_by_backends(cache, order, sizes)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return cache, worker_utils.allocate_kv_cache(cache, torch.device("cpu"), layout, sizes)


def _allocate_by_backends(
    cache: KVCacheConfig, order: str, kernel_block_sizes: Sequence[int]
) -> dict[str, torch.Tensor]:
    from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.v1.worker.gpu import attn_utils

    raw = attn_utils._allocate_kv_cache(cache, {}, torch.device("cpu"))
    groups = [
        worker_utils.AttentionGroup(_backend(spec), names, spec, number)
        for number, group in enumerate(cache.kv_cache_groups)
        for spec, names in _layers_by_spec(group)
    ]
    set_kv_cache_layout(order)
    try:
        return attn_utils._reshape_kv_cache(groups, raw, "auto", kernel_block_sizes, {}, cache)
    finally:
        set_kv_cache_layout(None)


def _layers_by_spec(group: Any) -> list[tuple[KVCacheSpec, list[str]]]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [(spec.kv_cache_specs[name], [name]) for name in group.layer_names]
    return [(spec, group.layer_names)]


def _backend(spec: KVCacheSpec) -> Any:
    """A backend that takes either order of heads and tokens, where there are heads."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    if isinstance(spec, MLAAttentionSpec):
        return MLACommonBackend
    return FlashAttentionBackend if isinstance(spec, AttentionSpec) else None


class _Layer(MambaBase):
    """A layer that has nothing but states."""

    def __init__(self, spec: MambaSpec) -> None:
        self._spec = spec

    def get_state_shape(self) -> Any:
        return self._spec.shapes

    def get_state_dtype(self) -> Any:
        return self._spec.dtypes

    @property
    def mamba_type(self) -> Any:
        return self._spec.mamba_type


def state_views(cache: torch.Tensor, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
    """The states as vLLM binds them to a layer, ``[blocks, *shape]`` each."""
    layer = _Layer(spec)
    layer.bind_kv_cache(cache)
    return layer.kv_cache
