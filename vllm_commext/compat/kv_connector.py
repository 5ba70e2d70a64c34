"""vLLM's configuration, models, requests and states, as the KV connector asks for them."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from vllm_commext.compat import fits

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.request import Request


_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
_MAX_UNSPLIT_TOKENS = 64
"""Blocks of up to as many tokens are taken whole by every attention backend for CUDA; vLLM splits
none whose neighbours in memory belong to other layers."""
STATES_PART = "nixl states"
CONV_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
DIM_FIRST = "DS"
_chosen_by_user: list[str | None] = []


def config_file_of(model: ModelConfig) -> dict[str, Any] | None:
    """The content of the model's ``config.json``; None where it has none that can be read."""
    from transformers import PretrainedConfig

    try:
        found, _ = PretrainedConfig.get_config_dict(model.model, revision=model.revision)
    except Exception:  # noqa: BLE001 - other kinds of models raise whatever their files make it
        return None
    return found or None


def required_cache_layout(vllm_config: VllmConfig) -> str | None:
    """The KV cache layout to ask vLLM for, None for its own choice.

    With blocks outermost (``BLHNC``) the layers of a block lie side by side, so that two engines of
    one tensor-parallel size move a block as one run of bytes and not as one a layer. It is asked
    for where the platform's attention backends take it; where one does not, vLLM takes its own
    choice. The rest gets heads before tokens (``LBHNC``), so that a head's part of a block is one
    run. Latent caches have no heads, and their backends choose."""
    if vllm_config.model_config.use_mla:
        return None
    return "BLHNC" if _takes_blocks_outermost(vllm_config) else "LBHNC"


def _takes_blocks_outermost(vllm_config: VllmConfig) -> bool:
    from vllm.platforms import current_platform

    return (
        current_platform.is_cuda()
        and not vllm_config.model_config.is_hybrid
        and vllm_config.cache_config.block_size <= _MAX_UNSPLIT_TOKENS
        # All connectors of a MultiConnector, the module of which is imported where it is used, must
        # name one layout, and vLLM's own name this one.
        and _MULTI not in sys.modules
    )


def keeps_every_block(vllm_config: VllmConfig) -> bool:
    """True unless a layer has a state or a window, as the model's configuration says: only the
    engine's own process has the KV cache's."""
    model = vllm_config.model_config
    windows = (model.get_sliding_window(), model.attention_chunk_size)
    has_windows = any(windows) and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    return not (has_windows or model.is_hybrid or model.is_attention_free)


def attention_backends(vllm_config: VllmConfig) -> dict[str, str]:
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


def end_after_one_token(request: Request) -> None:
    """Generate one token, whatever the request's own limits are."""
    request.max_tokens = 1
    sampling = request.sampling_params
    if sampling is not None:
        sampling.min_tokens = min(sampling.min_tokens, 1)


def context_parallel_sizes(vllm_config: VllmConfig) -> dict[str, int]:
    """Sizes of the kinds of parallelism that split a request's KV cache by token."""
    parallel = vllm_config.parallel_config
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return {name: int(getattr(parallel, name, 1)) for name in names}


def note_layout_choice() -> None:
    """Remember which layout of states the user has chosen, before vLLM's platforms choose."""
    if not _chosen_by_user:
        _chosen_by_user.append(os.environ.get(CONV_STATE_LAYOUT))


def ask_for_dim_first() -> None:
    """Ask for convolution states with channels first, in this process and in those that it starts,
    unless the user has chosen; drop what vLLM may have remembered of the layout.

    A rank's slices are single runs of bytes then ("DS"). vLLM's default is the other order ("SD"),
    and it chooses one by itself on some CPUs."""
    chosen = _chosen_by_user[0] if _chosen_by_user else os.environ.get(CONV_STATE_LAYOUT)
    if chosen is not None or fits.why_gone(STATES_PART):
        return
    os.environ[CONV_STATE_LAYOUT] = DIM_FIRST
    _mamba_utils().get_conv_state_layout.cache_clear()


def is_dim_first() -> bool:
    """Convolution states, where there are any, have channels first in this process."""
    return not fits.why_gone(STATES_PART) and bool(_mamba_utils().is_conv_state_dim_first())


def _mamba_utils() -> Any:
    return importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
