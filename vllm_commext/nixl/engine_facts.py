"""What the connector reads from vLLM's configuration: what it can serve, and the facts both
engines compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_commext.compat.kv_connector import context_parallel_sizes, kv_cache_layout
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.topology import RankShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SERVED_SPECS = (FullAttentionSpec, MLAAttentionSpec)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what this version cannot transfer.

    Raises:
        UnsupportedError: names the setting and what to do.
    """
    for name, size in context_parallel_sizes(vllm_config).items():
        if size > 1:
            raise UnsupportedError(
                f"CommextNixlConnector does not support {name} > 1 yet, got {size}: "
                "start without it"
            )
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted(
        {type(spec).__name__ for group in groups for spec in _specs(group.kv_cache_spec)}
    )
    if len(groups) != 1 or any(
        type(spec) not in _SERVED_SPECS for spec in _specs(groups[0].kv_cache_spec)
    ):
        raise UnsupportedError(
            "CommextNixlConnector serves models whose layers all have full attention, in one "
            f"KV cache group; this model has {len(groups)} groups of {kinds}: use vLLM's own "
            "NixlConnector for it"
        )
    transfer = vllm_config.kv_transfer_config
    device = _device_type()
    if transfer is not None and transfer.kv_buffer_device != device:
        raise UnsupportedError(
            f"CommextNixlConnector transfers straight from the cache: expected kv_buffer_device "
            f"{device!r}, got {transfer.kv_buffer_device!r}"
        )


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one of the cache manager's blocks."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def rank_shape(vllm_config: VllmConfig, tp_rank: int) -> RankShape:
    """This worker's place in its engine."""
    model = vllm_config.model_config
    return RankShape(
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        tp_rank=tp_rank,
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        replicated=model.use_mla,
    )


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Everything that changes the meaning of the cache's bytes, name to value."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    facts = {
        "vllm_version": ".".join(vllm.__version__.split(".")[:2]),
        "model": model.model,
        "revision": model.revision,
        "model_config_digest": _config_digest(model.hf_config.to_dict()),
        "dtype": model.dtype,
        "cache_dtype": cache.cache_dtype,
        "block_size": block_size(kv_cache_config),
        "kv_cache_layout": kv_cache_layout(vllm_config),
        "num_kv_heads": 1 if model.use_mla else model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_layers": model.get_num_layers(vllm_config.parallel_config),
        "layer_specs": _layer_specs(kv_cache_config),
        "speculative_config": _speculative(vllm_config),
    }
    return {name: str(value) for name, value in facts.items()}


def _specs(spec: KVCacheSpec) -> Iterable[KVCacheSpec]:
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def _layer_specs(kv_cache_config: KVCacheConfig) -> str:
    specs = _specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    return ", ".join(sorted({f"{type(spec).__name__}/{_dtype(spec)}" for spec in specs}))


def _dtype(spec: KVCacheSpec) -> Any:
    return getattr(spec, "dtype", "unknown")


def _speculative(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "none"
    return f"{speculative.method}/{speculative.model}/{speculative.num_speculative_tokens}"


def _device_type() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type


def _config_digest(config: dict[str, Any]) -> str:
    """Digest of what the model is, without where it lies and which library wrote it."""
    apart = ("_name_or_path", "transformers_version")
    content = {name: value for name, value in config.items() if name not in apart}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
