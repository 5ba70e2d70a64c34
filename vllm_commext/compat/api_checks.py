"""The API checks: every vLLM API that we depend on, and what we expect of it, by part.

Nothing of vLLM's is imported when this module is; a probe does it, when it runs.
"""

from collections.abc import Mapping

from vllm_commext.compat.api_connector import CONNECTOR_CHECKS
from vllm_commext.compat.api_probes import (
    INSTALLED,
    ApiCheck,
    CheckOutcome,
    CheckRows,
    View,
    check,
    exists,
    has_attributes,
    has_fields,
    has_methods,
    maps_to_callables,
    no_methods_beyond,
    takes,
    where_installed,
)

MINIMAX_NORM = "vllm.model_executor.layers.minimax_rms_norm"
FUSERS = "vllm.model_executor.models.transformers.fusers.rms_norm"
OLMOE = "vllm.model_executor.models.olmoe:OlmoeAttention"
COMMUNICATORS = "vllm.distributed.device_communicators"
PASSES = "vllm.compilation.passes"
QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
ARENAS = "vllm.distributed.device_communicators.shm_tensor_arena"
QUEUE_METHODS: Mapping[str, tuple[str, ...]] = {
    "export_handle": (),
    "create_from_handle": ("handle", "rank"),
    "wait_until_ready": (),
    "enqueue": ("obj", "timeout"),
    "dequeue": ("timeout", "indefinite"),
    "broadcast_object": ("obj",),
    "shutdown": (),
    "create_from_process_group": (
        *("pg", "max_chunk_bytes", "max_chunks", "writer_rank", "external_writer_handle"),
        "blocking",
    ),
    "create_from_process_group_single_reader": (
        *("pg", "max_chunk_bytes", "max_chunks", "reader_rank", "blocking"),
    ),
}
# Of vLLM's queue, and called by itself alone.
QUEUE_INTERNALS = ("acquire_read", "acquire_write", "recv")
_CHECKS: CheckRows = {
    "toggles": {
        "environment_variables": (
            "our toggles are known names to vLLM and part of its compile-cache key",
            maps_to_callables("vllm.envs:environment_variables"),
        )
    },
    **CONNECTOR_CHECKS,
    "shm_queue": {
        "queue_constructor": (
            "queues are built with the arguments that ours takes",
            takes(
                f"{QUEUES}:MessageQueue.__init__",
                *(
                    "n_reader",
                    "n_local_reader",
                    "local_reader_ranks",
                    "max_chunk_bytes",
                    "max_chunks",
                ),
                "connect_ip",
            ),
        ),
        "queue_methods": (
            "our queue has every method that vLLM calls on its own",
            has_methods(f"{QUEUES}:MessageQueue", QUEUE_METHODS),
        ),
        "queue_has_no_other_methods": (
            "vLLM's queue has no method that ours lacks",
            no_methods_beyond(f"{QUEUES}:MessageQueue", {*QUEUE_METHODS, *QUEUE_INTERNALS}),
        ),
        "queue_handle": (
            "a queue's handle has the fields that vLLM's executor looks at",
            has_fields(f"{QUEUES}:Handle", "local_reader_ranks", "remote_subscribe_addr"),
        ),
        "queue_place": (
            "ranks of a host are told as vLLM tells them",
            exists("vllm.platforms.interface:get_assigned_physical_gpu_ids"),
        ),
        "queue_tensor_arena": (
            "large tensors lie in vLLM's arena where a queue is to have one",
            exists(
                f"{ARENAS}:ShmTensorArena.handle",
                f"{ARENAS}:ShmTensorArena.flush_releases",
                f"{ARENAS}:_ArenaPickler.reducer_override",
                f"{ARENAS}:_TENSOR_ARENAS",
            ),
            "0.32",
        ),
    },
    "norm of MiniMax-M2": {
        "minimax_fused_norm": (
            "MiniMax-M2's norm looks up its fused op and that op's bound when it is called",
            exists(
                f"{MINIMAX_NORM}.rms_norm_tp:_MINIMAX_FUSED_AR_RMS_QK",
                f"{MINIMAX_NORM}.rms_norm_tp:MINIMAX_QK_NORM_MAX_TOKEN_NUM",
            ),
        ),
        "minimax_norm_arguments": (
            "the fused op is called with the packed row, both weights and a workspace",
            takes(
                f"{MINIMAX_NORM}.rms_norm_tp:_minimax_qk_norm_fusion",
                *("qkv", "q_weight", "k_weight", "q_size", "kv_size", "tp_rank", "tp_world", "eps"),
                "workspace",
            ),
        ),
        "minimax_workspace": (
            "the norm asks for its workspace with the arguments that ours takes",
            where_installed(
                "cuda",
                takes(
                    f"{MINIMAX_NORM}.lamport_workspace:get_allreduce_workspace",
                    *("rank", "world_size", "comm_size", "max_tokens", "process_group"),
                ),
            ),
        ),
    },
    "norm of OLMoE": {
        "OLMoE norm": (
            "the QK RMSNorm is a method of its own",
            has_methods(OLMOE, {"_apply_qk_norm": ("q", "k")}),
        ),
        "OLMoE attention": (
            "the attention makes both norms when it is made",
            has_attributes(OLMOE, "q_norm", "k_norm", "q_size", "kv_size", "tp_size", "tp_rank"),
        ),
    },
    "norm of the Transformers backend": {
        "transformers_norm": (
            "a norm of rows that are spread over the ranks is a class of its own",
            has_methods(f"{FUSERS}:TPAwareNormMixin", {"forward": ("x", "residual")}),
        ),
        "transformers_norm_facts": (
            "it knows which part of the row a rank has",
            has_attributes(f"{FUSERS}:TPAwareNormMixin", "tp_size", "tp_rank"),
        ),
        "transformers_norm_made": (
            "it takes the place of a model's norm, whose name in the model it is told",
            takes(f"{FUSERS}:RMSNormFuser.fuse", "module", "prefix", "vllm_config"),
        ),
    },
    "cpu_collectives": {
        "cpu_communicator": (
            "a communicator of CPUs gets ring buffers when made, and reduces and gathers "
            "through them",
            has_methods(
                f"{COMMUNICATORS}.cpu_communicator:CpuCommunicator",
                {"all_reduce": ("input_",), "all_gather": ("input_", "dim")},
            ),
        ),
        "cpu_communicator_module": (
            "what a communicator calls for its collectives is an attribute that can be set",
            has_attributes(f"{COMMUNICATORS}.cpu_communicator:CpuCommunicator", "dist_module"),
        ),
        "same_node": (
            "only ranks of one host get ring buffers",
            takes("vllm.distributed.parallel_state:in_the_same_node_as", "pg", "source_rank"),
        ),
    },
    "allreduce": {
        "communicator_constructor": (
            "a communicator gets its dispatcher when it is made, from the groups that it is "
            "made of",
            takes(
                f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator.__init__",
                *("cpu_group", "device", "device_group", "unique_name", "global_ranks"),
                *("global_world_size", "tcp_store_group", "use_all2all"),
            ),
        ),
        "communicator_methods": (
            "the dispatcher is asked in every all-reduce, and given back before vLLM's own "
            "parts go",
            has_methods(
                f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator",
                {"all_reduce": ("input_",), "destroy": (), "checkpoint_prepare": ()},
            ),
        ),
        "custom_all_reduce": (
            "vLLM's own kernel is one of the backends, and registers its buffers after a capture",
            has_methods(
                f"{COMMUNICATORS}.custom_all_reduce:CustomAllreduce",
                {"custom_all_reduce": ("input",), "capture": ()},
            ),
        ),
        "nccl_all_reduce": (
            "NCCL is one of the backends, through vLLM's own binding",
            has_methods(
                f"{COMMUNICATORS}.pynccl:PyNcclCommunicator",
                {"all_reduce": ("in_tensor", "out_tensor", "op", "stream")},
            ),
        ),
    },
    "fused_norm": {
        "pass_manager": (
            "our pass is put among vLLM's own when these are made, each asked for its identity",
            has_methods(
                f"{PASSES}.pass_manager:PostGradPassManager", {"configure": ("config",), "uuid": ()}
            ),
        ),
        "pass_list": (
            "vLLM runs the passes of a list, in its order",
            has_attributes(f"{PASSES}.pass_manager:PostGradPassManager", "passes"),
        ),
        "pass_context": (
            "a pass knows the numbers of tokens that its graph is for",
            has_attributes(f"{PASSES}.inductor_pass:PassContext", "compile_range"),
        ),
        "pass_base": (
            "a pass is a class of vLLM's, and asks which graph it is for",
            exists(
                f"{PASSES}.inductor_pass:InductorPass.is_applicable_for_range",
                f"{PASSES}.inductor_pass:get_pass_context",
            ),
        ),
        "all_reduce_op": (
            "in a graph, an all-reduce is an op of a tensor and its group's name",
            takes("vllm.distributed.parallel_state:all_reduce", "tensor", "group_name"),
        ),
        "norm_ops": (
            "in a graph, norms are vLLM's own ops until its last passes",
            exists("vllm.ir.ops.layernorm:rms_norm", "vllm.ir.ops.layernorm:fused_add_rms_norm"),
        ),
        "quantiser_patterns": (
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
    },
    "fused_eager": {
        "eager_norm": (
            "models without compiler passes call it with their part of the sum, residual and norm",
            takes(
                "vllm.models.common.ops.fused_allreduce_rms_norm:fused_allreduce_rms_norm",
                *("hidden_states", "residual", "norm"),
            ),
        ),
        "eager_gemma_norm": (
            "the same with the norm that adds 1 to its weights",
            takes(
                "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm:"
                "fused_allreduce_gemma_rms_norm",
                *("hidden_states", "residual", "norm"),
            ),
        ),
    },
}
API_CHECKS: tuple[ApiCheck, ...] = tuple(
    ApiCheck(name, part, why, probe, *since)
    for part, rows in _CHECKS.items()
    for name, (why, probe, *since) in rows.items()
)


def check_all(
    version: str, capability: str | None = None, view: View = INSTALLED
) -> tuple[CheckOutcome, ...]:
    """Probe every API check, or those of one part, of the vLLM that calls itself `version`."""
    wanted = (api for api in API_CHECKS if capability in (None, api.capability))
    return tuple(check(api, version, view) for api in wanted)
