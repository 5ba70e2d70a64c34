"""What differs between vLLM 0.28 and 0.33 for a KV connector, behind one face.

Every difference is found by looking for the name itself, so that development builds of vLLM pass
too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def transfer_results_class() -> type[Any] | None:
    """``KVConnectorTransferResults`` (vLLM 0.30 and newer), else None.

    Where it is missing, a failed load is reported by its block ids.
    """
    return getattr(importlib.import_module(_BASE), "KVConnectorTransferResults", None)


def peer_cache_hit_source() -> Any:
    """The label of cache hits that another engine supplied (vLLM 0.32 and newer), else None."""
    try:
        module = importlib.import_module("vllm.v1.metrics.cache_hit_source")
    except ModuleNotFoundError:
        return None
    return module.CacheHitSource.P2P


def kv_cache_layout(vllm_config: VllmConfig) -> str:
    """Name of the KV cache's layout, as a worker sees it once its cache is allocated."""
    resolved = getattr(vllm_config.cache_config, "get_resolved_kv_cache_layout", None)
    if resolved is not None:
        return str(getattr(resolved(), "name", resolved()))
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    return str(utils.get_kv_cache_layout())


def context_parallel_sizes(vllm_config: VllmConfig) -> dict[str, int]:
    """Sizes of the kinds of parallelism that split a request's KV cache by token or by layer."""
    parallel = vllm_config.parallel_config
    names = (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    )
    return {name: int(getattr(parallel, name, 1)) for name in names}
