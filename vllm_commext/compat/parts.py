"""The parts of this package that depend on vLLM's own code, each with the functions of vLLM's that
it replaces, calls or is called by.

They are named finely: a method and not its class, so that what else changes there does not count.
"""

from dataclasses import dataclass

from vllm_commext.compat.api_checks import (
    COMMUNICATORS,
    FUSERS,
    MINIMAX_NORM,
    OLMOE,
    PASSES,
    QUEUES,
)
from vllm_commext.compat.api_connector import BASE, BLOCKS, CONNECTORS, ENGINE, MAMBA_UTILS, SPECS

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ENGINE = f"{ENGINE}:EngineCoreProc"
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
        name: as of its API checks.
        of: the capability of `plugin` that it belongs to.
        sources: the functions of vLLM's; none where its own parts say it all.
        self_test: ``module:function``, which raises where the part does not do on this vLLM what it
            should. `IN_USE`: it takes the ranks of a group, and the part runs it when these are
            there. Empty: there is none.
    """

    name: str
    of: str
    sources: tuple[str, ...]
    self_test: str = ""


def _of(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


PARTS: tuple[Part, ...] = (
    Part(
        *("nixl", "nixl"),
        (
            f"{CONNECTORS}.factory:KVConnectorFactory.create_connector",
            f"{CONNECTORS}.utils:KVOutputAggregator.aggregate",
            *_of(f"{BASE}:KVConnectorBase_V1", "__init__", "bind_connector_metadata"),
            *_of(_SCHEDULER, "_connector_finished", "_update_waiting_for_remote_kv"),
            *_of(_SCHEDULER, "_update_from_kv_xfer_finished", "_handle_invalid_blocks"),
            *_of("vllm.v1.worker.gpu.kv_connector:ActiveKVConnector", "pre_forward"),
            *_of("vllm.v1.worker.gpu.kv_connector:ActiveKVConnector", "post_forward"),
            f"{SPECS}:AttentionSpec",
        ),
        f"{_SELF_TESTS}:hand_over",
    ),
    Part(
        *("nixl states", "nixl"),
        (
            *_of(f"{SPECS}:MambaSpec", "page_size_bytes"),
            f"{MAMBA_UTILS}:get_conv_state_layout",
            f"{MAMBA_UTILS}:is_conv_state_dim_first",
            f"{MAMBA_UTILS}:MambaStateShapeCalculator.mamba2_state_shape",
        ),
        f"{_SELF_TESTS}:states",
    ),
    Part(
        *("nixl reuse", "nixl"),
        _of(f"{BLOCKS}:BlockPool", "touch", "free_blocks", "unpin_blocks"),
        f"{_SELF_TESTS}:reuse",
    ),
    Part(
        *("nixl first token", "nixl"),
        (
            *_of("vllm.v1.request:Request", "append_output_token_ids", "take_prefill_stats"),
            f"{_SCHEDULER}.finish_requests",
            "vllm.v1.core.sched.utils:check_stop",
            "vllm.v1.engine:EngineCoreOutput",
            "vllm.v1.engine:EngineCoreOutputs",
        ),
        f"{_SELF_TESTS}:first_token",
    ),
    Part(
        *("engine step", "nixl"),
        _of(_ENGINE, "_process_engine_step", "run_busy_loop", "_process_input_queue"),
        f"{_SELF_TESTS}:engine_step",
    ),
    Part(
        *("pauses", "nixl"),
        (f"{_SCHEDULER}.reset_prefix_cache", f"{ENGINE}:EngineCore.collective_rpc"),
        f"{_SELF_TESTS}:pauses",
    ),
    Part(
        *("shm_queue", "shm_queue"),
        (
            *_of(f"{QUEUES}:MessageQueue", "__init__", "enqueue", "dequeue", "wait_until_ready"),
            *_of(f"{QUEUES}:MessageQueue", "create_from_process_group"),
            *_of(f"{QUEUES}:MessageQueue", "create_from_process_group_single_reader"),
            f"{QUEUES}:Handle",
            *_of(f"{_EXECUTOR}:MultiprocExecutor", "_init_executor", "collective_rpc"),
            *_of(f"{_EXECUTOR}:WorkerProc", "__init__", "_init_message_queues"),
            *_of(f"{_EXECUTOR}:WorkerProc", "worker_busy_loop", "enqueue_output"),
            f"{_STEPS}:SchedulerOutput",
            f"{_STEPS}:NewRequestData",
            f"{_STEPS}:CachedRequestData",
            "vllm.v1.outputs:ModelRunnerOutput",
        ),
        f"{_SELF_TESTS}:queue",
    ),
    Part(
        *("cpu_collectives", "cpu_collectives"),
        (*_of(_CPU, "__init__", "all_reduce", "all_gather"), f"{_GROUPS}:in_the_same_node_as"),
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
            *_of(f"{PASSES}.pass_manager:PostGradPassManager", "configure", "__call__"),
            f"{PASSES}.inductor_pass:InductorPass",
            f"{PASSES}.inductor_pass:PassContext",
            f"{_GROUPS}:all_reduce",
            "vllm.ir.ops.layernorm:rms_norm",
            "vllm.ir.ops.layernorm:fused_add_rms_norm",
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
            *(
                f"{MINIMAX_NORM}.rms_norm_tp:{name}"
                for name in ("MINIMAX_QK_NORM_MAX_TOKEN_NUM", "_MINIMAX_FUSED_AR_RMS_QK")
            ),
            f"{MINIMAX_NORM}.rms_norm_tp:_minimax_qk_norm_fusion",
        ),
    ),
    Part("norm of OLMoE", "reduce_rms", _of(OLMOE, "__init__", "_apply_qk_norm"), IN_USE),
    Part(
        *("norm of the Transformers backend", "reduce_rms"),
        (f"{FUSERS}:RMSNormFuser.fuse", f"{FUSERS}:TPAwareNormMixin.forward"),
        IN_USE,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
