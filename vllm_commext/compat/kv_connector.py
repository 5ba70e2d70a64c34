"""What differs between vLLM 0.28 and 0.33 for a KV connector, behind one face.

Every difference is found by looking for the name itself, so that development builds of vLLM pass
too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

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


def attention_backends(vllm_config: VllmConfig) -> dict[str, str]:
    """Name of the attention backend of each layer that has one, by layer name."""
    layers = vllm_config.compilation_config.static_forward_context
    found: dict[str, str] = {}
    for name, layer in layers.items():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            found[name] = str(backend.get_name())
    return found


def drop_last_prompt_token(request: Request) -> None:
    """Take the last token off a prompt that has at least two, and generate one token after it."""
    inside: Any = request
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    elif request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del inside._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def context_parallel_sizes(vllm_config: VllmConfig) -> dict[str, int]:
    """Sizes of the kinds of parallelism that split a request's KV cache by token or by layer."""
    parallel = vllm_config.parallel_config
    names = (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    )
    return {name: int(getattr(parallel, name, 1)) for name in names}
