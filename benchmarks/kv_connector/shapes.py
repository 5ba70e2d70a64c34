"""The caches that both connectors serve, as vLLM describes them."""

from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.vllm_cache import ModelFacts, cache_layout

BLOCK_SIZE = 32
NUM_KV_HEADS = 4
ATTENTION_BACKEND = "CPU_ATTN"
CACHE_LAYOUT = "LBHNC"

Caches = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A dense model's cache in float16: ``head_size`` 8 makes blocks of 4 KB.

    Attributes:
        num_regions: layers.
        num_blocks: blocks of each.
        head_size: elements of a key or a value of one head.
    """

    num_regions: int
    num_blocks: int
    head_size: int = 8

    @property
    def layer_names(self) -> list[str]:
        return [f"model.layers.{number}.self_attn.attn" for number in range(self.num_regions)]

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * NUM_KV_HEADS * 2 * self.head_size * 2


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    """What vLLM's engine tells a worker of its cache."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=shape.head_size,
        dtype=torch.float16,
    )
    return KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(shape.layer_names, spec)],
        kv_cache_layout=CACHE_LAYOUT,
    )


def make_caches(shape: Shape) -> Caches:
    """One rank's tensors, an allocation a layer, not touched."""
    size = (shape.num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 * shape.head_size)
    return {name: torch.empty(size, dtype=torch.float16) for name in shape.layer_names}


def our_layout(shape: Shape, caches: Caches, rank: Rank) -> CacheLayout:
    """Our description of one rank's tensors."""
    backends = dict.fromkeys(shape.layer_names, ATTENTION_BACKEND)
    facts = ModelFacts(rank, NUM_KV_HEADS, None, conv_dim_first=False, backends=backends)
    return cache_layout(caches, kv_cache_config(shape), facts)


def memory_ranges(caches: Caches) -> list[tuple[int, int]]:
    """``(address, bytes)`` of each allocation."""
    return [(cache.data_ptr(), cache.nbytes) for cache in caches.values()]
