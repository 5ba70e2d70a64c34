"""`CommextNixlConnector`: vLLM's KV-connector interface, of the scheduler and of the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_commext.compat import engine_wait, fits, kv_connector
from vllm_commext.compat.kv_connector import required_cache_layout
from vllm_commext.errors import ConfigError, UnsupportedError
from vllm_commext.nixl import engine_facts
from vllm_commext.nixl.config import ConnectorConfig, parse_config
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.first_token import FirstToken, Sampler
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.prometheus import CommextNixlPromMetrics, CommextNixlStats
from vllm_commext.nixl.scheduler import SchedulerSide
from vllm_commext.nixl.vllm_cache import ONE_STAGE, Pipeline, gather_bytes, groups_of
from vllm_commext.nixl.worker import WorkerSide, metadata_of

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_commext.compat import resets

# vLLM imports this module where the connector is to be used and nowhere else, before any cache is
# shaped.
kv_connector.ask_for_dim_first()


def pipeline_of(vllm_config: VllmConfig) -> Pipeline:
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return ONE_STAGE
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    return Pipeline(
        group.world_size, group.rank_in_group, lambda own: gather_bytes(own, group.cpu_group)
    )


class CommextNixlConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the KV cache of prompts from prefill to decode engines over NIXL; the decode engine
    reads.

    vLLM makes one in its scheduler's process and one in each worker, told apart by ``role``.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.engine_id is None:
            raise UnsupportedError("kv_transfer_config has no engine_id")
        config = parse_config(
            transfer.kv_connector_extra_config,
            default_host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            default_port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        )
        if config.peers and not transfer.is_kv_consumer:
            raise ConfigError(
                "kv_connector_extra_config['peers'] names prefill engines to read from, which "
                f"kv_role {transfer.kv_role!r} does not do: set it on the decode engines"
            )
        engine_facts.check_supported(vllm_config, kv_cache_config, config)
        streaming = engine_facts.streaming_of(vllm_config, kv_cache_config, config)
        reusing = engine_facts.reusing_of(vllm_config, kv_cache_config, config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self.engine_wait: engine_wait.EngineWait | None = None
        self.pauses: resets.Pauses | None = None
        if role == KVConnectorRole.SCHEDULER:
            engine = EngineContext(
                engine_id=transfer.engine_id,
                config=config,
                groups=groups_of(kv_cache_config),
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
                port=config.side_channel_port + vllm_config.parallel_config.data_parallel_index,
                pp_size=vllm_config.parallel_config.pipeline_parallel_size,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                saves=engine_facts.keeps_host_copy(vllm_config, config),
                sampler=self._sampler_of(vllm_config, kv_cache_config, config),
                streaming=streaming,
                reusing=reusing,
                identity=Identity(
                    engine_facts.adapter_settings(vllm_config),
                    engine_facts.weight_files(vllm_config)
                    if config.enforce_handshake_compat
                    else None,
                ),
            )
            self._scheduler_side = SchedulerSide(engine)
            self._hook_in(self._scheduler_side)
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self._worker_side = WorkerSide(
                transfer.engine_id,
                config,
                engine_facts.engine_facts(vllm_config, kv_cache_config),
                kv_cache_config,
                engine_facts.model_facts(vllm_config, get_tensor_model_parallel_rank()),
                keeps_host_copy=engine_facts.keeps_host_copy(vllm_config, config),
                pipeline=pipeline_of(vllm_config),
                stream_pieces=streaming.pieces_per_row,
                max_reuse_blocks=reusing.max_blocks,
            )

    @staticmethod
    def _sampler_of(
        vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
    ) -> Sampler:
        if fits.why_not("nixl first token"):
            return Sampler(refusal=FirstToken.ENGINE)
        from vllm_commext.compat.first_token import sampler_of

        return sampler_of(
            vllm_config,
            lambda: engine_facts.engine_facts(vllm_config, kv_cache_config),
            is_on=config.first_token_from_prefill,
        )

    def _hook_in(self, side: SchedulerSide) -> None:
        """Let the engine sleep while it only waits for transfers, and hear of its pauses, where
        that can be."""
        try:
            for part in ("engine step", "nixl first token", "pauses"):
                fits.admit(part)
            from vllm_commext.compat import resets
            from vllm_commext.compat.first_token import FirstTokens

            engine_wait.install()
            resets.install()
        except UnsupportedError as error:
            level = fits.level_of(error)
            logger.log(
                level,
                "idle sleep disabled, a core is busy while the engine waits for transfers: %s",
                error,
            )
            return
        self.pauses = pauses = resets.Pauses(side)
        side.engine.identity.adapters.is_told = True
        first_tokens = FirstTokens(side.prompts)

        def before_step(core: Any) -> None:
            pauses.before_step(core)
            first_tokens.before_step(core)

        self.engine_wait = engine_wait.EngineWait(side.engine.wakeup, side, before_step)

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "not the scheduler's connector"
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker_side is not None, "not a worker's connector"
        return self._worker_side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return required_cache_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """No: other memory takes the cache's place when the engine wakes up (vLLM 0.33 and
        newer ask; ``check_supported`` refuses it in 0.32)."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return CommextNixlStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return CommextNixlPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_side.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.serve(metadata)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.serve({(0, rank): worker for rank, worker in metadata.items()})

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.note_arrival(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Prompt tokens that can be loaded, and whether that happens between steps; None where
        that is not known yet."""
        num_tokens = self.scheduler_side.prompts.num_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.prompts.plan(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.take_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.note_outcomes(
            connector_output.finished_recving or set(),
            connector_output.finished_sending or set(),
            connector_output.kv_connector_worker_meta,
        )

    def reset_cache(self) -> bool:
        self.scheduler_side.forget_computed()
        return True

    def has_pending_push_work(self) -> bool:
        """True if a paused engine must go on stepping: its workers are to know of the pause, and
        loads to end."""
        return self.pauses is not None and self.pauses.has_work()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.finish(request, block_ids)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before a step's kernels are launched: blocks may have gone to other requests."""
        self.worker_side.prepare_step(metadata_of(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_step(metadata_of(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save: decode engines read from the cache itself, or from a copy that
        ``wait_for_save`` brings up to date."""

    def wait_for_save(self) -> None:
        """Copy the prompts that this step has completed to the host, where a copy is kept."""
        self.worker_side.save(metadata_of(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        outcomes = self.worker_side.take_outcomes()
        return KVConnectorTransferResults(
            finished_sending=outcomes.sent,
            finished_recving=outcomes.received,
            failed_recving=outcomes.failed.keys() - self.worker_side.unread,
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.take_metadata()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker_side is not None:
            data = self._worker_side.recorder.take()
        else:
            data = self.scheduler_side.take_stats()
        return CommextNixlStats(data) if data is not None else None

    def shutdown(self) -> None:
        if self._worker_side is not None:
            self._worker_side.close()
        if self._scheduler_side is not None:
            self._scheduler_side.close()
