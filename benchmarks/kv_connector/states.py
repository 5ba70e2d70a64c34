"""Descriptors that NIXL moves for the states of a Mamba2 model with the same ranks on both sides.

Three Mamba2 layers and one of attention share one allocation, as vLLM lays them over one another:
each layer is a group of its own, and each state is a block.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kv_connector.counting import Counter
from kv_connector.samples import OURS, VLLM, Sample
from kv_connector.shapes import ATTENTION_BACKEND, CACHE_LAYOUT, NUM_KV_HEADS, Caches
from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.vllm_cache import ModelFacts, cache_layout

UNIT = "descriptors a state"
NUM_BLOCKS = 64
HEAD_SIZE = 32
BLOCK_SIZE = 96
MODEL_LENGTH = 1024
CONV_SHAPE, SSM_SHAPE = (576, 3), (8, 64, 16)
NUM_GROUPS = 2
ATTENTION = "model.layers.2.self_attn.attn"
STATES = [f"model.layers.{number}.mamba" for number in (0, 1, 3)]


def case(num_states: int) -> str:
    """Blocks of each layer that are read, neighbours on both sides."""
    return f"states read of each layer: {num_states}"


def hybrid_config() -> KVCacheConfig:
    """A group a layer; states are padded to the attention layer's blocks."""
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=MODEL_LENGTH,
        shapes=(CONV_SHAPE, SSM_SHAPE),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=attention.page_size_bytes,
    )
    groups = [KVCacheGroupSpec([ATTENTION], attention)]
    groups += [KVCacheGroupSpec([name], state) for name in STATES]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        kv_cache_layout=CACHE_LAYOUT,
    )


def hybrid_caches(config: KVCacheConfig) -> Caches:
    """All layers over the same bytes."""
    num_bytes = NUM_BLOCKS * config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    attention = memory.view(torch.float32).view(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, -1)
    return {ATTENTION: attention} | {name: memory.view(NUM_BLOCKS, 1, 1, -1) for name in STATES}


def hybrid_layout(config: KVCacheConfig, caches: Caches) -> CacheLayout:
    facts = ModelFacts(
        Rank(1, 0),
        NUM_KV_HEADS,
        NUM_GROUPS,
        conv_dim_first=True,
        backends={ATTENTION: ATTENTION_BACKEND},
    )
    return cache_layout(caches, config, facts)


def measure_states(model: Path) -> list[Sample]:
    """One state a layer, as without a prefix cache, and two that are neighbours on both sides."""
    config = hybrid_config()
    caches = hybrid_caches(config), hybrid_caches(config)
    layouts = hybrid_layout(config, caches[0]), hybrid_layout(config, caches[1])
    counter = Counter(model, config, caches, layouts)
    return [*_count(counter, 1), *_count(counter, 2)]


def _count(counter: Counter, num_states: int) -> Iterator[Sample]:
    local = [list(range(first, first + num_states)) for first in (5, 20, 40)]
    remote = [list(range(first, first + num_states)) for first in (11, 30, 50)]
    blocks = [Blocks(1, []), *(Blocks(0, ids) for ids in local)]
    total = num_states * len(STATES)
    ours = counter.ours(blocks, [[], *remote], BLOCK_SIZE)
    yield Sample(case(num_states), UNIT, OURS, ours / total)
    yield Sample(case(num_states), UNIT, VLLM, counter.vllm([[], *local], [[], *remote]) / total)
