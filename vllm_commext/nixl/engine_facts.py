"""Reads vLLM's configuration: refuses what cannot be served, and lists what engines compare."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from vllm_commext.compat import fits, kv_connector
from vllm_commext.compat.kv_connector import (
    attention_backends,
    config_file_of,
    context_parallel_sizes,
)
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.engine_context import Reusing, Streaming
from vllm_commext.nixl.geometry.layout import FULL, STATE
from vllm_commext.nixl.geometry.plan import keeps_every_token, num_blocks_for
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.identity import digest_of_weights, snapshot_of
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.vllm_cache import (
    SERVED_SPECS,
    ModelFacts,
    groups_of,
    needs_zeroed_blocks,
    specs_of,
)
from vllm_commext.nixl.wire.description import digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# Ways of speculation without a KV cache of their own: whether and how an engine uses them changes
# no byte of the cache.
_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})
# Ways to load weights from no files, or from files of one rank each.
_NOT_THE_FILES = frozenset(
    ("dummy", "ipc_cache", "modelexpress", "runai_streamer_sharded", "sharded_state", "tensorizer")
)
# What models call the number of groups of their B and C projections.
_NUM_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")


def check_supported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> None:
    """Refuse what this version cannot transfer; raises UnsupportedError."""
    for name, size in context_parallel_sizes(vllm_config).items():
        if size > 1:
            raise UnsupportedError(
                f"CommextNixlConnector does not support {name} > 1 yet, got {size}: "
                "start without it"
            )
    for group in kv_cache_config.kv_cache_groups:
        for spec in specs_of(group.kv_cache_spec):
            _check_spec(spec, vllm_config)
    _check_model(vllm_config)
    _check_speculation(vllm_config)
    _check_stages(vllm_config, config)
    transfer = vllm_config.kv_transfer_config
    device = _device_type()
    if transfer is not None and transfer.kv_buffer_device not in (device, "cpu"):
        raise UnsupportedError(
            f"CommextNixlConnector transfers from the cache or from host memory: expected "
            f"kv_buffer_device {device!r} or 'cpu', got {transfer.kv_buffer_device!r}"
        )
    moves_states = any(group.kind == STATE for group in groups_of(kv_cache_config))
    if moves_states and keeps_host_copy(vllm_config, config):
        raise UnsupportedError(
            "CommextNixlConnector keeps no copy of states in host memory: start without "
            f"host_copy and with kv_buffer_device {device!r}"
        )


def _check_stages(vllm_config: VllmConfig, config: ConnectorConfig) -> None:
    parallel = vllm_config.parallel_config
    what = f"CommextNixlConnector with --pipeline-parallel-size {parallel.pipeline_parallel_size}"
    if parallel.pipeline_parallel_size == 1:
        return
    backend = parallel.distributed_executor_backend
    if backend != "mp":
        raise UnsupportedError(
            f"{what}: expected --distributed-executor-backend mp, got {backend!r}: other executors "
            "pass on what the last stage's workers report alone, or were not tried"
        )
    if config.reuse_blocks:
        raise UnsupportedError(
            f"{what} does not let other engines read blocks of running requests: start without "
            "reuse_blocks in kv_connector_extra_config"
        )


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if getattr(model, "enable_sleep_mode", False):
        raise UnsupportedError(
            "--enable-sleep-mode puts other memory in the KV cache's place when the engine wakes "
            "up, and NIXL goes on reading what was registered before: start without it"
        )
    multimodal = getattr(model, "multimodal_config", None)
    cached = getattr(multimodal, "mm_processor_cache_gb", 1) > 0
    if multimodal is not None and not cached and not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "with neither prefix caching nor a multimodal processor cache vLLM numbers images "
            "instead of hashing them, so that the prompts of two engines cannot be compared: start "
            "without --mm-processor-cache-gb 0 or with --enable-prefix-caching"
        )


def _check_speculation(vllm_config: VllmConfig) -> None:
    """Refuse drafts that read more of the prompt than the next token: what they have cached of its
    last tokens would be another prompt's."""
    num_ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    if num_ahead > 1:
        raise UnsupportedError(
            f"CommextNixlConnector does not serve drafts of several MTP modules, which read "
            f"{num_ahead} prompt tokens ahead: start with one module (num_speculative_tokens 1), "
            "or without --speculative-config"
        )


def keeps_host_copy(vllm_config: VllmConfig, config: ConnectorConfig) -> bool:
    transfer = vllm_config.kv_transfer_config
    asked = transfer is not None and transfer.kv_buffer_device == "cpu"
    return config.host_copy or (asked and _device_type() != "cpu")


def streaming_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> Streaming:
    groups = groups_of(kv_cache_config)
    if not config.stream_chunks:
        return Streaming(Handover.OFF)
    if all(group.kind != FULL for group in groups):
        return Streaming(Handover.LAYERS)
    if keeps_host_copy(vllm_config, config):
        return Streaming(Handover.HOST_COPY)
    # Zeroing comes before the fence is replaced: only a read that follows the prompt's end, as that
    # of a state does, proves that none of the blocks was taken away before.
    if needs_zeroed_blocks(kv_cache_config) and keeps_every_token(groups):
        return Streaming(Handover.ZEROED)
    return Streaming(
        None,
        tuple(groups),
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )


def why_not_reused(vllm_config: VllmConfig, config: ConnectorConfig) -> str | None:
    """Why no blocks are reused, whatever the KV cache is, "" where it is not asked for; or None."""
    transfer = vllm_config.kv_transfer_config
    if not config.reuse_blocks:
        return ""
    if keeps_host_copy(vllm_config, config):
        return "a copy of the cache is kept in host memory"
    if transfer is None or not transfer.is_kv_consumer:
        return "only engines that decode (kv_consumer, kv_both) go on with others' answers"
    if vllm_config.speculative_config is not None:
        return "drafts' own KV cache is not complete for the last tokens"
    if getattr(vllm_config, "diffusion_config", None) is not None:
        return "an answer may come of a denoising step whose KV no pass has computed anew"
    return None


def reusing_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> Reusing:
    refusal, groups = why_not_reused(vllm_config, config), groups_of(kv_cache_config)
    if refusal is not None:
        return Reusing(refusal)
    if len(groups) != 1 or groups[0].kind != FULL:
        return Reusing("this model's blocks do not all stay in one group until the end")
    if needs_zeroed_blocks(kv_cache_config):
        return Reusing("vLLM zeroes this model's blocks before it uses them")
    block_size = groups[0].block_size
    return Reusing(
        None,
        block_size,
        num_blocks_for(vllm_config.model_config.max_model_len, block_size),
        lambda: digest(engine_facts(vllm_config, kv_cache_config)),
    )


def _check_spec(spec: KVCacheSpec, vllm_config: VllmConfig) -> None:
    if type(spec) not in SERVED_SPECS:
        served = sorted(kind.__name__ for kind in SERVED_SPECS)
        raise UnsupportedError(
            f"CommextNixlConnector transfers caches of {served}; this model has a "
            f"{type(spec).__name__}: use vLLM's own NixlConnector for it"
        )
    has_states = SERVED_SPECS[type(spec)] == STATE
    if spec.tokens_per_state != 1 and not has_states:
        raise UnsupportedError(
            "CommextNixlConnector transfers caches with an entry a token; this model compresses "
            "several tokens into one: use vLLM's own NixlConnector for it"
        )
    if has_states:
        _check_states(spec, vllm_config)


def _check_states(spec: Any, vllm_config: VllmConfig) -> None:
    if reason := fits.why_not(kv_connector.STATES_PART):
        raise UnsupportedError(f"CommextNixlConnector transfers no states here: {reason}")
    mode = spec.mamba_cache_mode
    if mode not in ("none", "align"):
        raise UnsupportedError(
            "CommextNixlConnector transfers the state after the last token, and this engine keeps "
            f"others, too (mode {mode!r}): start with --no-enable-prefix-caching"
        )
    if spec.num_speculative_blocks or vllm_config.speculative_config is not None:
        raise UnsupportedError(
            "CommextNixlConnector transfers one state a request, and with speculative decoding "
            "this model keeps more of it: start without --speculative-config"
        )


def model_facts(vllm_config: VllmConfig, tp_rank: int) -> ModelFacts:
    model = vllm_config.model_config
    return ModelFacts(
        rank=Rank(vllm_config.parallel_config.tensor_parallel_size, tp_rank),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        num_groups=_num_groups(model.hf_text_config),
        conv_dim_first=kv_connector.is_dim_first(),
        backends=attention_backends(vllm_config),
    )


def _num_groups(config: Any) -> int | None:
    found = [getattr(config, name, None) for name in _NUM_GROUPS]
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    facts = {
        "vllm_version": ".".join(vllm.__version__.split(".")[:2]),
        "cache_meaning": fits.cache_meaning(vllm.__version__),
        "model": model.model,
        "revision": model.revision,
        "model_config_digest": _config_digest(model),
        "weight_files": weight_files(vllm_config) or "(none)",
        "dtype": model.dtype,
        "online_quantization": None if model.is_quantized else model.quantization,
        "cache_dtype": cache.cache_dtype,
        "num_kv_heads": 1 if model.use_mla else model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_layers": model.get_total_num_hidden_layers(),
        "layer_specs": _layer_specs(kv_cache_config),
        "draft_kv_cache": _draft_kv_cache(vllm_config),
        **_long_rope(model),
    }
    return {name: str(value) for name, value in facts.items()}


def weight_files(vllm_config: VllmConfig) -> str:
    """A digest of the files that the engine's weights come from, their URL, or "" for neither."""
    load, model = vllm_config.load_config, getattr(vllm_config, "model_config", None)
    url = getattr(model, "model_weights", "")
    if url or model is None or load.load_format in _NOT_THE_FILES:
        return url
    return _digest_of_files(model.model, model.revision, load.download_dir)


@cache  # of the time of the start
def _digest_of_files(model: str, revision: str | None, folder: str | None) -> str:
    place = Path(model)
    try:
        place = place if place.exists() else snapshot_of(model, revision, folder)
        return digest_of_weights(place)[:32]
    except (OSError, ValueError) as error:
        logger.warning("other weights under the name %s are not noticed: %s", model, error)
        return ""


def adapter_settings(vllm_config: VllmConfig) -> str:
    """The engine's settings that change what a LoRA adapter computes, beside its files."""
    lora: Any = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return ""
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras")
    found = {name: getattr(lora, name, None) for name in names}
    return str({**found, "target_modules": sorted(found["target_modules"] or ())})


def _long_rope(model: ModelConfig) -> dict[str, bool]:
    """vLLM takes LongRoPE's long factors for all tokens if the engine serves more of them than the
    model was first trained on."""
    rope: Any = getattr(model.hf_text_config, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "longrope" or first is None:
        return {}
    return {"long_rope": model.max_model_len > first}


def _layer_specs(kv_cache_config: KVCacheConfig) -> str:
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in specs_of(group.kv_cache_spec)]
    return ", ".join(sorted({f"{type(spec).__name__}/{_dtype(spec)}" for spec in specs}))


def _dtype(spec: KVCacheSpec) -> Any:
    return getattr(spec, "dtype", None) or getattr(spec, "dtypes", "unknown")


def _draft_kv_cache(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_KV:
        return "none"
    return f"{speculative.method}/{speculative.model}"


def _device_type() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type


def _config_digest(model: ModelConfig) -> str:
    """Digest of what the model is, without where it lies and which library wrote it.

    From the file that the model comes with, because what a library makes of it has more fields with
    each of its versions; from that where there is no such file, or where code changes it.
    """
    config = None if callable(model.hf_overrides) else config_file_of(model)
    content = {**config, "overrides": model.hf_overrides} if config else model.hf_config.to_dict()
    content = {name: value for name, value in content.items() if name not in _NOT_THE_MODEL}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
