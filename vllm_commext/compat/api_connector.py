"""API checks of what the KV connector depends on, by part; see `api_checks`."""

from collections.abc import Mapping

from vllm_commext.compat.api_probes import (
    CheckRows,
    abstract_only,
    exists,
    has_attributes,
    has_fields,
    has_methods,
    maps_to_callables,
    takes,
)

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{CONNECTORS}.v1.base"
METRICS = f"{CONNECTORS}.v1.metrics"
MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
BLOCKS = "vllm.v1.core.block_pool"
ENGINE = "vllm.v1.engine.core"
SPECS = "vllm.v1.kv_cache_interface"
PROM_PARAMETERS = ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")
ABSTRACT_METHODS: Mapping[str, tuple[str, ...]] = {
    "start_load_kv": ("forward_context",),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "wait_for_save": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
}
HOOKS: Mapping[str, tuple[str, ...]] = {
    "register_kv_caches": ("kv_caches",),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "handle_preemptions": ("kv_connector_metadata",),
    "get_finished": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "get_handshake_metadata": (),
    "has_pending_push_work": (),
    "set_xfer_handshake_metadata": ("metadata",),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "get_kv_connector_stats": (),
    "on_new_request": ("request",),
    "build_connector_worker_meta": (),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "reset_cache": (),
    "get_required_kvcache_layout": ("vllm_config",),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": PROM_PARAMETERS,
    "shutdown": (),
}
CONNECTOR_CHECKS: CheckRows = {
    "nixl": {
        "register_connector": (
            "the connector is registered under its name",
            takes(
                f"{CONNECTORS}.factory:KVConnectorFactory.register_connector",
                *("name", "module_path", "class_name"),
            ),
        ),
        "connector_registry": (
            "a second registration in one process must not raise",
            maps_to_callables(f"{CONNECTORS}.factory:KVConnectorFactory._registry"),
        ),
        "connector_constructor": (
            "the connector is built with the configuration, its role and the KV cache "
            "configuration",
            takes(
                f"{BASE}:KVConnectorBase_V1.__init__", *("vllm_config", "role", "kv_cache_config")
            ),
        ),
        "connector_abstract_methods": (
            "we implement every abstract method, called as we expect",
            abstract_only(f"{BASE}:KVConnectorBase_V1", ABSTRACT_METHODS),
        ),
        "connector_hooks": (
            "the methods that we override are those that vLLM calls",
            has_methods(f"{BASE}:KVConnectorBase_V1", HOOKS),
        ),
        "connector_roles_and_metadata": (
            "scheduler side and worker side are told apart and exchange metadata",
            exists(
                f"{BASE}:KVConnectorRole.SCHEDULER",
                f"{BASE}:KVConnectorRole.WORKER",
                f"{BASE}:KVConnectorMetadata",
                f"{BASE}:KVConnectorHandshakeMetadata",
                f"{BASE}:KVConnectorWorkerMetadata",
            ),
        ),
        "supports_hma": (
            "vLLM keeps its hybrid cache manager on, and frees all groups through one call",
            abstract_only(
                f"{BASE}:SupportsHMA", {"request_finished_all_groups": ("request", "block_ids")}
            ),
        ),
        "transfer_results": (
            "a failed load of a model with several cache groups is reported request by request",
            has_fields(
                f"{BASE}:KVConnectorTransferResults",
                *("finished_sending", "finished_recving", "failed_recving"),
            ),
            "0.30",
        ),
        "transfer_results_hook": (
            "finished and failed transfers are asked for in one call",
            has_methods(
                f"{BASE}:KVConnectorBase_V1", {"get_transfer_results": ("finished_req_ids",)}
            ),
            "0.30",
        ),
        "loaded_cache_groups": (
            "vLLM asks which cache groups a load restores",
            has_methods(
                f"{BASE}:KVConnectorBase_V1", {"get_loaded_kv_cache_group_ids": ("request",)}
            ),
            "0.32",
        ),
        "cache_hit_source": (
            "tokens that came from a peer are counted as such",
            exists("vllm.v1.metrics.cache_hit_source:CacheHitSource.P2P"),
            "0.32",
        ),
        "connector_stats": (
            "transfer statistics travel from the workers to the logger",
            has_fields(f"{METRICS}:KVConnectorStats", "data"),
        ),
        "connector_prometheus": (
            "transfer statistics become Prometheus metrics",
            has_methods(
                f"{METRICS}:KVConnectorPromMetrics",
                {"__init__": PROM_PARAMETERS, "observe": ("transfer_stats_data", "engine_idx")},
            ),
        ),
        "kv_transfer_config": (
            "role, engine id, options and failure policy come from the user's configuration",
            has_fields(
                "vllm.config:KVTransferConfig",
                *("kv_connector", "engine_id", "kv_role", "kv_buffer_device"),
                *("kv_connector_extra_config", "kv_load_failure_policy"),
            ),
        ),
        "attention_spec": (
            "an attention cache's specification says how many heads a rank holds",
            has_fields(f"{SPECS}:AttentionSpec", "block_size", "num_kv_heads", "dtype"),
        ),
        "request_tokens": (
            "a prompt that is prefilled for another engine is computed without its last token",
            has_attributes(
                "vllm.v1.request:Request",
                *("prompt_token_ids", "_all_token_ids", "num_prompt_tokens", "max_tokens"),
            ),
        ),
        "forward_context": (
            "each layer's attention backend is found by the layer's name",
            has_fields("vllm.config:CompilationConfig", "static_forward_context"),
        ),
        "block_pool": (
            "blocks that a peer reads are held, and freed afterwards",
            exists(f"{BLOCKS}:BlockPool.touch", f"{BLOCKS}:BlockPool.free_blocks"),
        ),
    },
    "nixl states": {
        "conv_state_layout": (
            "state-space layers take the order of their convolution state from the "
            "environment, once",
            exists(
                f"{MAMBA_UTILS}:get_conv_state_layout.cache_clear",
                f"{MAMBA_UTILS}:is_conv_state_dim_first",
            ),
        ),
        "state_spec": (
            "a state's tensors follow one another in its block, in the order of their shapes",
            has_fields(f"{SPECS}:MambaSpec", "shapes", "dtypes", "mamba_type", "block_size"),
        ),
    },
    "nixl first token": {
        "first_token_request": (
            "the token becomes the last one of its request's prompt",
            has_attributes(
                "vllm.v1.request:Request",
                *("_output_token_ids", "num_computed_tokens", "num_preemptions", "status"),
                *("client_index", "stop_reason", "trace_headers", "request_id"),
            ),
        ),
        "first_token_methods": (
            "and is told as vLLM tells its own, at the end of a request too",
            exists(
                *(
                    f"vllm.v1.request:Request.{name}"
                    for name in (
                        *("append_output_token_ids", "num_output_tokens", "take_prefill_stats"),
                        *("record_event", "take_events", "get_finished_reason", "is_finished"),
                    )
                ),
                "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
            ),
        ),
        "first_token_end": (
            "whether a first token from a prefill engine ends the answer is decided by vLLM itself",
            takes("vllm.v1.core.sched.utils:check_stop", "request", "max_model_len"),
        ),
        "first_token_output": (
            "such a token is sent as vLLM sends its own, and not while the engine is paused",
            exists(
                "vllm.v1.engine:EngineCoreOutput",
                "vllm.v1.engine:EngineCoreOutputs",
                "vllm.v1.engine:EngineCoreEventType.SCHEDULED",
                "vllm.v1.core.sched.interface:PauseState.UNPAUSED",
                "vllm.v1.request:RequestStatus.WAITING_FOR_REMOTE_KVS",
                "vllm.v1.request:RequestStatus.FINISHED_ERROR",
            ),
        ),
        "failed_loads": (
            "a request that has its first token is computed here when its load fails",
            has_attributes(
                "vllm.v1.core.sched.scheduler:Scheduler",
                *("failed_recving_kv_req_ids", "finished_recving_kv_req_ids", "requests"),
                *("max_model_len", "log_stats", "connector", "running", "finished_req_ids"),
                *("recompute_kv_load_failures", "kv_cache_manager"),
            ),
        ),
        "read_blocks": (
            "what a failed load has brought is found in the prefix cache, and blocks by request",
            has_methods(
                "vllm.v1.core.kv_cache_manager:KVCacheManager",
                {
                    "cache_blocks": ("request", "num_computed_tokens"),
                    "get_blocks": ("request_id",),
                },
            ),
        ),
    },
    "engine step": {
        "engine_step": (
            "an engine that only waits for the connector sleeps before its step",
            has_methods(f"{ENGINE}:EngineCoreProc", {"_process_engine_step": ()}),
        ),
        "engine_queues": (
            "what arrives ends the sleep, and first tokens go out as vLLM's own do",
            has_attributes(
                f"{ENGINE}:EngineCoreProc", "input_queue", "output_queue", "engines_running"
            ),
        ),
        "engine_step_function": (
            "a step is a function of the engine's, and how many are under way is known",
            has_attributes(f"{ENGINE}:EngineCore", "step_fn", "scheduler", "batch_queue_size"),
        ),
    },
    "pauses": {
        "prefix_cache_reset": (
            "what was computed counts until vLLM drops its caches",
            has_methods(
                "vllm.v1.core.sched.scheduler:Scheduler",
                {"reset_prefix_cache": ("reset_running_requests", "reset_connector")},
            ),
        ),
        "loaded_requests": (
            "requests whose loads have ended wait for nothing else",
            exists("vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv"),
        ),
        "waiting_requests": (
            "and are put where vLLM has those that wait",
            has_attributes("vllm.v1.core.sched.scheduler:Scheduler", "waiting"),
        ),
        "calls_of_workers": (
            "or until its workers are called for other weights",
            has_methods(
                f"{ENGINE}:EngineCore", {"collective_rpc": ("method", "timeout", "args", "kwargs")}
            ),
        ),
        "pause_state": (
            "an engine that is paused keeps nothing for others",
            exists("vllm.v1.core.sched.interface:PauseState.UNPAUSED"),
        ),
    },
    "nixl reuse": {
        "block_reuse": (
            "whoever gives up a block that others may still read is told when it is used again",
            takes(f"{BLOCKS}:BlockPool.unpin_blocks", "blocks", "on_reuse"),
            "0.30",
        )
    },
}
