"""KV caches as the installed vLLM lays them out, on CPUs and without a model: vLLM's own code makes
the groups, the memory, the attention views and the views of states."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.worker import utils as worker_utils

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before vLLM 0.33
    from vllm.v1.core import kv_cache_utils as planning

_LAYOUT_NAMES = {"HND": "LBHNC", "NHD": "LBNHC", "blocks outermost": "BLHNC"}


def make_caches(
    specs: Mapping[str, KVCacheSpec],
    *,
    num_blocks: int = 6,
    order: str = "HND",
    kernel_block_size: int = 0,
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Groups and cache tensors of layers, as vLLM hands them to a connector; ``order`` is "HND",
    "NHD" or "blocks outermost", ``kernel_block_size`` 0 for that of the cache."""
    config = VllmConfig()
    config.cache_config.num_gpu_blocks_override = num_blocks
    config.cache_config.kv_cache_layout = _LAYOUT_NAMES[order]
    groups = planning.get_kv_cache_groups(config, dict(specs))
    cache = planning.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    sizes = [
        kernel_block_size
        if kernel_block_size and not isinstance(group.kv_cache_spec, MambaSpec)
        else group.kv_cache_spec.block_size
        for group in groups
    ]
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return cache, worker_utils.allocate_kv_cache(cache, torch.device("cpu"), layout, sizes)


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
