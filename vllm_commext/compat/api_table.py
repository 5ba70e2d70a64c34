"""The table of API checks: every vLLM API that we depend on, and what we expect of it.

Nothing of vLLM's is imported when this module is; a probe does it, when it runs.
"""

from dataclasses import dataclass

from vllm_commext.compat.api_probes import (
    Probe,
    abstract_only,
    exists,
    has_attributes,
    has_fields,
    has_methods,
    maps_to_callables,
    no_methods_beyond,
    takes,
    where_installed,
)
from vllm_commext.compat.api_signatures import (
    ABSTRACT_METHODS,
    HOOKS,
    PROM_PARAMETERS,
    QUEUE_INTERNALS,
    QUEUE_METHODS,
)
from vllm_commext.compat.versions import OLDEST

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{CONNECTORS}.v1.base"
METRICS = f"{CONNECTORS}.v1.metrics"
MINIMAX_NORM = "vllm.model_executor.layers.minimax_rms_norm"
FUSERS = "vllm.model_executor.models.transformers.fusers.rms_norm"
MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"
SPREAD_NORMS = {  # models whose attention gathers Q and K by itself
    "OLMoE": "vllm.model_executor.models.olmoe:OlmoeAttention",
    "OlmoHybrid": "vllm.model_executor.models.olmo_hybrid:OlmoHybridAttention",
    "Molmo": "vllm.model_executor.models.molmo:MolmoAttention",
    "Molmo2": "vllm.model_executor.models.molmo2:Molmo2Attention",
}
MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
BLOCKS = "vllm.v1.core.block_pool"
ENGINE = "vllm.v1.engine.core"
SPECS = "vllm.v1.kv_cache_interface"
COMMUNICATORS = "vllm.distributed.device_communicators"
PASSES = "vllm.compilation.passes"
QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
ARENAS = "vllm.distributed.device_communicators.shm_tensor_arena"


@dataclass(frozen=True)
class ApiCheck:
    """One API of vLLM that we depend on.

    Attributes:
        name: short and unique; what the log and ``vllm-commext doctor`` print.
        capability: the capability that cannot run without it.
        why: what we use it for.
        probe: says what is wrong, or returns an empty string where all is well.
        since: first minor release that has it; we do without on an older one.
    """

    name: str
    capability: str
    why: str
    probe: Probe
    since: str = OLDEST


API_CHECKS: tuple[ApiCheck, ...] = (
    ApiCheck(
        "environment_variables",
        "toggles",
        "our toggles are known names to vLLM and part of its compile-cache key",
        maps_to_callables("vllm.envs:environment_variables"),
    ),
    ApiCheck(
        "register_connector",
        "nixl",
        "the connector is registered under its name",
        takes(
            f"{CONNECTORS}.factory:KVConnectorFactory.register_connector",
            *("name", "module_path", "class_name"),
        ),
    ),
    ApiCheck(
        "connector_registry",
        "nixl",
        "a second registration in one process must not raise",
        maps_to_callables(f"{CONNECTORS}.factory:KVConnectorFactory._registry"),
    ),
    ApiCheck(
        "connector_constructor",
        "nixl",
        "the connector is built with the configuration, its role and the KV cache configuration",
        takes(f"{BASE}:KVConnectorBase_V1.__init__", *("vllm_config", "role", "kv_cache_config")),
    ),
    ApiCheck(
        "connector_abstract_methods",
        "nixl",
        "we implement every abstract method, called as we expect",
        abstract_only(f"{BASE}:KVConnectorBase_V1", ABSTRACT_METHODS),
    ),
    ApiCheck(
        "connector_hooks",
        "nixl",
        "the methods that we override are those that vLLM calls",
        has_methods(f"{BASE}:KVConnectorBase_V1", HOOKS),
    ),
    ApiCheck(
        "connector_roles_and_metadata",
        "nixl",
        "scheduler side and worker side are told apart and exchange metadata",
        exists(
            f"{BASE}:KVConnectorRole.SCHEDULER",
            f"{BASE}:KVConnectorRole.WORKER",
            f"{BASE}:KVConnectorMetadata",
            f"{BASE}:KVConnectorHandshakeMetadata",
            f"{BASE}:KVConnectorWorkerMetadata",
        ),
    ),
    ApiCheck(
        "supports_hma",
        "nixl",
        "vLLM keeps its hybrid cache manager on, and frees all groups through one call",
        abstract_only(
            f"{BASE}:SupportsHMA", {"request_finished_all_groups": ("request", "block_ids")}
        ),
    ),
    ApiCheck(
        "transfer_results",
        "nixl",
        "a failed load of a model with several cache groups is reported request by request",
        has_fields(
            f"{BASE}:KVConnectorTransferResults",
            *("finished_sending", "finished_recving", "failed_recving"),
        ),
        since="0.30",
    ),
    ApiCheck(
        "transfer_results_hook",
        "nixl",
        "finished and failed transfers are asked for in one call",
        has_methods(f"{BASE}:KVConnectorBase_V1", {"get_transfer_results": ("finished_req_ids",)}),
        since="0.30",
    ),
    ApiCheck(
        "loaded_cache_groups",
        "nixl",
        "vLLM asks which cache groups a load restores",
        has_methods(f"{BASE}:KVConnectorBase_V1", {"get_loaded_kv_cache_group_ids": ("request",)}),
        since="0.32",
    ),
    ApiCheck(
        "cache_hit_source",
        "nixl",
        "tokens that came from a peer are counted as such",
        exists("vllm.v1.metrics.cache_hit_source:CacheHitSource.P2P"),
        since="0.32",
    ),
    ApiCheck(
        "connector_stats",
        "nixl",
        "transfer statistics travel from the workers to the logger",
        has_fields(f"{METRICS}:KVConnectorStats", "data"),
    ),
    ApiCheck(
        "connector_prometheus",
        "nixl",
        "transfer statistics become Prometheus metrics",
        has_methods(
            f"{METRICS}:KVConnectorPromMetrics",
            {"__init__": PROM_PARAMETERS, "observe": ("transfer_stats_data", "engine_idx")},
        ),
    ),
    ApiCheck(
        "kv_transfer_config",
        "nixl",
        "role, engine id, options and failure policy come from the user's configuration",
        has_fields(
            "vllm.config:KVTransferConfig",
            *("kv_connector", "engine_id", "kv_role", "kv_buffer_device"),
            *("kv_connector_extra_config", "kv_load_failure_policy"),
        ),
    ),
    ApiCheck(
        "conv_state_layout",
        "nixl states",
        "state-space layers take the order of their convolution state from the environment, once",
        exists(
            f"{MAMBA_UTILS}:get_conv_state_layout.cache_clear",
            f"{MAMBA_UTILS}:is_conv_state_dim_first",
        ),
    ),
    ApiCheck(
        "state_spec",
        "nixl states",
        "a state's tensors follow one another in its block, in the order of their shapes",
        has_fields(f"{SPECS}:MambaSpec", "shapes", "dtypes", "mamba_type", "block_size"),
    ),
    ApiCheck(
        "attention_spec",
        "nixl",
        "an attention cache's specification says how many heads a rank holds",
        has_fields(f"{SPECS}:AttentionSpec", "block_size", "num_kv_heads", "dtype"),
    ),
    ApiCheck(
        "request_tokens",
        "nixl",
        "a prompt that is prefilled for another engine is computed without its last token",
        has_attributes(
            "vllm.v1.request:Request",
            *("prompt_token_ids", "_all_token_ids", "num_prompt_tokens", "max_tokens"),
        ),
    ),
    ApiCheck(
        "first_token_request",
        "nixl first token",
        "the token becomes the last one of its request's prompt",
        has_attributes(
            "vllm.v1.request:Request",
            *("_output_token_ids", "num_computed_tokens", "num_preemptions", "status"),
            *("client_index", "stop_reason", "trace_headers", "request_id"),
        ),
    ),
    ApiCheck(
        "first_token_methods",
        "nixl first token",
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
    ApiCheck(
        "first_token_end",
        "nixl first token",
        "whether a first token from a prefill engine ends the answer is decided by vLLM itself",
        takes("vllm.v1.core.sched.utils:check_stop", "request", "max_model_len"),
    ),
    ApiCheck(
        "first_token_output",
        "nixl first token",
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
    ApiCheck(
        "failed_loads",
        "nixl first token",
        "a request that has its first token is computed here when its load fails",
        has_attributes(
            "vllm.v1.core.sched.scheduler:Scheduler",
            *("failed_recving_kv_req_ids", "finished_recving_kv_req_ids", "requests"),
            *("max_model_len", "log_stats", "connector", "running", "finished_req_ids"),
            "recompute_kv_load_failures",
        ),
    ),
    ApiCheck(
        "engine_step",
        "engine step",
        "an engine that only waits for the connector sleeps before its step",
        has_methods(f"{ENGINE}:EngineCoreProc", {"_process_engine_step": ()}),
    ),
    ApiCheck(
        "engine_queues",
        "engine step",
        "what arrives ends the sleep, and first tokens go out as vLLM's own do",
        has_attributes(
            f"{ENGINE}:EngineCoreProc", "input_queue", "output_queue", "engines_running"
        ),
    ),
    ApiCheck(
        "engine_step_function",
        "engine step",
        "a step is a function of the engine's, and how many are under way is known",
        has_attributes(f"{ENGINE}:EngineCore", "step_fn", "scheduler", "batch_queue_size"),
    ),
    ApiCheck(
        "prefix_cache_reset",
        "pauses",
        "what was computed counts until vLLM drops its caches",
        has_methods(
            "vllm.v1.core.sched.scheduler:Scheduler",
            {"reset_prefix_cache": ("reset_running_requests", "reset_connector")},
        ),
    ),
    ApiCheck(
        "loaded_requests",
        "pauses",
        "requests whose loads have ended wait for nothing else",
        exists("vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv"),
    ),
    ApiCheck(
        "waiting_requests",
        "pauses",
        "and are put where vLLM has those that wait",
        has_attributes("vllm.v1.core.sched.scheduler:Scheduler", "waiting"),
    ),
    ApiCheck(
        "calls_of_workers",
        "pauses",
        "or until its workers are called for other weights",
        has_methods(
            f"{ENGINE}:EngineCore", {"collective_rpc": ("method", "timeout", "args", "kwargs")}
        ),
    ),
    ApiCheck(
        "pause_state",
        "pauses",
        "an engine that is paused keeps nothing for others",
        exists("vllm.v1.core.sched.interface:PauseState.UNPAUSED"),
    ),
    ApiCheck(
        "forward_context",
        "nixl",
        "each layer's attention backend is found by the layer's name",
        has_fields("vllm.config:CompilationConfig", "static_forward_context"),
    ),
    ApiCheck(
        "block_pool",
        "nixl",
        "blocks that a peer reads are held, and freed afterwards",
        exists(f"{BLOCKS}:BlockPool.touch", f"{BLOCKS}:BlockPool.free_blocks"),
    ),
    ApiCheck(
        "block_reuse",
        "nixl reuse",
        "whoever gives up a block that others may still read is told when it is used again",
        takes(f"{BLOCKS}:BlockPool.unpin_blocks", "blocks", "on_reuse"),
        since="0.30",
    ),
    ApiCheck(
        "queue_constructor",
        "shm_queue",
        "queues are built with the arguments that ours takes",
        takes(
            f"{QUEUES}:MessageQueue.__init__",
            *("n_reader", "n_local_reader", "local_reader_ranks", "max_chunk_bytes", "max_chunks"),
            "connect_ip",
        ),
    ),
    ApiCheck(
        "queue_methods",
        "shm_queue",
        "our queue has every method that vLLM calls on its own",
        has_methods(f"{QUEUES}:MessageQueue", QUEUE_METHODS),
    ),
    ApiCheck(
        "queue_has_no_other_methods",
        "shm_queue",
        "vLLM's queue has no method that ours lacks",
        no_methods_beyond(f"{QUEUES}:MessageQueue", {*QUEUE_METHODS, *QUEUE_INTERNALS}),
    ),
    ApiCheck(
        "queue_handle",
        "shm_queue",
        "a queue's handle has the fields that vLLM's executor looks at",
        has_fields(f"{QUEUES}:Handle", "local_reader_ranks", "remote_subscribe_addr"),
    ),
    ApiCheck(
        "queue_place",
        "shm_queue",
        "ranks of a host and its address are told as vLLM tells them",
        exists(
            "vllm.utils.network_utils:get_ip",
            "vllm.platforms.interface:get_assigned_physical_gpu_ids",
        ),
    ),
    ApiCheck(
        "queue_tensor_arena",
        "shm_queue",
        "large tensors lie in vLLM's arena where a queue is to have one",
        exists(
            f"{ARENAS}:ShmTensorArena.handle",
            f"{ARENAS}:ShmTensorArena.flush_releases",
            f"{ARENAS}:_ArenaPickler.reducer_override",
            f"{ARENAS}:_TENSOR_ARENAS",
        ),
        since="0.32",
    ),
    ApiCheck(
        "minimax_fused_norm",
        "norm of MiniMax-M2",
        "MiniMax-M2's norm looks up its fused op and that op's bound when it is called",
        exists(
            f"{MINIMAX_NORM}.rms_norm_tp:_MINIMAX_FUSED_AR_RMS_QK",
            f"{MINIMAX_NORM}.rms_norm_tp:MINIMAX_QK_NORM_MAX_TOKEN_NUM",
        ),
    ),
    ApiCheck(
        "minimax_norm_arguments",
        "norm of MiniMax-M2",
        "the fused op is called with the packed row, both weights and a workspace",
        takes(
            f"{MINIMAX_NORM}.rms_norm_tp:_minimax_qk_norm_fusion",
            *("qkv", "q_weight", "k_weight", "q_size", "kv_size", "tp_rank", "tp_world", "eps"),
            "workspace",
        ),
    ),
    ApiCheck(
        "minimax_workspace",
        "norm of MiniMax-M2",
        "the norm asks for its workspace with the arguments that ours takes",
        where_installed(
            "cuda",
            takes(
                f"{MINIMAX_NORM}.lamport_workspace:get_allreduce_workspace",
                *("rank", "world_size", "comm_size", "max_tokens", "process_group"),
            ),
        ),
    ),
    *(
        seam
        for model, path in SPREAD_NORMS.items()
        for seam in (
            ApiCheck(
                f"{model} norm",
                f"norm of {model}",
                "the QK RMSNorm is a method of its own",
                has_methods(path, {"_apply_qk_norm": ("q", "k")}),
            ),
            ApiCheck(
                f"{model} attention",
                f"norm of {model}",
                "the attention makes both norms when it is made",
                has_attributes(path, "q_norm", "k_norm", "q_size", "kv_size", "tp_size", "tp_rank"),
            ),
        )
    ),
    ApiCheck(
        "transformers_norm",
        "norm of the Transformers backend",
        "a norm of rows that are spread over the ranks is a class of its own",
        has_methods(f"{FUSERS}:TPAwareNormMixin", {"forward": ("x", "residual")}),
    ),
    ApiCheck(
        "transformers_norm_facts",
        "norm of the Transformers backend",
        "it knows which part of the row a rank has",
        has_attributes(f"{FUSERS}:TPAwareNormMixin", "tp_size", "tp_rank"),
    ),
    ApiCheck(
        "transformers_norm_made",
        "norm of the Transformers backend",
        "it takes the place of a model's norm, whose name in the model it is told",
        takes(f"{FUSERS}:RMSNormFuser.fuse", "module", "prefix", "vllm_config"),
    ),
    ApiCheck(
        "mamba2_norm",
        "norm of Mamba2",
        "the gated norm of spread rows is a method of its own",
        has_methods(f"{MIXER}:Mixer2RMSNormGated", {"forward_native": ("x", "gate")}),
    ),
    ApiCheck(
        "mamba2_norm_facts",
        "norm of Mamba2",
        "the norm knows its groups and how many ranks share a row",
        has_attributes(
            f"{MIXER}:Mixer2RMSNormGated",
            *("tp_size", "n_groups", "use_rms_norm", "weight", "variance_epsilon"),
        ),
    ),
    ApiCheck(
        "cpu_communicator",
        "cpu_collectives",
        "a communicator of CPUs gets ring buffers when made, and reduces and gathers through them",
        has_methods(
            f"{COMMUNICATORS}.cpu_communicator:CpuCommunicator",
            {"all_reduce": ("input_",), "all_gather": ("input_", "dim")},
        ),
    ),
    ApiCheck(
        "cpu_communicator_module",
        "cpu_collectives",
        "what a communicator calls for its collectives is an attribute that can be set",
        has_attributes(f"{COMMUNICATORS}.cpu_communicator:CpuCommunicator", "dist_module"),
    ),
    ApiCheck(
        "same_node",
        "cpu_collectives",
        "only ranks of one host get ring buffers",
        takes("vllm.distributed.parallel_state:in_the_same_node_as", "pg", "source_rank"),
    ),
    ApiCheck(
        "communicator_constructor",
        "allreduce",
        "a communicator gets its dispatcher when it is made, from the groups that it is made of",
        takes(
            f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator.__init__",
            *("cpu_group", "device", "device_group", "unique_name", "global_ranks"),
            *("global_world_size", "tcp_store_group", "use_all2all"),
        ),
    ),
    ApiCheck(
        "communicator_methods",
        "allreduce",
        "the dispatcher is asked in every all-reduce, and given back before vLLM's own parts go",
        has_methods(
            f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator",
            {"all_reduce": ("input_",), "destroy": (), "checkpoint_prepare": ()},
        ),
    ),
    ApiCheck(
        "custom_all_reduce",
        "allreduce",
        "vLLM's own kernel is one of the backends, and registers its buffers after a capture",
        has_methods(
            f"{COMMUNICATORS}.custom_all_reduce:CustomAllreduce",
            {"custom_all_reduce": ("input",), "capture": ()},
        ),
    ),
    ApiCheck(
        "nccl_all_reduce",
        "allreduce",
        "NCCL is one of the backends, through vLLM's own binding",
        has_methods(
            f"{COMMUNICATORS}.pynccl:PyNcclCommunicator",
            {"all_reduce": ("in_tensor", "out_tensor", "op", "stream")},
        ),
    ),
    ApiCheck(
        "pass_manager",
        "fused_norm",
        "our pass is put among vLLM's own when these are made, each asked for its identity",
        has_methods(
            f"{PASSES}.pass_manager:PostGradPassManager", {"configure": ("config",), "uuid": ()}
        ),
    ),
    ApiCheck(
        "pass_list",
        "fused_norm",
        "vLLM runs the passes of a list, in its order",
        has_attributes(f"{PASSES}.pass_manager:PostGradPassManager", "passes"),
    ),
    ApiCheck(
        "pass_context",
        "fused_norm",
        "a pass knows the numbers of tokens that its graph is for",
        has_attributes(f"{PASSES}.inductor_pass:PassContext", "compile_range"),
    ),
    ApiCheck(
        "pass_base",
        "fused_norm",
        "a pass is a class of vLLM's, and asks which graph it is for",
        exists(
            f"{PASSES}.inductor_pass:InductorPass.is_applicable_for_range",
            f"{PASSES}.inductor_pass:get_pass_context",
        ),
    ),
    ApiCheck(
        "all_reduce_op",
        "fused_norm",
        "in a graph, an all-reduce is an op of a tensor and its group's name",
        takes("vllm.distributed.parallel_state:all_reduce", "tensor", "group_name"),
    ),
    ApiCheck(
        "norm_ops",
        "fused_norm",
        "in a graph, norms are vLLM's own ops until its last passes",
        exists("vllm.ir.ops.layernorm:rms_norm", "vllm.ir.ops.layernorm:fused_add_rms_norm"),
    ),
    ApiCheck(
        "eager_norm",
        "fused_eager",
        "models without compiler passes call it with their part of the sum, residual and norm",
        takes(
            "vllm.models.common.ops.fused_allreduce_rms_norm:fused_allreduce_rms_norm",
            *("hidden_states", "residual", "norm"),
        ),
    ),
    ApiCheck(
        "eager_gemma_norm",
        "fused_eager",
        "the same with the norm that adds 1 to its weights",
        takes(
            "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm:"
            "fused_allreduce_gemma_rms_norm",
            *("hidden_states", "residual", "norm"),
        ),
    ),
    ApiCheck(
        "quantiser_patterns",
        "fused_norm",
        "vLLM's own passes say how a quantiser to 8 bits looks in a graph",
        exists(
            f"{PASSES}.fusion.matcher_utils:MatcherQuantFP8",
            f"{PASSES}.fusion.matcher_utils:QUANT_OPS",
            f"{PASSES}.inductor_pass:enable_fake_mode",
            *(
                f"vllm.model_executor.layers.quantization.utils.quant_utils:{name}"
                for name in ("kFp8Dynamic128Sym", "kFp8DynamicTokenSym", "kFp8StaticTensorSym")
            ),
        ),
    ),
)
