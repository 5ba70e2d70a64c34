"""The parts of this package that depend on vLLM's own code, each with the names of vLLM's that it
replaces, calls, reads or is called by.

They are named finely, a method and not its class, so that other changes there do not count.
"""

from dataclasses import dataclass

MINIMAX_NORM = "vllm.model_executor.layers.minimax_rms_norm"
FUSERS = "vllm.model_executor.models.transformers.fusers.rms_norm"
OLMOE = "vllm.model_executor.models.olmoe:OlmoeAttention"
COMMUNICATORS = "vllm.distributed.device_communicators"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{CONNECTORS}.v1.base"
PASSES = "vllm.compilation.passes"

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_PAUSE = "vllm.v1.core.sched.interface:PauseState.UNPAUSED"
_CORE = "vllm.v1.engine.core:EngineCore"
_ENGINE = "vllm.v1.engine.core:EngineCoreProc"
_OUTPUTS = "vllm.v1.engine.output_processor"
_REQUEST = "vllm.v1.request:Request"
_STATUS = "vllm.v1.request:RequestStatus"
_SPECS = "vllm.v1.kv_cache_interface"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_CACHES = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_STATES = "vllm.model_executor.layers.mamba.mamba_utils"
_ACTIVE = "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector"
_QUEUES = f"{COMMUNICATORS}.shm_broadcast"
_ARENAS = f"{COMMUNICATORS}.shm_tensor_arena"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_STEPS = "vllm.v1.core.sched.output"
_GROUPS = "vllm.distributed.parallel_state"
_CUDA = f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator"
_CPU = f"{COMMUNICATORS}.cpu_communicator:CpuCommunicator"
_SELF_TESTS = "vllm_commext.compat.self_tests"

IN_USE = "in use"


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        of: the capability of `plugin` that it belongs to.
        sources: ``module:name`` or ``module:Class.name`` where vLLM defines it, or, for what
            methods set on instances, ``module:Class@name``; none where its own parts say it all.
        self_test: ``module:function``, which raises where the part does not work on this vLLM.
            `IN_USE`: it needs the ranks of a group, and the part runs it when these are there.
            Empty: there is none.
    """

    name: str
    of: str
    sources: tuple[str, ...]
    self_test: str = ""


def _of(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


def _in(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names)


def _set(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}@{name}" for name in names)


_HOOKS = (  # of a connector: what vLLM calls and ours overrides
    *("__init__", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "wait_for_save", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "register_kv_caches", "bind_gpu_block_pool", "handle_preemptions"),
    *("get_transfer_results", "get_handshake_metadata", "set_xfer_handshake_metadata"),
    "has_pending_push_work",
    *("set_xfer_handshake_metadata_pp_aware", "get_kv_connector_stats", "on_new_request"),
    *("build_connector_worker_meta", "update_connector_output", "request_finished", "reset_cache"),
    *("get_required_kvcache_layout", "build_kv_connector_stats", "build_prom_metrics", "shutdown"),
    "get_loaded_kv_cache_group_ids",
)
PARTS: tuple[Part, ...] = (
    Part(
        *("nixl", "nixl"),
        (
            *_of(f"{CONNECTORS}.factory:KVConnectorFactory", "_registry", "register_connector"),
            f"{CONNECTORS}.factory:KVConnectorFactory.create_connector",
            f"{CONNECTORS}.utils:KVOutputAggregator.aggregate",
            *_of(f"{BASE}:KVConnectorBase_V1", *_HOOKS),
            *_in(BASE, "KVConnectorRole", "KVConnectorTransferResults", "SupportsHMA"),
            *_in(BASE, "KVConnectorMetadata", "KVConnectorWorkerMetadata"),
            f"{BASE}:KVConnectorHandshakeMetadata",
            f"{CONNECTORS}.v1.metrics:KVConnectorStats.data",
            *_of(f"{CONNECTORS}.v1.metrics:KVConnectorPromMetrics", "__init__", "observe"),
            "vllm.v1.metrics.cache_hit_source:CacheHitSource.P2P",
            *_of(
                "vllm.config.kv_transfer:KVTransferConfig",
                *("kv_connector", "engine_id", "kv_role", "kv_buffer_device"),
                *("kv_connector_extra_config", "kv_load_failure_policy"),
            ),
            "vllm.config.compilation:CompilationConfig.static_forward_context",
            *_of(_SCHEDULER, "_connector_finished", "_update_waiting_for_remote_kv"),
            *_of(_SCHEDULER, "_update_from_kv_xfer_finished", "_handle_invalid_blocks"),
            *_of(_ACTIVE, "pre_forward", "post_forward"),
            f"{_SPECS}:AttentionSpec",
            *_set(_REQUEST, "prompt_token_ids", "_all_token_ids", "num_prompt_tokens"),
            *_set(_REQUEST, "max_tokens"),
            *_of(_POOL, "touch", "free_blocks"),
        ),
        f"{_SELF_TESTS}:hand_over",
    ),
    Part(
        *("nixl states", "nixl"),
        (
            *_of(f"{_SPECS}:MambaSpec", "page_size_bytes", "shapes", "dtypes", "mamba_type"),
            *_in(_STATES, "get_conv_state_layout", "is_conv_state_dim_first"),
            f"{_STATES}:MambaStateShapeCalculator.mamba2_state_shape",
        ),
        f"{_SELF_TESTS}:states",
    ),
    Part(
        *("nixl reuse", "nixl"),
        _of(_POOL, "touch", "free_blocks", "unpin_blocks"),
        f"{_SELF_TESTS}:reuse",
    ),
    Part(
        *("nixl first token", "nixl"),
        (
            *_of(_REQUEST, "append_output_token_ids", "num_output_tokens", "take_prefill_stats"),
            *_of(_REQUEST, "record_event", "take_events", "get_finished_reason", "is_finished"),
            *_set(_REQUEST, "_output_token_ids", "num_computed_tokens", "num_preemptions"),
            *_set(_REQUEST, "status", "client_index", "stop_reason", "trace_headers", "request_id"),
            *_set(_REQUEST, "block_hashes"),
            *_of(_STATUS, "WAITING_FOR_REMOTE_KVS", "FINISHED_ERROR"),
            *_of(_SCHEDULER, "finish_requests", "pause_state"),
            *_set(_SCHEDULER, "failed_recving_kv_req_ids", "finished_recving_kv_req_ids"),
            *_set(_SCHEDULER, "requests", "running", "finished_req_ids", "connector", "log_stats"),
            *_set(
                _SCHEDULER,
                "vllm_config",
                "block_size",
                "max_model_len",
                "recompute_kv_load_failures",
                "kv_cache_manager",
            ),
            *_of(_CACHES, "cache_blocks", "get_block_ids"),
            "vllm.v1.core.sched.utils:check_stop",
            *_in("vllm.v1.engine", "EngineCoreOutput", "EngineCoreOutputs"),
            "vllm.v1.engine:EngineCoreEventType.SCHEDULED",
            f"{_CORE}._attach_weight_version",
            _PAUSE,
            *_of(f"{_OUTPUTS}:OutputProcessor", "add_request", "process_outputs"),
            *_of(f"{_OUTPUTS}:RequestOutputCollector", "put", "get", "get_nowait"),
            *_set("vllm.v1.metrics.stats:IterationStats", "num_generation_tokens"),
            *_set("vllm.v1.metrics.stats:IterationStats", "inter_token_latencies_iter"),
            "vllm.v1.engine.async_llm:AsyncLLM.generate",
        ),
        f"{_SELF_TESTS}:first_token",
    ),
    Part(
        *("engine step", "nixl"),
        (
            *_of(_ENGINE, "_process_engine_step", "run_busy_loop", "_process_input_queue"),
            *_set(_ENGINE, "input_queue", "output_queue", "engines_running"),
            *_set(_CORE, "step_fn", "scheduler", "batch_queue_size"),
        ),
        f"{_SELF_TESTS}:engine_step",
    ),
    Part(
        *("pauses", "nixl"),
        (
            *_of(_SCHEDULER, "reset_prefix_cache", "_update_waiting_for_remote_kv"),
            *_set(_SCHEDULER, "waiting", "kv_holding_waiting"),
            *_of(_CORE, "collective_rpc", "add_lora"),
            _PAUSE,
        ),
        f"{_SELF_TESTS}:pauses",
    ),
    Part(
        *("shm_queue", "shm_queue"),
        (
            *_of(f"{_QUEUES}:MessageQueue", "__init__", "enqueue", "dequeue", "wait_until_ready"),
            *_of(f"{_QUEUES}:MessageQueue", "export_handle", "create_from_handle", "shutdown"),
            *_of(f"{_QUEUES}:MessageQueue", "create_from_process_group", "broadcast_object"),
            f"{_QUEUES}:MessageQueue.create_from_process_group_single_reader",
            f"{_QUEUES}:Handle",
            *_of(f"{_ARENAS}:ShmTensorArena", "handle", "flush_releases"),
            *_in(_ARENAS, "_ArenaPickler.reducer_override", "_TENSOR_ARENAS"),
            "vllm.platforms.interface:get_assigned_physical_gpu_ids",
            *_of(f"{_EXECUTOR}:MultiprocExecutor", "_init_executor", "collective_rpc"),
            *_of(f"{_EXECUTOR}:WorkerProc", "__init__", "_init_message_queues"),
            *_of(f"{_EXECUTOR}:WorkerProc", "worker_busy_loop", "enqueue_output"),
            *_in(_STEPS, "SchedulerOutput", "NewRequestData", "CachedRequestData"),
            "vllm.v1.outputs:ModelRunnerOutput",
        ),
        f"{_SELF_TESTS}:queue",
    ),
    Part(
        *("cpu_collectives", "cpu_collectives"),
        (
            *_of(_CPU, "__init__", "all_reduce", "all_gather"),
            *_set(_CPU, "dist_module"),
            f"{_GROUPS}:in_the_same_node_as",
        ),
        IN_USE,
    ),
    Part(
        *("allreduce", "allreduce"),
        (
            *_of(_CUDA, "__init__", "all_reduce", "destroy", "checkpoint_prepare"),
            *_of(f"{_GROUPS}:GroupCoordinator", "all_reduce", "_all_reduce_out_place"),
            *_of(f"{COMMUNICATORS}.custom_all_reduce:CustomAllreduce", "custom_all_reduce"),
            f"{COMMUNICATORS}.custom_all_reduce:CustomAllreduce.capture",
            f"{COMMUNICATORS}.pynccl:PyNcclCommunicator.all_reduce",
        ),
        IN_USE,
    ),
    Part(
        *("fused_norm", "allreduce"),
        (
            *_of(f"{PASSES}.pass_manager:PostGradPassManager", "configure", "__call__", "uuid"),
            *_set(f"{PASSES}.pass_manager:PostGradPassManager", "passes"),
            *_in(f"{PASSES}.inductor_pass", "InductorPass", "PassContext", "get_pass_context"),
            f"{PASSES}.inductor_pass:enable_fake_mode",
            *_in(f"{PASSES}.fusion.matcher_utils", "MatcherQuantFP8", "QUANT_OPS"),
            *_in(
                "vllm.model_executor.layers.quantization.utils.quant_utils",
                *("kFp8Dynamic128Sym", "kFp8DynamicTokenSym", "kFp8StaticTensorSym"),
            ),
            f"{_GROUPS}:all_reduce",
            *_in("vllm.ir.ops.layernorm", "rms_norm", "fused_add_rms_norm"),
            "vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
        ),
        IN_USE,
    ),
    Part(
        *("fused_eager", "allreduce"),
        (
            "vllm.models.common.ops.fused_allreduce_rms_norm:fused_allreduce_rms_norm",
            "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm:"
            "fused_allreduce_gemma_rms_norm",
        ),
    ),
    Part("reduce_rms", "reduce_rms", ()),
    Part(
        *("norm of MiniMax-M2", "reduce_rms"),
        (
            f"{MINIMAX_NORM}.lamport_workspace:get_allreduce_workspace",
            *_in(
                f"{MINIMAX_NORM}.rms_norm_tp",
                *("MINIMAX_QK_NORM_MAX_TOKEN_NUM", "_MINIMAX_FUSED_AR_RMS_QK"),
                "_minimax_qk_norm_fusion",
            ),
        ),
    ),
    Part(
        *("norm of OLMoE", "reduce_rms"),
        (
            *_of(OLMOE, "__init__", "_apply_qk_norm"),
            *_set(OLMOE, "q_norm", "k_norm", "q_size", "kv_size", "tp_size", "tp_rank"),
        ),
        IN_USE,
    ),
    Part(
        *("norm of the Transformers backend", "reduce_rms"),
        (
            f"{FUSERS}:RMSNormFuser.fuse",
            f"{FUSERS}:TPAwareNormMixin.forward",
            *_set(f"{FUSERS}:TPAwareNormMixin", "tp_size", "tp_rank"),
        ),
        IN_USE,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
