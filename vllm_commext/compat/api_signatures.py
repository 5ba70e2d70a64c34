"""Methods of vLLM's that ours stand in for, each with the arguments that it is called with."""

from collections.abc import Mapping

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
